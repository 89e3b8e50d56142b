"""Pools of neighbours as a few operations on slices, at the speed of memory; the ones of PyTorch are slower."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class _MaxOfPairs(torch.autograd.Function):
    """The larger of each two neighbours along some dimensions; of equals the first in reading order, as in a pool."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
        kept = []
        for dim in reversed(dims):  # along a row first
            pairs = x.unflatten(dim, (-1, 2))
            first, second = pairs.select(dim + 1, 0), pairs.select(dim + 1, 1)
            # 1 where the second is larger, 0 elsewhere and between two infinities: a CPU is slow with truth values
            kept.append((second - first).nan_to_num(0.0).relu().sign())
            x = torch.maximum(first, second)
        return (x, *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])
        ctx.dims = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        for dim, kept in zip(ctx.dims, reversed(ctx.saved_tensors), strict=True):
            second = grad * kept
            grad = _interleaved(grad - second, second, dim)
        return grad, None


def _interleaved(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """The slices of two tensors along a dimension in turn: first, second, first, second, ..."""
    if dim == first.ndim - 1 and first.dtype == torch.float32 and not first.is_cuda:
        # Neighbours in memory are parts of a complex number: a CPU writes these in one go.
        return torch.view_as_real(torch.complex(first, second)).flatten(dim, dim + 1)
    pairs = first.new_empty(*first.shape[: dim + 1], 2, *first.shape[dim + 1 :])
    pairs.select(dim + 1, 0).copy_(first)
    pairs.select(dim + 1, 1).copy_(second)
    return pairs.flatten(dim, dim + 1)


class _MeanOfPools(torch.autograd.Function):
    """The mean of windows that lie side by side along some dimensions."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...], sides: tuple[int, ...]) -> Tensor:
        if x.is_cuda:  # read once
            for dim, side in reversed(list(zip(dims, sides, strict=True))):
                x = x.unflatten(dim, (-1, side))
            return x.mean([dim + 1 + at for at, dim in enumerate(dims)])
        for dim, side in zip(dims, sides, strict=True):  # rows first: they are added whole
            parts = x.unflatten(dim, (-1, side)).unbind(dim + 1)
            x = sum(parts[1:], parts[0])
        return x * (1.0 / math.prod(sides))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dims, ctx.sides = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0] * (1.0 / math.prod(ctx.sides))
        if grad.is_cuda:  # all that is written is written once
            for dim, side in reversed(list(zip(ctx.dims, ctx.sides, strict=True))):
                grad = grad.unsqueeze(dim + 1).expand(*grad.shape[: dim + 1], side, *grad.shape[dim + 1 :])
            for dim in ctx.dims:
                grad = grad.flatten(dim, dim + 1)
            return grad, None, None
        for dim, side in reversed(list(zip(ctx.dims, ctx.sides, strict=True))):
            if side == 2 and dim == grad.ndim - 1:
                grad = _interleaved(grad, grad, dim)
            else:
                parts = grad.new_empty(*grad.shape[: dim + 1], side, *grad.shape[dim + 1 :])
                grad = parts.copy_(grad.unsqueeze(dim + 1)).flatten(dim, dim + 1)
        return grad, None, None


def _whole_pools(x: Tensor, sides: tuple[int, ...], channels_last: bool) -> tuple[Tensor, tuple[int, ...]]:
    """(..., channels, *spatial) cut to whole pools, and its spatial dimensions; (..., *spatial, channels) if asked."""
    dims = tuple(range(x.ndim - len(sides), x.ndim))
    for dim, side in zip(dims, sides, strict=True):
        if x.shape[dim] % side:
            x = x.narrow(dim, 0, x.shape[dim] // side * side)
    return (x.movedim(dims[0] - 1, -1), tuple(dim - 1 for dim in dims)) if channels_last else (x, dims)


def _max_pool(x: Tensor, spatial: int, channels_last: bool) -> Tensor:
    x, dims = _whole_pools(x, (2,) * spatial, channels_last)
    y: Tensor = _MaxOfPairs.apply(x, dims)[0]  # type: ignore[no-untyped-call]
    return y.movedim(-1, dims[0]) if channels_last else y


def _avg_pool(x: Tensor, sides: tuple[int, ...], channels_last: bool) -> Tensor:
    x, dims = _whole_pools(x, sides, channels_last)
    y: Tensor = _MeanOfPools.apply(x, dims, sides)  # type: ignore[no-untyped-call]
    return y.movedim(-1, dims[0]) if channels_last else y


class _MaxPool1d(nn.MaxPool1d):
    channels_last = False

    def forward(self, input: Tensor) -> Tensor:
        return _max_pool(input, 1, self.channels_last)


class _MaxPool2d(nn.MaxPool2d):
    channels_last = False

    def forward(self, input: Tensor) -> Tensor:
        return _max_pool(input, 2, self.channels_last)


class _AvgPool1d(nn.AvgPool1d):
    channels_last = False

    def forward(self, input: Tensor) -> Tensor:
        return _avg_pool(input, _sides(self.kernel_size, 1), self.channels_last)


class _AvgPool2d(nn.AvgPool2d):
    channels_last = False

    def forward(self, input: Tensor) -> Tensor:
        return _avg_pool(input, _sides(self.kernel_size, 2), self.channels_last)


class _AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    channels_last = False

    def forward(self, input: Tensor) -> Tensor:
        return _adaptive(input, _sides(self.output_size, 1), self.channels_last)


class _AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    channels_last = False

    def forward(self, input: Tensor) -> Tensor:
        return _adaptive(input, _sides(self.output_size, 2), self.channels_last)


def _adaptive(x: Tensor, wanted: tuple[int | None, ...], channels_last: bool) -> Tensor:
    """The mean of as many windows as are wanted: one of all, some side by side, or a product with weights along each
    dimension, whose windows may overlap. PyTorch's own takes the clients of a stack one after another.
    """
    dims = tuple(range(x.ndim - len(wanted), x.ndim))
    sizes = [x.shape[dim] for dim in dims]
    sides = [size if side is None else side for size, side in zip(sizes, wanted, strict=True)]
    if set(sides) == {1}:
        return x.mean(dims, keepdim=True)
    if all(size % side == 0 for size, side in zip(sizes, sides, strict=True)):
        return _avg_pool(x, tuple(size // side for size, side in zip(sizes, sides, strict=True)), channels_last)
    for dim, size, side in zip(dims, sizes, sides, strict=True):
        x = (x.movedim(dim, -1) @ _windows(size, side, x)).movedim(-1, dim)
    return x


def _windows(size: int, side: int, like: Tensor) -> Tensor:
    """(size, side) the weights with which the windows of an adaptive pool take the mean."""
    place, window = torch.arange(size, device=like.device)[:, None], torch.arange(side, device=like.device)
    first, last = window * size // side, -(-(window + 1) * size // side)
    inside = ((place >= first) & (place < last)).to(like.dtype)
    return inside / (last - first)


_POOLS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MaxPool1d: _MaxPool1d,
    nn.MaxPool2d: _MaxPool2d,
    nn.AvgPool1d: _AvgPool1d,
    nn.AvgPool2d: _AvgPool2d,
}
_ADAPTIVE: dict[type[nn.Module], type[nn.Module]] = {
    nn.AdaptiveAvgPool1d: _AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: _AdaptiveAvgPool2d,
}


def _sides(size: Any, spatial: int) -> tuple[Any, ...]:
    """A size along each spatial dimension."""
    sides = tuple(size) if isinstance(size, tuple | list) else (size,)
    return sides if len(sides) == spatial else sides * spatial


def _is_plain_pool(pool: nn.Module) -> bool:
    """Whether windows lie side by side; and, where the maximum is taken, two by two."""
    given = vars(pool)
    spatial = 1 if isinstance(pool, nn.MaxPool1d | nn.AvgPool1d) else 2
    kernel, stride, pad = (_sides(given[name], spatial) for name in ("kernel_size", "stride", "padding"))
    if isinstance(pool, nn.MaxPool1d | nn.MaxPool2d):
        fits = set(kernel) == {2} and set(_sides(given["dilation"], spatial)) == {1} and not given["return_indices"]
    else:
        fits = given.get("divisor_override") is None
    return fits and kernel == stride and set(pad) == {0} and not given["ceil_mode"]


def swap_adaptive_pools(module: nn.Module, channels_last: bool) -> None:
    """Swap, in place, adaptive pools by the mean; `channels_last` says how their inputs lie in memory."""
    for layer in module.modules():
        if type(layer) in _ADAPTIVE:
            layer.__class__ = _ADAPTIVE[type(layer)]
            layer.channels_last = channels_last  # type: ignore[assignment]


def swap_pools(module: nn.Module, channels_last: bool) -> None:
    """Swap, in place, the pools whose windows lie side by side; `channels_last` says how their inputs lie in memory."""
    for layer in module.modules():
        if type(layer) in _POOLS and _is_plain_pool(layer):
            layer.__class__ = _POOLS[type(layer)]
            layer.channels_last = channels_last  # type: ignore[assignment]
