"""Batch norm that leaves padding out, in few passes over memory: backward remembers what is normed and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_mask: ContextVar[Tensor | None] = ContextVar("mask", default=None)


@contextmanager
def padding(mask: Tensor | None) -> Iterator[None]:
    """While this holds, batch norms leave out the samples whose mask is 0."""
    token = _mask.set(mask)
    try:
        yield
    finally:
        _mask.reset(token)


def _over(x: Tensor) -> list[int]:
    """All dimensions of (batch, channels, ...) but the channels."""
    return [0, *range(2, x.ndim)]


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view([1, -1] + [1] * (x.ndim - 2))


class _Variance(torch.autograd.Function):
    """The mean square of what is real, (channels,), around its mean, which is given: it does not move with that."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mean: Tensor, real: Tensor, number: Tensor) -> Tensor:
        return ((x - _by_channel(mean, x)) * real).square().sum(_over(x)) / number

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, real, number = ctx.saved_tensors
        return (x - _by_channel(mean, x)) * (_by_channel(2 * grads[0] / number, x) * real), None, None, None


class _Scaled(torch.autograd.Function):
    """(x - mean) scale + shift, channel by channel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.addcmul(_by_channel(shift, x), x - _by_channel(mean, x), _by_channel(scale, x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (x, mean, scale), grad = ctx.saved_tensors, grads[0]
        total = grad.sum(_over(x))
        to_scale = ((x - _by_channel(mean, x)) * grad).sum(_over(x))
        return grad * _by_channel(scale, x), -total * scale, to_scale, total


def _statistics(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel over the real samples, and how many numbers these are of."""
    per_sample = x[0, 0].numel()
    if mask is None:
        variance, mean = torch.var_mean(x, _over(x), correction=0)
        return mean, variance, mean.new_full((), float(len(x) * per_sample))
    number = (mask.sum() * per_sample).clamp(min=1.0)
    real = mask.view([-1] + [1] * (x.ndim - 1))
    mean = (x * real).sum(_over(x)) / number
    variance = _Variance.apply(x, mean, real, number)  # type: ignore[no-untyped-call]
    return mean, variance, number


def _masked_norm(layer: nn.modules.batchnorm._BatchNorm, x: Tensor, mask: Tensor | None) -> Tensor:
    """Batch norm over the real samples of (batch, channels, ...); running statistics are updated in place."""
    if mask is not None and len(mask) != len(x):
        raise RuntimeError(
            f"a batch norm is given {len(x)} samples of a batch of {len(mask)}, so it is unknown which are padding"
        )
    x = x.float() if x.dtype == torch.bfloat16 else x  # sums of many numbers want all digits
    mean, variance, number = _statistics(x, mask)
    if layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None:
        # a step that is all padding leaves the statistics as they are
        real = mean.new_ones(()) if mask is None else (mask.sum() > 0).to(mean.dtype)
        layer.num_batches_tracked.add_(real.to(layer.num_batches_tracked.dtype))
        momentum: Tensor | float
        momentum = 1.0 / layer.num_batches_tracked.clamp(min=1) if layer.momentum is None else layer.momentum
        unbiased = variance.detach() * number / (number - 1).clamp(min=1.0)
        layer.running_mean.add_((mean.detach() - layer.running_mean) * (momentum * real))
        layer.running_var.add_((unbiased - layer.running_var) * (momentum * real))
    scale = torch.rsqrt(variance + layer.eps)
    shift = layer.bias if layer.affine else torch.zeros_like(mean)
    y: Tensor = _Scaled.apply(x, mean, scale * layer.weight if layer.affine else scale, shift)  # type: ignore[no-untyped-call]
    return y


class MaskedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm in a stack."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        return _masked_norm(self, input, _mask.get())


class LenientBatchNorm(MaskedBatchNorm):
    """Batch norm of one client by itself, which takes a batch of one value a channel as a stack does."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() == input.shape[1] or _mask.get() is not None:
            return super().forward(input)
        return nn.modules.batchnorm._BatchNorm.forward(self, input)


def batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    """All batch norms, subclasses that only differ in name included."""
    plain = nn.modules.batchnorm._BatchNorm.forward
    return (layer for layer in module.modules() if getattr(type(layer), "forward", None) is plain)
