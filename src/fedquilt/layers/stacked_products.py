"""Products of a stack on a GPU by kernels of our own, where these are faster than what PyTorch has: convolutions of few
channels without their windows, and products of which one side is large and the other has few rows.

Each is an operation that a program can be recorded with, knows how to be stacked, and can be differentiated twice. On a
CPU each is what PyTorch computes, so that all but the kernels themselves can be tried anywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

_FEW_ROWS = 64
_LARGE_MATRIX = 2**16  # numbers; below that PyTorch's product takes as long
_FEW_CHANNELS = 64  # with more, products of windows take as long
_MANY_CHANNELS = 16  # from which on they are faster for the gradients of kernels
_INDEXED = 2**31  # numbers of a client that a kernel can count
_WIDEST = 64 * 65535  # columns, by what a launch counts


@cache
def there() -> bool:
    """Whether kernels can be made here: with Triton and a C compiler, on an NVIDIA GPU that has TF32."""
    if find_spec("triton") is None or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        from fedquilt.layers.step_kernels import sgd

        one = torch.ones(1, device="cuda")
        sgd(one, one.clone(), None, one.clone(), 0.0, False, 0.0)
        return float(one) == 0.0
    except Exception as error:  # whatever it is that Triton lacks
        told = f"no kernels of our own can be made here, so PyTorch's take their place, which are slower: {error}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return False


def stacked(tensor: Tensor, dim: int | None, clients: int) -> Tensor:
    """What vmap gives an operation, clients first; what all have in common is repeated without a copy."""
    return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _as_one_stack(tensor: Tensor, inner: int) -> Tensor:
    """All leading dimensions as one, so that `inner` are left besides."""
    return tensor.reshape(-1, *tensor.shape[tensor.ndim - inner :]).contiguous()


def _first(images: Tensor) -> Tensor:
    """Images (n, h, w, c) as PyTorch's convolutions have them, channels first."""
    return images.movedim(-1, 1)


# ---- products of which one side is large


@torch.library.custom_op("fedquilt::lean_product", mutates_args=())
def _lean_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of one client or of a stack; what is stacked twice is PyTorch's."""
    if a.ndim > 3 or not a.is_cuda:
        return a @ b
    from fedquilt.layers.kernels import multiply

    return multiply(a, b) if a.ndim == 3 else multiply(a[None], b[None])[0]


@_lean_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


@_lean_product.register_vmap
def _(info: Any, in_dims: tuple[int | None, int | None], a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    k = info.batch_size
    rows = stacked(a, in_dims[0], k)
    if in_dims[1] is None and b.ndim == 2:  # the same b for all, as for each sample's gradient: it is read once
        return (rows.flatten(0, 1) @ b).unflatten(0, rows.shape[:2]), 0
    return _lean_product(rows, stacked(b, in_dims[1], k)), 0


class _LeanProduct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():  # how it is differentiated is said below
            y: Tensor = _lean_product(a, b)
            return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return product(grads[0], b.T), product(a.T, grads[0])


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of a client, with float32's precision where PyTorch's would have it.

    >>> product(torch.ones(1, 2), torch.ones(2, 1))
    tensor([[2.]])
    """
    (m, inner), n = a.shape, b.shape[1]
    large = max(m * inner, inner * n, m * n)
    lean = a.is_cuda and a.dtype == torch.float32 and min(m, inner) <= _FEW_ROWS and _LARGE_MATRIX <= large < _INDEXED
    lean = lean and n <= _WIDEST
    if not lean or torch.backends.cuda.matmul.fp32_precision == "tf32" or not there():
        return a @ b
    y: Tensor = _LeanProduct.apply(a, b)  # type: ignore[no-untyped-call]
    return y


# ---- convolutions


@contextmanager
def convolution_precision() -> Iterator[None]:
    """Matrix products that stand for convolutions round as cuDNN's convolutions do (TF32 unless switched off)."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _precision() -> str:
    """As cuDNN's convolutions have it: TF32 unless it was switched off."""
    return "tf32" if torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"  # type: ignore[attr-defined]


@torch.library.custom_op("fedquilt::convolution", mutates_args=())
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, pad_h: int, pad_w: int) -> Tensor:
    """Images (..., n, h, w, c) by kernels (..., out, kh, kw, c), and (..., out) added; all with the same leading
    dimensions, or none."""
    images, kernels, pad = _as_one_stack(x, 4), _as_one_stack(weight, 4), (pad_h, pad_w)
    added = None if bias is None else _as_one_stack(bias, 1)
    if x.is_cuda:
        from fedquilt.layers.kernels import convolve

        y = convolve(images, kernels, added, pad, _precision())
    else:
        adds = [None] * len(images) if added is None else added
        each = zip(images, kernels.permute(0, 1, 4, 2, 3), adds, strict=True)
        stack = torch.stack([F.conv2d(_first(of), w, b, padding=pad) for of, w, b in each])
        y = stack.movedim(2, -1).contiguous()
    return y.reshape(*x.shape[:-4], *y.shape[1:])


@_convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, pad_h: int, pad_w: int) -> Tensor:
    out, kh, kw, _ = weight.shape[-4:]
    *outer, h, w, _ = x.shape
    return x.new_empty(*outer, h + 2 * pad_h - kh + 1, w + 2 * pad_w - kw + 1, out)


