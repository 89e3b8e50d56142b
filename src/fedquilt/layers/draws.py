"""Random numbers that are hashes of (client, round, step, call, place): the same in every engine and every stack.

PyTorch's own come from one generator for a whole stack, so that what a client draws would depend on who else is in it.
A place is hashed coordinate by coordinate: padding, which makes a batch longer, does not move what the others draw,
whichever dimension the batch is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fedquilt._util.randomness import mix, mix_number

_FACTOR, _STEP = 0x45D9F3B, 0x9E3779B  # odd
_BITS = 24  # of a hash, which a float32 holds exactly
_ALPHA = -1.7580993408473766  # what alpha dropout puts in place of a number: the limit of SELU


class drawing:
    """While this holds, a model draws from a stream: a client's in one step.

    The stream is told by an int64 tensor without dimensions, or by a number and the device to draw on.
    """

    def __init__(self, start: Tensor | int | None, device: torch.device | str = "cpu") -> None:
        self.start, self.device = start, device
        self.calls = 0

    def __enter__(self) -> None:
        self.token = _stream.set(None if self.start is None else self)

    def __exit__(self, *of_error: object) -> None:
        _stream.reset(self.token)

    def next(self) -> Tensor:
        """Where the next call starts: an int32 tensor without dimensions."""
        self.calls += 1
        if isinstance(self.start, Tensor):
            return _part_of(self.start, self.calls) if _in_one.get() else _part(self.start, self.calls)
        assert self.start is not None
        number = (
            mix_number(mix_number(self.start) + self.calls) & 0x7FFFFFFF
        )  # a device would take many launches for it
        return torch.full((), number, dtype=torch.int32, device=self.device)


_stream: ContextVar[drawing | None] = ContextVar("stream", default=None)


def hashes(shape: Sequence[int]) -> Tensor:
    """Whole numbers of 24 bits, int32, for so many places; every call takes the next part of the stream.

    >>> with drawing(torch.tensor(7)):
    ...     first, second = hashes([2, 3]), hashes([2, 3])
    >>> with drawing(7):
    ...     longer = hashes([5, 3])
    >>> torch.equal(first, longer[:2]), torch.equal(first, second)
    (True, False)
    """
    stream = _stream.get()
    if stream is None:
        raise RuntimeError(
            "this model draws random numbers once more while gradients are computed, and would draw other ones; leave "
            "layers that draw (dropout) out of what torch.utils.checkpoint runs again"
        )
    start, sizes = stream.next(), list(shape)
    return _places_of(start, sizes) if _in_one.get() else _hashed(start, sizes)


def _part(start: Tensor, call: int) -> Tensor:
    """Where the part of a stream begins that a call takes."""
    return (mix(mix(start) + call) & 0x7FFFFFFF).int()


def _hashed(z: Tensor, sizes: Sequence[int]) -> Tensor:
    """A hash for every place, from where a part of a stream begins."""
    for size in sizes:
        z = _stirred(z[..., None] + torch.arange(size, dtype=torch.int32, device=z.device) * _STEP)
    z = _stirred(z)
    found: Tensor = (z ^ (z >> 16)) & (2**_BITS - 1)
    return found


# The same as one operation each, for programs that are compiled: hashes overflow, and a compiler of C++ may take it
# that whole numbers never do.
_part_of = torch.library.custom_op("fedquilt::part_of_stream", _part, mutates_args=())
_places_of = torch.library.custom_op("fedquilt::hashes_of_places", _hashed, mutates_args=())
_part_of.register_fake(lambda start, call: torch.empty_like(start, dtype=torch.int32))
_places_of.register_fake(lambda z, sizes: z.new_empty(*z.shape, *sizes))
_part_of.register_vmap(lambda info, dims, start, call: (_part_of(start, call), dims[0]))
_places_of.register_vmap(lambda info, dims, z, sizes: (_places_of(z, sizes), dims[0]))
_in_one: ContextVar[bool] = ContextVar("in_one", default=False)


@contextmanager
def in_one_operation() -> Iterator[None]:
    """While this holds, hashes are operations that no compiler looks into."""
    token = _in_one.set(True)
    try:
        yield
    finally:
        _in_one.reset(token)


def _stirred(z: Tensor) -> Tensor:
    return (z ^ ((z >> 16) & 0xFFFF)) * _FACTOR  # 32 bits are enough here, and a CPU is twice as fast with them


def uniform(shape: Sequence[int]) -> Tensor:
    """Numbers from 0 up to, but without, 1."""
    return hashes(shape) * 2.0**-_BITS


def exponential(shape: Sequence[int]) -> Tensor:
    """Numbers over 0 whose mean is 1."""
    return -((hashes(shape) | 1) * 2.0**-_BITS).log()  # odd: neither 0 nor 1 is among them


def normal(shape: Sequence[int]) -> Tensor:
    """Numbers around 0 with a standard deviation of 1."""
    return (2 * exponential(shape)).sqrt() * (2 * math.pi * uniform(shape)).cos()


def kept(shape: Sequence[int], p: float) -> Tensor:
    """Which of so many places are kept, where a share p is dropped."""
    keep: Tensor = hashes(shape) >= round(p * 2**_BITS)
    return keep


def _places(x: Tensor, channels: bool) -> list[int]:
    """The shape of what is drawn: a number for each of x, or for each of its channels."""
    return [*x.shape[:2]] if channels else [*x.shape]


def dropped(x: Tensor, p: float, channels: bool = False, inplace: bool = False) -> Tensor:
    """Dropout of a share p of all numbers, or of whole channels of (batch, channels, ...)."""
    keep = kept(_places(x, channels), p) * (1 / (1 - p) if p < 1 else 0.0)
    keep = keep.to(x.dtype).view(*keep.shape, *[1] * (x.ndim - keep.ndim))
    return x.mul_(keep) if inplace else x * keep


def alpha_dropped(x: Tensor, p: float, channels: bool = False, inplace: bool = False) -> Tensor:
    """Dropout that keeps mean and deviation of what SELU gives (Klambauer et al. 2017)."""
    if p == 1:
        return x.mul_(0.0) if inplace else x * 0.0
    keep = kept(_places(x, channels), p).to(x.dtype)
    keep = keep.view(*keep.shape, *[1] * (x.ndim - keep.ndim))
    scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    shift = ((1 - keep) - p) * (scale * _ALPHA)
    return x.mul_(keep * scale).add_(shift) if inplace else x * (keep * scale) + shift
