"""Layers with another body while they train: batch norm that leaves padding out, and in a stack linear layers and
losses of few operations. Convolutions and pools are in files of their own.

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

from fedquilt.training.convolutions import swap_convolutions
from fedquilt.training.dropout import swap_dropout
from fedquilt.training.pools import swap_pools

_mask: ContextVar[Tensor | None] = ContextVar("mask", default=None)
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


class _CrossEntropies(torch.autograd.Function):
    """Cross-entropy in a third of the operations that PyTorch's own comes apart into over a stack."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logs = logits.log_softmax(1)
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


@contextmanager
def padding(mask: Tensor | None) -> Iterator[None]:
    """While this holds, batch norms leave out the samples whose mask is 0."""
    token = _mask.set(mask)
    try:
        yield
    finally:
        _mask.reset(token)


def _masked_norm(layer: nn.modules.batchnorm._BatchNorm, x: Tensor, mask: Tensor | None) -> Tensor:
    """Batch norm over the real samples of (batch, channels, ...); running statistics are updated in place."""
    mask = x.new_ones(x.shape[0]) if mask is None else mask
    if len(mask) != len(x):
        raise RuntimeError(
            f"a batch norm is given {len(x)} samples of a batch of {len(mask)}, so it is unknown which are padding"
        )
    per_sample = x[0, 0].numel()
    shape = [1, -1] + [1] * (x.ndim - 2)
    weight = mask.view([-1] + [1] * (x.ndim - 1))
    over = [0, *range(2, x.ndim)]
    number = (mask.sum() * per_sample).clamp(min=1.0)
    mean = (x * weight).sum(over) / number
    variance = ((x - mean.view(shape)).square() * weight).sum(over) / number
    if layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None:
        real = (mask.sum() > 0).to(mean.dtype)  # a step that is all padding leaves the statistics as they are
        layer.num_batches_tracked.add_(real.to(layer.num_batches_tracked.dtype))
        momentum: Tensor | float
        momentum = 1.0 / layer.num_batches_tracked.clamp(min=1) if layer.momentum is None else layer.momentum
        unbiased = variance * number / (number - 1).clamp(min=1.0)
        layer.running_mean.add_((mean.detach() - layer.running_mean) * (momentum * real))
        layer.running_var.add_((unbiased.detach() - layer.running_var) * (momentum * real))
    y = (x - mean.view(shape)) * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        y = y * layer.weight.view(shape) + layer.bias.view(shape)
    return y


class _MaskedBatchNorm(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        return _masked_norm(self, input, _mask.get())


class _Affine(torch.autograd.Function):
    """x W^T + b with a gradient of W that lies in memory as W does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x @ weight.T
        return y if bias is None else y + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return (
            grads[0] @ weight if wants[0] else None,
            grads[0].T @ x if wants[1] else None,
            grads[0].sum(0) if wants[2] else None,
        )


class _StackLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 1:
            return super().forward(input)
        y: Tensor = _Affine.apply(input.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y if input.ndim == 2 else y.unflatten(0, input.shape[:-1])


class _LenientBatchNorm(_MaskedBatchNorm):
    """Batch norm of one client by itself, which takes a batch of one value a channel as a stack does."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() == input.shape[1]:
            return super().forward(input)
        return nn.modules.batchnorm._BatchNorm.forward(self, input)


def _batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    """All batch norms, subclasses that only differ in name included."""
    plain = nn.modules.batchnorm._BatchNorm.forward
    return (layer for layer in module.modules() if getattr(type(layer), "forward", None) is plain)


def prepare_one(module: nn.Module) -> nn.Module:
    """Swap, in place, layers of an engine's own copy of a model that trains one client after another.

    Batch norm takes batches of a single sample, which a last batch may well be; pools are faster.
    """
    for layer in _batch_norms(module):
        layer.__class__ = _LenientBatchNorm
    swap_pools(module, channels_last=False)
    swap_dropout(module)
    return module


def prepare_eval(module: nn.Module) -> nn.Module:
    """Swap, in place, norms that take their statistics from the batch for those that leave padding out."""
    for layer in _batch_norms(module):
        if getattr(layer, "running_mean", None) is None:
            layer.__class__ = _MaskedBatchNorm
    return module


def prepare_stack(module: nn.Module, gpu: bool) -> nn.Module:
    """Swap, in place, layers of an engine's own copy of a model for those that suit a stack, there on a GPU."""
    for layer in _batch_norms(module):
        layer.__class__ = _MaskedBatchNorm
    swap_pools(module, channels_last=gpu)
    swap_dropout(module)
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = _StackLinear
    if gpu:
        swap_convolutions(module)
    return module
