"""The letters of secure sums: short byte strings as rows of an array, and what a client is told of its circles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedquilt.deploy.transport.wire import Refused


class Told(NamedTuple):
    """What a client is told of one of its circles: which units, what it multiplies them by, how many are planned."""

    units: tuple[str, ...]
    share: float
    planned: int

    @staticmethod
    def read(text: Mapping[str, Any]) -> Told:
        """What `_asdict` wrote, as text."""
        return Told(tuple(map(str, text["units"])), float(text["share"]), int(text["planned"]))


def write_bytes(strings: Sequence[bytes]) -> NDArray[np.uint8]:
    """(n, length) byte strings of one length.

    >>> write_bytes([b"ab", b"cd"]).shape, write_bytes([]).shape
    ((2, 2), (0, 0))
    """
    if not strings:
        return np.zeros((0, 0), np.uint8)
    return np.frombuffer(b"".join(strings), np.uint8).reshape(len(strings), -1)


def read_bytes(array: NDArray[Any] | None, whose: Sequence[int], length: int | None = None) -> dict[int, bytes]:
    """Byte strings by the numbers of those that they are of; refused where they are not as many, or not so long.

    >>> read_bytes(write_bytes([b"ab", b"cd"]), [3, 5])
    {3: b'ab', 5: b'cd'}
    """
    if array is None:
        raise Refused("missing-unit")
    if array.dtype != np.uint8 or array.ndim != 2 or len(array) != len(whose):
        raise Refused("wrong-shape")
    if length is not None and len(array) and array.shape[1] != length:
        raise Refused("wrong-shape")
    return {int(number): row.tobytes() for number, row in zip(whose, array, strict=True)}
