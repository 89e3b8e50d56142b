"""Layers that need another body inside a stack: batch norm that leaves padding out, convolutions as matrix products.

The engine swaps the class of the layers in its own copy of a model; parameters, buffers and results stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_mask: list[Tensor | None] = [None]


@contextmanager
def stackable(device: torch.device) -> Iterator[None]:
    """While this holds, attention is made of operations that batch over clients; PyTorch's fastest ones do not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


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


def lenient(module: nn.Module) -> nn.Module:
    """Swap, in place, the batch norms of an engine's own copy of a model: a last batch may well be a single sample."""
    for layer in _batch_norms(module):
        layer.__class__ = _LenientBatchNorm
    return module


def prepare(module: nn.Module, matmul_convolutions: bool) -> nn.Module:
    """Swap, in place, the layers of an engine's own copy of a model for those that suit a stack."""
    for layer in _batch_norms(module):
        layer.__class__ = _MaskedBatchNorm
    for layer in module.modules():
        if matmul_convolutions and type(layer) in (nn.Conv1d, nn.Conv2d) and _is_plain(layer):  # type: ignore[arg-type]
            layer.__class__ = _MatmulConv1d if type(layer) is nn.Conv1d else _MatmulConv2d
    return module
