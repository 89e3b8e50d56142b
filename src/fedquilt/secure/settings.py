"""What is settled before secure sums begin: how few may be summed, how many must stay, and the fixed point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedquilt.secure.fixed_point import FixedPoint


@dataclass(frozen=True)
class SecureSums:
    """Secure sums per circle. In a circle of fewer than `minimum` clients of a round its units stay home in that round.

    More than the share `threshold` of those who hold shares of a client's secrets must answer for these to be put
    together; so many clients must collude with the server to open a copy. Copies are summed as whole numbers of `bits`
    bits; a client with a number beyond `range` sends nothing in that round: clipped, it would bend its circle's value
    without a word.

    >>> SecureSums(minimum=2)
    Traceback (most recent call last):
    ...
    ValueError: secure.minimum=2: of a sum of two, each knows the other's part; give at least 3
    """

    minimum: int = 3
    threshold: float = 0.5
    bits: int = 64
    range: float = 2.0**20

    def __post_init__(self) -> None:
        if self.minimum < 3:
            raise ValueError(
                f"secure.minimum={self.minimum}: of a sum of two, each knows the other's part; give at least 3"
            )
        if not 0.5 <= self.threshold < 1:
            raise ValueError(
                f"secure.threshold={self.threshold:g}: with half or fewer, the server could put together both kinds of "
                "masks of a client; give a share from 0.5 to below 1"
            )
        if self.bits not in (32, 64):
            raise ValueError(f"secure.bits={self.bits}: numbers are summed in 32 or 64 bits")
        if not 0 < self.range < float("inf"):
            raise ValueError(f"secure.range={self.range:g}: give the largest number that a copy may hold, above 0")

    def point(self, members: int) -> FixedPoint:
        """The fixed point that so many members can be summed in."""
        from fedquilt.secure.fixed_point import FixedPoint  # numpy: who reads a configuration does without it

        return FixedPoint(self.bits, self.range, members)

    def least(self, holders: int) -> int:
        """How many of those who hold shares must answer.

        >>> [SecureSums().least(holders) for holders in (3, 4, 5, 35)]
        [2, 3, 3, 18]
        """
        return int(self.threshold * holders + 1e-9) + 1

    @property
    def text(self) -> dict[str, Any]:
        """As plain values; `of` turns it back."""
        return asdict(self)

    @staticmethod
    def of(told: SecureSums | Mapping[str, Any] | bool | None) -> SecureSums | None:
        """What was asked for: True, settings, or nothing.

        >>> SecureSums.of({"minimum": 5}).minimum, SecureSums.of(False)
        (5, None)
        """
        if isinstance(told, SecureSums):
            return told
        if isinstance(told, Mapping):
            return SecureSums(**told)
        return SecureSums() if told else None


def check_installed() -> None:
    """Refuse with a sentence where the package that the protocol is made of is not there."""
    if find_spec("cryptography") is None:
        raise ValueError("secure sums need the package 'cryptography'; install it: pip install 'fedquilt[secure]'")