@_convolution.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor | None, pad_h: int, pad_w: int
) -> tuple[Tensor, int]:
    k = info.batch_size
    images = stacked(x, in_dims[0], k)
    together = images.numel() * max(1, -(-weight.shape[-4] // x.shape[-1])) * 4 < _INDEXED
    if in_dims[1] is None and in_dims[2] is None and images.ndim == 5 and together:  # as for each sample's gradient
        return _convolution(images.flatten(0, 1), weight, bias, pad_h, pad_w).unflatten(0, images.shape[:2]), 0
    added = None if bias is None else stacked(bias, in_dims[2], k)
    return _convolution(images, stacked(weight, in_dims[1], k), added, pad_h, pad_w), 0


@torch.library.custom_op("fedquilt::correlation", mutates_args=())
def _correlation(x: Tensor, grad: Tensor, kh: int, kw: int, pad_h: int, pad_w: int) -> tuple[Tensor, Tensor]:
    """The gradients of a convolution's kernels (..., out, kh, kw, c) and of what it adds (..., out)."""
    images, grads, pad = _as_one_stack(x, 4), _as_one_stack(grad, 4), (pad_h, pad_w)
    if x.is_cuda and x.shape[-1] < _MANY_CHANNELS:
        from fedquilt.layers.kernels import correlate

        y, added = correlate(images, grads, (kh, kw), pad, _precision())
    elif x.is_cuda:
        from fedquilt.layers.kernels import windows

        rows = windows(images, (kh, kw), pad)
        with convolution_precision():
            y = (grads.flatten(1, 3).mT @ rows).unflatten(2, (kh, kw, -1))
        added = grads.sum((1, 2, 3))
    else:
        shape, each = (grads.shape[-1], images.shape[-1], kh, kw), zip(images, grads, strict=True)
        stack = torch.stack([conv2d_weight(_first(of), shape, _first(g), padding=pad) for of, g in each])
        y, added = stack.permute(0, 1, 3, 4, 2).contiguous(), grads.sum((1, 2, 3))
    return y.reshape(*x.shape[:-4], *y.shape[1:]), added.reshape(*x.shape[:-4], -1)


@_correlation.register_fake
def _(x: Tensor, grad: Tensor, kh: int, kw: int, pad_h: int, pad_w: int) -> tuple[Tensor, Tensor]:
    outer, out = x.shape[:-4], grad.shape[-1]
    return x.new_empty(*outer, out, kh, kw, x.shape[-1]), x.new_empty(*outer, out)


@_correlation.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, grad: Tensor, kh: int, kw: int, pad_h: int, pad_w: int
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    k = info.batch_size
    return _correlation(stacked(x, in_dims[0], k), stacked(grad, in_dims[1], k), kh, kw, pad_h, pad_w), (0, 0)


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, pad_h: int, pad_w: int) -> Tensor:
        with torch.no_grad():
            y: Tensor = _convolution(x, weight, bias, pad_h, pad_w)
            return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.pad = inputs[3:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants, (kh, kw) = ctx.needs_input_grad, weight.shape[1:3]
        to_x = _back_to_images(grads[0], weight, ctx.pad) if wants[0] else None
        if not (wants[1] or wants[2]):
            return to_x, None, None, None, None
        to_weight, to_bias = _Correlation.apply(x, grads[0], kh, kw, *ctx.pad)  # type: ignore[no-untyped-call]
        return to_x, to_weight, to_bias if wants[2] else None, None, None


class _Correlation(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, grad: Tensor, kh: int, kw: int, pad_h: int, pad_w: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            y: tuple[Tensor, Tensor] = _correlation(x, grad, kh, kw, pad_h, pad_w)
            return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.pad = inputs[4:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Linear in both that it is given: with `grads` for kernels and what is added, it is a convolution again.
        x, grad = ctx.saved_tensors
        to_x = _back_to_images(grad, grads[0], ctx.pad) if ctx.needs_input_grad[0] else None
        return to_x, convolution(x, grads[0], grads[1], ctx.pad), None, None, None, None


def _back_to_images(grad: Tensor, weight: Tensor, pad: tuple[int, int]) -> Tensor:
    """The gradient of the images: a convolution with the kernels turned round."""
    kh, kw = weight.shape[1:3]
    return convolution(grad, weight.flip(1, 2).transpose(0, 3), None, (kh - 1 - pad[0], kw - 1 - pad[1]))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, pad: tuple[int, int]) -> Tensor:
    """Images (n, h, w, c) of a client by its kernels (out, kh, kw, c), a step of 1, to (n, out_h, out_w, out)."""
    y: Tensor = _Convolution.apply(x, weight, bias, *pad)  # type: ignore[no-untyped-call]
    return y


def convolves(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> bool:
    """Whether `convolution` is the faster way for images (n, c, h, w) and a weight (out, c, kh, kw) of PyTorch's."""
    out, c, kh, kw = weight.shape
    fits = x.is_cuda and x.dtype == torch.float32 and weight.dtype == torch.float32 and stride == (1, 1)
    small = c <= _FEW_CHANNELS and (kh, kw) != (1, 1) and x.numel() * max(1, -(-out // c)) * 4 < _INDEXED
    return fits and small and there()
