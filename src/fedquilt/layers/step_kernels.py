"""Steps of optimisers of a stack on a GPU as kernels in Triton, at the speed of memory.

PyTorch's own give each of a few blocks a piece of 65,536 numbers, which leaves most of a GPU without work. An infinite
number that nothing moves stays as it is, as with PyTorch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    theta, gradient, first, second, corrections, rate, numbers, new1, keep2, new2, decay, eps,
    DECAYS: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of Adam, or AdamW where decay is apart from the gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    lr = tl.load(rate)
    of_first = tl.load(corrections).to(tl.float32)
    of_second = tl.load(corrections + 1).to(tl.float32)
    p = tl.load(theta + at, mask=inside)
    g = tl.load(gradient + at, mask=inside)
    m = tl.load(first + at, mask=inside)
    v = tl.load(second + at, mask=inside)
    if DECAYS:
        if APART:
            p -= lr * decay * p
        else:
            g += decay * p
    m += new1 * (g - m)
    v = keep2 * v + new2 * g * g
    p -= lr / of_first * m / (tl.sqrt_rn(v) / tl.sqrt_rn(of_second) + eps)
    tl.store(theta + at, p, mask=inside)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sgd(  # type: ignore[no-untyped-def]
    theta, gradient, velocity, rate, numbers, momentum, decay,
    DECAYS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of SGD."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    p = tl.load(theta + at, mask=inside)
    g = tl.load(gradient + at, mask=inside)
    if DECAYS:
        g += decay * p
    if MOMENTUM:
        v = momentum * tl.load(velocity + at, mask=inside) + g
        tl.store(velocity + at, v, mask=inside)
        g = g + momentum * v if NESTEROV else v
    tl.store(theta + at, p - tl.load(rate) * g, mask=inside)


def adam(
    theta: Tensor, gradient: Tensor, first: Tensor, second: Tensor, corrections: Tensor, lr: Tensor,
    betas: tuple[float, float], decay: float, eps: float, apart: bool,
) -> None:  # fmt: skip
    """A step of Adam, in place, on tensors whose numbers lie in memory in one order; `corrections`: 1 - beta^step."""
    numbers = theta.numel()
    with torch.cuda.device_of(theta):
        _adam[(triton.cdiv(numbers, 1024),)](
            theta, gradient, first, second, corrections, lr, numbers, 1 - betas[0], betas[1], 1 - betas[1], decay, eps,
            decay != 0, apart, 1024, num_warps=4,
        )  # fmt: skip


def sgd(
    theta: Tensor, gradient: Tensor, velocity: Tensor | None, lr: Tensor, momentum: float, nesterov: bool, decay: float
) -> None:
    """A step of SGD, in place, on tensors whose numbers lie in memory in one order."""
    numbers = theta.numel()
    with torch.cuda.device_of(theta):
        _sgd[(triton.cdiv(numbers, 1024),)](
            theta, gradient, theta if velocity is None else velocity, lr, numbers, momentum, decay,
            decay != 0, velocity is not None, nesterov, 1024, num_warps=4,
        )  # fmt: skip
