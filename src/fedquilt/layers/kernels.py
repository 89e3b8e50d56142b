"""Kernels in Triton for stacks of clients on a GPU, where PyTorch's libraries read or write more than they have to.

* A convolution without its windows: cuDNN has none for many clients with weights of their own, and as a matrix product
  the windows of all images are written and read again, nine times the image for a kernel of 3 x 3. For the gradients of
  kernels of many channels, where that is the faster way, the windows are written at the speed of memory.
* Products of which one side is large and each of its numbers is used a few times only, at full precision: reading or
  writing them is what it takes. Tensor cores do three products in TF32 that make up one in float32.

Sums are taken in one order, so the same numbers give the same bits. Triton is a part of PyTorch on Linux with CUDA; who
calls this has asked whether it is there (`stacked_products.there`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 640  # about as many as keep a GPU busy; a sum is divided among several where there are fewer
_CLIENTS = 65535  # as many as a launch counts

P = ParamSpec("P")
Result = TypeVar("Result")


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    x, w, bias, y, rows, height, width, out_height, out_width, image,
    IN: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of (pixels of all images of a client) x (channels it gives)."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    b = m // (out_height * out_width)
    i = (m % (out_height * out_width)) // out_width - PH
    j = m % out_width - PW
    x += client * image
    w += client * (KH * KW * IN * OUT)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if IN % BK == 0:  # pixel by pixel of the kernel: all channels of a tile are beside each other in memory
        for part in range(KH * KW * (IN // BK)):
            tap = part // (IN // BK)
            c = (part % (IN // BK)) * BK + tl.arange(0, BK)
            ii = i + tap // KW
            jj = j + tap % KW
            there = (m < rows) & (ii >= 0) & (ii < height) & (jj >= 0) & (jj < width)
            at = ((b * height + ii) * width + jj) * IN
            a = tl.load(x + at[:, None] + c[None, :], mask=there[:, None], other=0.0)
            v = tl.load(w + (tap * IN + c)[:, None] + o[None, :] * (KH * KW * IN), mask=(o < OUT)[None, :], other=0.0)
            acc = tl.dot(a, v, acc, input_precision=PRECISION)
    else:
        for first in range(0, KH * KW * IN, BK):
            k = first + tl.arange(0, BK)
            inside = k < KH * KW * IN
            ii = i[:, None] + (k // IN // KW)[None, :]
            jj = j[:, None] + (k // IN % KW)[None, :]
            there = (m < rows)[:, None] & inside[None, :] & (ii >= 0) & (ii < height) & (jj >= 0) & (jj < width)
            at = ((b[:, None] * height + ii) * width + jj) * IN + (k % IN)[None, :]
            a = tl.load(x + at, mask=there, other=0.0)
            at = k[:, None] + o[None, :] * (KH * KW * IN)
            v = tl.load(w + at, mask=inside[:, None] & (o < OUT)[None, :], other=0.0)
            acc = tl.dot(a, v, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + client * OUT + o, mask=o < OUT, other=0.0)[None, :]
    tl.store(
        y + client * rows * OUT + m[:, None] * OUT + o[None, :], acc, mask=(m < rows)[:, None] & (o < OUT)[None, :]
    )


@triton.jit  # type: ignore[untyped-decorator]
def _correlate(  # type: ignore[no-untyped-def]
    x, g, y, of_bias, rows, height, width, out_height, out_width, image, each, clients,
    IN: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of (numbers of a window) x (channels), summed over a part of the pixels of a client's images."""
    client = (tl.program_id(2) // PARTS).to(tl.int64)
    number = (tl.program_id(2) % PARTS).to(tl.int64)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = k < KH * KW * IN
    di = k // IN // KW - PH
    dj = k // IN % KW - PW
    x += client * image
    g += client * rows * OUT
    acc = tl.zeros((BK, BN), dtype=tl.float32)
    total = tl.zeros((BN,), dtype=tl.float32)
    begin = (tl.program_id(2) % PARTS) * each
    end = tl.minimum(begin + each, rows)
    for first in range(begin, end, BM):
        m = first + tl.arange(0, BM)
        ii = ((m % (out_height * out_width)) // out_width)[:, None] + di[None, :]
        jj = (m % out_width)[:, None] + dj[None, :]
        there = (m < end)[:, None] & inside[None, :] & (ii >= 0) & (ii < height) & (jj >= 0) & (jj < width)
        at = (((m // (out_height * out_width))[:, None] * height + ii) * width + jj) * IN + (k % IN)[None, :]
        a = tl.load(x + at, mask=there, other=0.0)
        v = tl.load(g + m[:, None] * OUT + o[None, :], mask=(m < end)[:, None] & (o < OUT)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), v, acc, input_precision=PRECISION)
        total += tl.sum(v, axis=0)
    row = number * clients + client
    place = (row * OUT + o[None, :]) * (KH * KW * IN) + k[:, None]
    tl.store(y + place, acc, mask=inside[:, None] & (o < OUT)[None, :])
    if tl.program_id(0) == 0:
        tl.store(of_bias + row * OUT + o, total, mask=o < OUT)


@triton.jit  # type: ignore[untyped-decorator]
def _windows(  # type: ignore[no-untyped-def]
    x, y, rows, height, width, out_height, out_width, image,
    IN: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of (pixels of all images of a client) x (numbers of a window)."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (m < rows)[:, None] & (k < KH * KW * IN)[None, :]
    ii = ((m % (out_height * out_width)) // out_width)[:, None] + (k // IN // KW - PH)[None, :]
    jj = (m % out_width)[:, None] + (k // IN % KW - PW)[None, :]
    at = (((m // (out_height * out_width))[:, None] * height + ii) * width + jj) * IN + (k % IN)[None, :]
    there = inside & (ii >= 0) & (ii < height) & (jj >= 0) & (jj < width)
    place = (client * rows + m)[:, None] * (KH * KW * IN) + k[None, :]
    tl.store(y + place, tl.load(x + client * image + at, mask=there, other=0.0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    a, b, y, M, N, K, a_client, a_row, a_column, b_client, b_row, b_column, each, part,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of a @ b of a client, summed over a part of a's columns."""
    client = (tl.program_id(2) // PARTS).to(tl.int64)
    number = (tl.program_id(2) % PARTS).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    a += client * a_client
    b += client * b_client
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    begin = (tl.program_id(2) % PARTS) * each
    end = tl.minimum(begin + each, K)
    for first in range(begin, end, BK):
        k = first + tl.arange(0, BK)
        u = tl.load(
            a + m[:, None] * a_row + k[None, :] * a_column, mask=(m < M)[:, None] & (k < end)[None, :], other=0.0
        )
        v = tl.load(
            b + k[:, None] * b_row + n[None, :] * b_column, mask=(k < end)[:, None] & (n < N)[None, :], other=0.0
        )
        acc = tl.dot(u, v, acc, input_precision="tf32x3")
    tl.store(
        y + number * part + client * M * N + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :]
    )


def _of_stacks(work: Callable[P, Result]) -> Callable[P, Result]:
    """On the GPU where the stacks are, as Triton takes the current one; in pieces where there are very many clients."""

    @wraps(work)
    def whole(*given: P.args, **named: P.kwargs) -> Result:
        stacks = [each for each in given if isinstance(each, Tensor)]
        with torch.cuda.device_of(stacks[0]):
            if len(stacks[0]) <= _CLIENTS:
                return work(*given, **named)
            parts = [each.split(_CLIENTS) if isinstance(each, Tensor) else [each] * len(stacks[0]) for each in given]
            call: Callable[..., Any] = work
            done = [call(*some, **named) for some in zip(*parts, strict=False)]
            one = isinstance(done[0], Tensor)
            joined: Any = torch.cat(done) if one else tuple(torch.cat(same) for same in zip(*done, strict=True))
            return joined  # type: ignore[no-any-return]

    return whole


@_of_stacks
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, pad: tuple[int, int], precision: str) -> Tensor:
    """Images (k, n, h, w, c) by kernels (k, out, kh, kw, c), a kernel's step being 1, to (k, n, out_h, out_w, out)."""
    k, n, h, w, c = x.shape
    out, kh, kw = weight.shape[1:4]
    out_h, out_w = h + 2 * pad[0] - kh + 1, w + 2 * pad[1] - kw + 1
    y = x.new_empty(k, n, out_h, out_w, out)
    wide, deep = _tile(out, 64), 32 if c % 32 == 0 else 16 if c % 16 == 0 else _tile(kh * kw * c, 32)
    rows = n * out_h * out_w
    _convolve[(triton.cdiv(rows, 128), triton.cdiv(out, wide), k)](
        x, weight, y if bias is None else bias, y, rows, h, w, out_h, out_w, n * h * w * c, c, out, kh, kw, *pad,
        bias is not None, 128, wide, deep, precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y


@_of_stacks
def correlate(
    x: Tensor, grad: Tensor, kernel: tuple[int, int], pad: tuple[int, int], precision: str
) -> tuple[Tensor, Tensor]:
    """The gradients (k, out, kh, kw, c) of kernels and (k, out) of what is added, from that of what they give."""
    k, n, h, w, c = x.shape
    out_h, out_w, out = grad.shape[2:]
    rows, wide = n * out_h * out_w, _tile(out, 64)
    tiles = triton.cdiv(kernel[0] * kernel[1] * c, 32), triton.cdiv(out, wide)
    parts, each = _parts(k * tiles[0] * tiles[1], rows, 64)
    y, of_bias = x.new_empty(parts, k, out, *kernel, c), x.new_empty(parts, k, out)
    _correlate[(*tiles, k * parts)](
        x, grad, y, of_bias, rows, h, w, out_h, out_w, n * h * w * c, each, k, c, out, *kernel, *pad, parts,
        64, wide, 32, precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    return (y[0], of_bias[0]) if parts == 1 else (y.sum(0), of_bias.sum(0))


@_of_stacks
def windows(x: Tensor, kernel: tuple[int, int], pad: tuple[int, int]) -> Tensor:
    """The windows of a convolution as rows: images (k, n, h, w, c) to (k, n * out_h * out_w, kh * kw * c)."""
    k, n, h, w, c = x.shape
    out_h, out_w = h + 2 * pad[0] - kernel[0] + 1, w + 2 * pad[1] - kernel[1] + 1
    rows, numbers = n * out_h * out_w, kernel[0] * kernel[1] * c
    y = x.new_empty(k, rows, numbers)
    wide = _tile(numbers, 128)
    _windows[(triton.cdiv(rows, 32), triton.cdiv(numbers, wide), k)](
        x, y, rows, h, w, out_h, out_w, n * h * w * c, c, *kernel, *pad, 32, wide, num_warps=4
    )
    return y


@_of_stacks
def multiply(a: Tensor, b: Tensor) -> Tensor:
    """(k, m, c) @ (k, c, n), however they lie in memory, with float32's precision; good where m or c is small."""
    a, b = _countable(a), _countable(b)
    (k, m, c), n = a.shape, b.shape[2]
    tall, wide, deep = (_tile(m, 64), 64, 32) if c > 16 else (32, 128, 16)
    tiles = triton.cdiv(m, tall), triton.cdiv(n, wide)
    parts, each = _parts(k * tiles[0] * tiles[1], c, 32)
    y = a.new_empty(parts, k, m, n)
    _multiply[(*tiles, k * parts)](
        a, b, y, m, n, c, *a.stride(), *b.stride(), each, y[0].numel(), parts, tall, wide, deep,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return y[0] if parts == 1 else y.sum(0)


def _countable(stack: Tensor) -> Tensor:
    """A stack in which a client's numbers are near enough to each other for a kernel to count the way."""
    way = sum((size - 1) * step for size, step in zip(stack.shape[1:], stack.stride()[1:], strict=True))
    return stack if way < 2**31 else stack.contiguous()


def _tile(numbers: int, most: int) -> int:
    """A power of two that covers so many numbers, within what tensor cores take."""
    return max(16, min(most, 1 << (numbers - 1).bit_length()))


def _parts(programs: int, length: int, step: int) -> tuple[int, int]:
    """In how many parts to take a sum, with so many programs already, and how long each is: a multiple of `step`."""
    parts = 1
    while 2 * parts * programs <= _PROGRAMS and length > 8 * parts * step:
        parts *= 2
    each = max(1, triton.cdiv(triton.cdiv(length, parts), step)) * step
    return max(1, triton.cdiv(length, each)), each


assert torch.version.cuda is not None or triton.knobs.runtime.interpret, "made for NVIDIA's GPUs"
