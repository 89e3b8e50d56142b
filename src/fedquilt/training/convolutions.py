"""Convolutions as one matrix product, channels innermost in memory: the way of a stack of clients on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    plainly = False  # whether outputs lie in memory channel by channel, which takes a copy

    def forward(self, input: Tensor) -> Tensor:
        stride, pad = (self.stride[0], self.stride[1]), (int(self.padding[0]), int(self.padding[1]))
        outputs = _convolve(input, self.weight, self.bias, stride, pad)
        return outputs.contiguous() if self.plainly else outputs


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


def swap_convolutions(module: nn.Module) -> None:
    """Swap, in place, plain convolutions for matrix products; grouped, dilated and oddly padded ones stay."""
    for layer in module.modules():
        kind: type[nn.Module] = type(layer)
        if isinstance(layer, nn.Conv1d | nn.Conv2d) and kind in (nn.Conv1d, nn.Conv2d) and _is_plain(layer):
            layer.__class__ = _MatmulConv1d if kind is nn.Conv1d else _MatmulConv2d


def lay_plainly(module: nn.Module) -> None:
    """Let convolutions that were swapped give outputs that lie in memory as PyTorch's own do.

    On a GPU, PyTorch's pool by the mean gives wrong gradients for padded images whose channels lie last (seen in 2.11).
    """
    for layer in module.modules():
        if isinstance(layer, _MatmulConv2d):
            layer.plainly = True
