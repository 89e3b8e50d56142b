"""Fixed point: numbers as whole numbers modulo 2^32 or 2^64, so that masks are uniform and sums of them exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FINEST = 40  # binary places: beyond them a double has none for copies of ordinary size
_COARSEST = 12
Whole = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class FixedPoint:
    """So many binary places that the sum of all members' numbers, each at most `range`, stays below 2^(bits - 2).

    That is half of what fits, so that of numbers that are noise every second one is seen to be no sum.

    >>> point = FixedPoint(32, 64.0, 100)
    >>> point.places, point.decode(point.encode(np.array([0.25, -3.0]))).tolist()
    (17, [0.25, -3.0])
    """

    bits: int
    range: float
    members: int

    def __post_init__(self) -> None:
        if self.places < _COARSEST:
            cure = (
                "take secure.bits=64, or a smaller secure.range" if self.bits == 32 else "take a smaller secure.range"
            )
            raise ValueError(
                f"secure sums of {self.members} clients with numbers up to {self.range:g} in {self.bits} bits would be "
                f"rounded to {self.step:.2g}; {cure}"
            )

    @property
    def places(self) -> int:
        """Binary places behind the point."""
        # the 1/2 is what rounding adds to a number at the range
        return min(_FINEST, math.floor(self.bits - 2 - math.log2(self.members) - math.log2(self.range + 0.5)))

    @property
    def step(self) -> float:
        """The distance of two numbers; each number is off by at most half of it, and nothing is lost in a sum."""
        return 2.0**-self.places

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the whole numbers."""
        return whole_dtype(self.bits)

    def encode(self, numbers: NDArray[np.float64]) -> Whole:
        """Numbers within the range as whole numbers."""
        signed: NDArray[np.int64] = np.rint(numbers * 2.0**self.places).astype(np.int64)
        return wrapped(signed, self.bits)

    def decode(self, whole: Whole) -> NDArray[np.float64]:
        """A sum of what `encode` gave as a number again."""
        return unwrapped(whole) * self.step

    def largest(self, members: int) -> float:
        """What a number of the sum of so many members is never beyond."""
        return members * (self.range + self.step / 2)


def whole_dtype(bits: int) -> np.dtype[Any]:
    """Of whole numbers modulo 2^bits, lowest byte first on every machine."""
    return np.dtype(f"<u{bits // 8}")


def wrapped(signed: NDArray[np.int64], bits: int) -> Whole:
    """Numbers with a sign, modulo 2^bits."""
    return signed.astype(np.uint64).astype(whole_dtype(bits))


def unwrapped(whole: Whole) -> NDArray[np.float64]:
    """What `wrapped` gave, with its sign again."""
    return whole.view(np.dtype(f"<i{whole.dtype.itemsize}")).astype(np.float64)
