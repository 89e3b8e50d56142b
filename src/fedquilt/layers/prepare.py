"""Layers with another body while they train: in a stack, linear layers and losses of few operations. Batch norms,
convolutions and pools are in files of their own.

The engine swaps the class of the layers in its own copy of a model; parameters, buffers and results stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedquilt.layers.convolutions import as_precise, swap_convolutions
from fedquilt.layers.dropout import swap_dropout
from fedquilt.layers.norms import LenientBatchNorm, MaskedBatchNorm, batch_norms
from fedquilt.layers.pools import swap_adaptive_pools, swap_pools
from fedquilt.layers.stacked_products import product

_in_stack: ContextVar[bool] = ContextVar("in_stack", default=False)


@contextmanager
def stackable(device: torch.device) -> Iterator[None]:
    """While this holds, attention and losses are made of operations that batch over clients; PyTorch's own do not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    token = _in_stack.set(True)
    try:
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        _in_stack.reset(token)


def _log_softmax(logits: Tensor) -> Tensor:
    """Of rows (n, classes). Rows shorter than a processor's vector PyTorch takes number by number, thrice as long."""
    if logits.is_cuda or logits.shape[1] >= 16:
        return logits.log_softmax(1)
    shifted = logits - logits.amax(1, keepdim=True)
    return shifted - shifted.exp().sum(1, keepdim=True).log()


class _CrossEntropies(torch.autograd.Function):
    """Cross-entropy in a third of the operations that PyTorch's own comes apart into over a stack."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logs = _log_softmax(logits)
        truth = y[:, None] == torch.arange(logits.shape[1], device=y.device)  # gathering takes a GPU longer
        return logs.where(truth, 0.0).sum(1).neg(), logs, truth

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logs, truth = ctx.saved_tensors
        return logs.exp().add(truth, alpha=-1) * grads[0][:, None], None


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of every sample, (n,), from logits (n, classes) and labels (n,)."""
    if _in_stack.get() and logits.ndim == 2:
        losses: Tensor = _CrossEntropies.apply(logits, y)[0]  # type: ignore[no-untyped-call]
        return losses
    return F.cross_entropy(logits, y, reduction="none")


class _Affine(torch.autograd.Function):
    """x W^T + b with a gradient of W that lies in memory as W does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = product(x, weight.T)
        return y if bias is None else y + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return (
            product(grads[0], weight) if wants[0] else None,
            product(grads[0].T, x) if wants[1] else None,
            grads[0].sum(0) if wants[2] else None,
        )


class _StackLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 1:
            return super().forward(input)
        x, weight, bias = as_precise(input.flatten(0, -2), self.weight, self.bias)
        y: Tensor = _Affine.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y if input.ndim == 2 else y.unflatten(0, input.shape[:-1])


class _Clamped(torch.autograd.Function):
    """ReLU6 that remembers what it gives, which the next layer remembers too; PyTorch's remembers what it is given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(0.0, 6.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        grad: Tensor = torch.ops.aten.hardtanh_backward(grads[0], y, 0.0, 6.0)
        return grad


class _StackReLU6(nn.ReLU6):
    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _Clamped.apply(input)  # type: ignore[no-untyped-call]
        return y


_IN_STACKS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _StackLinear, nn.ReLU6: _StackReLU6}


def prepare_one(module: nn.Module) -> nn.Module:
    """Swap, in place, layers of an engine's own copy of a model that trains one client after another.

    Batch norm takes batches of a single sample, which a last batch may well be; pools are faster.
    """
    for layer in batch_norms(module):
        layer.__class__ = LenientBatchNorm
    swap_pools(module, channels_last=False)
    swap_dropout(module)
    return module


def prepare_eval(module: nn.Module) -> nn.Module:
    """Swap, in place, norms that take their statistics from the batch for those that leave padding out."""
    for layer in batch_norms(module):
        if getattr(layer, "running_mean", None) is None:
            layer.__class__ = MaskedBatchNorm
    return module


def prepare_stack(module: nn.Module, gpu: bool) -> nn.Module:
    """Swap, in place, layers of an engine's own copy of a model for those that suit a stack, there on a GPU."""
    for layer in batch_norms(module):
        layer.__class__ = MaskedBatchNorm
    swap_pools(module, channels_last=gpu)
    swap_adaptive_pools(module, channels_last=gpu)
    swap_dropout(module)
    for layer in module.modules():
        if type(layer) in _IN_STACKS:
            layer.__class__ = _IN_STACKS[type(layer)]
    swap_convolutions(module, gpu)
    return module
