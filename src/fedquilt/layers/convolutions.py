"""Convolutions of a stack of clients: on a GPU as one matrix product, channels innermost in memory; in groups, as one
convolution of all clients' groups side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedquilt.layers.stacked_products import convolution, convolution_precision, convolves, stacked


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


def as_precise(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a layer multiplies, as precise as PyTorch's own layers would take it now (`torch.autocast`)."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    to = torch.get_autocast_dtype(device)
    return x.to(to), weight.to(to), None if bias is None else bias.to(to)


@torch.library.custom_op("fedquilt::convolution_product", mutates_args=())
def _times(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight, of one client or of a stack, at a convolution's precision, in a program that is recorded too."""
    with convolution_precision():
        return rows @ weight


@_times.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], weight.shape[-1])


@_times.register_vmap
def _(info: Any, in_dims: tuple[int | None, int | None], rows: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    k = info.batch_size
    return _times(stacked(rows, in_dims[0], k), stacked(weight, in_dims[1], k)), 0


class _Product(torch.autograd.Function):
    """rows @ weight, at a convolution's precision."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():  # how it is differentiated is said below
            y: Tensor = _times(rows, weight)
            return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        return _product(grads[0], weight.T) if ctx.needs_input_grad[0] else None, _product(rows.T, grads[0])


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
    return y


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], pad: tuple[int, int]) -> Tensor:
    """A 2-d convolution, channels innermost in memory: by a kernel of our own, or as one matrix product."""
    n, _, h, w = x.shape
    out, _, kh, kw = weight.shape
    if convolves(x, weight, stride):
        return convolution(x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1), bias, pad).permute(0, 3, 1, 2)
    x = x.permute(0, 2, 3, 1)  # (n, h, w, c)
    if pad != (0, 0):
        x = F.pad(x, (0, 0, pad[1], pad[1], pad[0], pad[0]))
    rows: Tensor  # (n * oh * ow, kh * kw * c)
    if (kh, kw) == (1, 1):  # no windows: the rows are the pixels
        rows = (x if stride == (1, 1) else x[:, :: stride[0], :: stride[1]]).flatten(0, 2)
    else:
        rows = _Windows.apply(x, (kh, kw), stride)  # type: ignore[no-untyped-call]
    y = _product(rows, weight.permute(2, 3, 1, 0).reshape(-1, out))
    if bias is not None:
        y = y + bias
    oh = (h + 2 * pad[0] - kh) // stride[0] + 1
    ow = (w + 2 * pad[1] - kw) // stride[1] + 1
    return y.view(n, oh, ow, out).permute(0, 3, 1, 2)


class _MatmulConv2d(nn.Conv2d):
    plainly = False  # whether outputs lie in memory channel by channel, which takes a copy

    def forward(self, input: Tensor) -> Tensor:
        stride, pad = (self.stride[0], self.stride[1]), (int(self.padding[0]), int(self.padding[1]))
        outputs = _convolve(*as_precise(input, self.weight, self.bias), stride, pad)
        return outputs.contiguous() if self.plainly else outputs


class _MatmulConv1d(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        x, weight, bias = as_precise(input, self.weight, self.bias)
        y = _convolve(x.unsqueeze(2), weight.unsqueeze(2), bias, (1, self.stride[0]), (0, int(self.padding[0])))
        return y.squeeze(2)


class _Shape(NamedTuple):
    """How a convolution of PyTorch goes over its input."""

    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def times(self, clients: int) -> _Shape:
        """That of so many clients whose channels lie side by side."""
        return self._replace(groups=self.groups * clients)


def _beside(tensor: Tensor, batch_dim: int | None, clients: int, dim: int) -> Tensor:
    """All clients' tensors as one, their channels (at `dim`) side by side."""
    stack = tensor.expand(clients, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)
    return stack.movedim(0, dim).flatten(dim, dim + 1)


def _innermost(stack: Tensor, weight: Tensor) -> Tensor:
    """Images for a convolution of each channel by itself: on a GPU that is several times faster with channels last."""
    by_itself = weight.shape[1] == 1 and stack.ndim == 4 and stack.is_cuda
    return stack.contiguous(memory_format=torch.channels_last) if by_itself else stack


class _Grouped(torch.autograd.Function):
    """A convolution in groups; PyTorch's own takes far more memory for a stack when it goes back."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, shape: _Shape) -> Tensor:
        none = [0] * len(shape.pad)
        return torch.convolution(
            x, weight, None, shape.stride, shape.pad, shape.dilation, False, none, shape.groups
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.shape = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight = _back(grads[0], x, weight, ctx.shape)
        return to_x if ctx.needs_input_grad[0] else None, to_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, shape: _Shape) -> tuple[Tensor, int]:
        k = info.batch_size
        weights = _beside(weight, in_dims[1], k, 0)
        one = _grouped(_innermost(_beside(x, in_dims[0], k, 1), weights), weights, shape.times(k))
        return one.unflatten(1, (k, -1)), 1


class _GroupedBack(torch.autograd.Function):
    """The gradients of a convolution in groups, from that of what it gives."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
        none = [0] * len(shape.pad)
        to_x, to_weight, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, shape.stride, shape.pad, shape.dilation, False, none, shape.groups,
            [True, True, False],
        )  # fmt: skip
        return to_x, to_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.shape = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # A convolution is linear in x and in the weight: its second derivatives are convolutions and their gradients.
        (grad, x, weight), (of_x, of_weight) = ctx.saved_tensors, grads
        to_grad = _grouped(of_x, weight, ctx.shape) + _grouped(x, of_weight, ctx.shape)
        return to_grad, _back(grad, x, of_weight, ctx.shape)[0], _back(grad, of_x, weight, ctx.shape)[1], None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], grad: Tensor, x: Tensor, weight: Tensor, shape: _Shape
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        k = info.batch_size
        weights = _beside(weight, in_dims[2], k, 0)
        grads, images = (_innermost(_beside(t, dim, k, 1), weights) for t, dim in zip((grad, x), in_dims, strict=False))
        to_x, to_weight = _back(grads, images, weights, shape.times(k))
        return (to_x.unflatten(1, (k, -1)), to_weight.unflatten(0, (k, -1))), (1, 0)


