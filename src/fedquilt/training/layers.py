"""Layers with another body while they train: batch norm that leaves padding out, pools at the memory's speed, in a
stack linear layers and losses of few operations, and there on a GPU convolutions as matrix products.

The engine swaps the class of the layers in its own copy of a model; parameters, buffers and results stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_mask: list[Tensor | None] = [None]
_in_stack = [False]


@contextmanager
def stackable(device: torch.device) -> Iterator[None]:
    """While this holds, attention and losses are made of operations that batch over clients; PyTorch's own do not."""
    before = torch.backends.mha.get_fastpath_enabled(), _in_stack[0]
    torch.backends.mha.set_fastpath_enabled(False)
    _in_stack[0] = True
    try:
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])
        _in_stack[0] = before[1]


class _CrossEntropies(torch.autograd.Function):
    """Cross-entropy in a third of the operations that PyTorch's own comes apart into over a stack."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logs = logits.log_softmax(1)
        right = logs.gather(1, y[:, None])
        return right[:, 0].neg(), logs, right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:], inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logs, right, y = ctx.saved_tensors
        rest = logs.exp().scatter(1, y[:, None], right.expm1())  # probabilities, minus 1 for the truth
        return rest * grads[0][:, None], None


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of every sample, (n,), from logits (n, classes) and labels (n,)."""
    if _in_stack[0] and logits.ndim == 2:
        losses: Tensor = _CrossEntropies.apply(logits, y)[0]  # type: ignore[no-untyped-call]
        return losses
    return F.cross_entropy(logits, y, reduction="none")


@contextmanager
def padding(mask: Tensor | None) -> Iterator[None]:
    """While this holds, batch norms leave out the samples whose mask is 0."""
    before, _mask[0] = _mask[0], mask
    try:
        yield
    finally:
        _mask[0] = before


def _masked_norm(layer: nn.modules.batchnorm._BatchNorm, x: Tensor, mask: Tensor | None) -> Tensor:
    """Batch norm over the real samples of (batch, channels, ...); running statistics are updated in place."""
    mask = x.new_ones(x.shape[0]) if mask is None else mask
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
        return _masked_norm(self, input, _mask[0])


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


class _Windows(torch.autograd.Function):
    """The windows of a convolution as rows: (n, h, w, c), padded, to (n * out_h * out_w, kh * kw * c)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        windows = x.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])  # (n, oh, ow, c, kh, kw)
        n, oh, ow, c = windows.shape[:4]
        return windows.permute(0, 1, 2, 4, 5, 3).reshape(n * oh * ow, kernel[0] * kernel[1] * c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel, ctx.stride = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (kh, kw), (sh, sw) = ctx.kernel, ctx.stride
        n, h, w, c = ctx.shape
        oh, ow = (h - kh) // sh + 1, (w - kw) // sw + 1
        parts = grads[0].reshape(n, oh, ow, kh, kw, c)
        out = parts.new_zeros(ctx.shape)
        for i in range(kh):
            for j in range(kw):
                out[:, i : i + sh * (oh - 1) + 1 : sh, j : j + sw * (ow - 1) + 1 : sw] += parts[:, :, :, i, j]
        return out, None, None


@contextmanager
def _convolution_precision() -> Iterator[None]:
    """Matrix products that stand for convolutions round as cuDNN's convolutions do (TF32 unless switched off)."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