def _grouped(x: Tensor, weight: Tensor, shape: _Shape) -> Tensor:
    y: Tensor = _Grouped.apply(x, weight, shape)  # type: ignore[no-untyped-call]
    return y


def _back(grad: Tensor, x: Tensor, weight: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
    to_x, to_weight = _GroupedBack.apply(grad, x, weight, shape)  # type: ignore[no-untyped-call]
    return to_x, to_weight


def _in_groups(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    pad = tuple(int(side) for side in conv.padding)
    x, weight, bias = as_precise(x, conv.weight, conv.bias)
    batch = x if x.ndim == weight.ndim else x.unsqueeze(0)  # one sample by itself
    y = _grouped(batch, weight, _Shape(conv.stride, pad, conv.dilation, conv.groups))
    if bias is not None:
        y = y + bias.view([-1] + [1] * len(pad))
    return y if batch is x else y.squeeze(0)


class _GroupedConv1d(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return _in_groups(self, input)


class _GroupedConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return _in_groups(self, input)


def swap_convolutions(module: nn.Module, gpu: bool) -> None:
    """Swap, in place, convolutions in groups; on a GPU also plain ones, for matrix products. Oddly padded ones stay."""
    for layer in module.modules():
        kind: type[nn.Module] = type(layer)
        if not isinstance(layer, nn.Conv1d | nn.Conv2d) or kind not in (nn.Conv1d, nn.Conv2d):
            continue
        if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            continue
        if layer.groups > 1 or (gpu and set(layer.dilation) != {1}):
            layer.__class__ = _GroupedConv1d if kind is nn.Conv1d else _GroupedConv2d
        elif gpu:
            layer.__class__ = _MatmulConv1d if kind is nn.Conv1d else _MatmulConv2d


def lay_plainly(module: nn.Module) -> None:
    """Let convolutions that were swapped give outputs that lie in memory as PyTorch's own do.

    On a GPU, PyTorch's pool by the mean gives wrong gradients for padded images whose channels lie last (seen in 2.11).
    """
    for layer in module.modules():
        if isinstance(layer, _MatmulConv2d):
            layer.plainly = True