class _Product(torch.autograd.Function):
    """rows @ weight, at a convolution's precision."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, weight: Tensor) -> Tensor:
        with _convolution_precision():
            return rows @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        with _convolution_precision():
            to_rows = grads[0] @ weight.T if ctx.needs_input_grad[0] else None
            return to_rows, rows.T @ grads[0]


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], pad: tuple[int, int]) -> Tensor:
    """A 2-d convolution as one matrix product, channels innermost in memory."""
    n, _, h, w = x.shape
    out, _, kh, kw = weight.shape
    x = x.permute(0, 2, 3, 1)  # (n, h, w, c)
    if pad != (0, 0):
        x = F.pad(x, (0, 0, pad[1], pad[1], pad[0], pad[0]))
    rows: Tensor = _Windows.apply(x, (kh, kw), stride)  # type: ignore[no-untyped-call]  # (n * oh * ow, kh * kw * c)
    y: Tensor = _Product.apply(rows, weight.permute(2, 3, 1, 0).reshape(-1, out))  # type: ignore[no-untyped-call]
    if bias is not None:
        y = y + bias
    oh = (h + 2 * pad[0] - kh) // stride[0] + 1
    ow = (w + 2 * pad[1] - kw) // stride[1] + 1
    return y.view(n, oh, ow, out).permute(0, 3, 1, 2)


class _MatmulConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        stride, pad = (self.stride[0], self.stride[1]), (int(self.padding[0]), int(self.padding[1]))
        return _convolve(input, self.weight, self.bias, stride, pad)


class _MatmulConv1d(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        y = _convolve(
            input.unsqueeze(2), self.weight.unsqueeze(2), self.bias, (1, self.stride[0]), (0, int(self.padding[0]))
        )
        return y.squeeze(2)


def _is_plain(conv: nn.Conv1d | nn.Conv2d) -> bool:
    return (
        conv.groups == 1
        and set(conv.dilation) == {1}
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
    )


class _MaxOfPairs(torch.autograd.Function):
    """The larger of each two neighbours along some dimensions; of equals the first in reading order, as in a pool."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
        kept = []
        for dim in reversed(dims):  # along a row first
            pairs = x.unflatten(dim, (-1, 2))
            first, second = pairs.select(dim + 1, 0), pairs.select(dim + 1, 1)
            kept.append(second > first)
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
        for dim, second in zip(ctx.dims, reversed(ctx.saved_tensors), strict=True):
            pairs = grad.new_empty(*grad.shape[: dim + 1], 2, *grad.shape[dim + 1 :])
            pairs.select(dim + 1, 1).copy_(grad * second)
            pairs.select(dim + 1, 0).copy_(grad * ~second)
            grad = pairs.flatten(dim, dim + 1)
        return grad, None


class _MeanOfPools(torch.autograd.Function):
    """The mean of windows that lie side by side along some dimensions."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...], sides: tuple[int, ...]) -> Tensor:
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
        for dim, side in reversed(list(zip(ctx.dims, ctx.sides, strict=True))):
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


_POOLS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MaxPool1d: _MaxPool1d,
    nn.MaxPool2d: _MaxPool2d,
    nn.AvgPool1d: _AvgPool1d,
    nn.AvgPool2d: _AvgPool2d,
}


def _sides(size: int | tuple[int, ...], spatial: int) -> tuple[int, ...]:
    """A size along each spatial dimension."""
    sides = (size,) if isinstance(size, int) else tuple(size)
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


def _swap_pools(module: nn.Module, channels_last: bool) -> None:
    """Pools of neighbours, which PyTorch has no fast way for on either device, become a few operations on slices."""
    for layer in module.modules():
        if type(layer) in _POOLS and _is_plain_pool(layer):
            layer.__class__ = _POOLS[type(layer)]
            layer.channels_last = channels_last  # type: ignore[assignment]


def prepare_one(module: nn.Module) -> nn.Module:
    """Swap, in place, layers of an engine's own copy of a model that trains one client after another.

    Batch norm takes batches of a single sample, which a last batch may well be; pools are faster.
    """
    for layer in _batch_norms(module):
        layer.__class__ = _LenientBatchNorm
    _swap_pools(module, channels_last=False)
    return module


def prepare_stack(module: nn.Module, gpu: bool) -> nn.Module:
    """Swap, in place, layers of an engine's own copy of a model for those that suit a stack, there on a GPU."""
    for layer in _batch_norms(module):
        layer.__class__ = _MaskedBatchNorm
    _swap_pools(module, channels_last=gpu)
    for layer in module.modules():
        kind: type[nn.Module] = type(layer)
        if kind is nn.Linear:
            layer.__class__ = _StackLinear
        if gpu and isinstance(layer, nn.Conv1d | nn.Conv2d) and kind in (nn.Conv1d, nn.Conv2d) and _is_plain(layer):
            layer.__class__ = _MatmulConv1d if kind is nn.Conv1d else _MatmulConv2d
    return module
