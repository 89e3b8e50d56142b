"""Clipping, and Gaussian noise that is a function of keys: the same in every engine, on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedquilt._util.randomness import GOLDEN, mix, signed

INSIDE = 1 - 1e-12  # a change that was shortened is not longer than the clip by rounding of doubles
_BITS = 53  # of a hash, which a float64 holds exactly
_BLOCK = 2**20  # numbers of noise that are made at once


def shrink(squares: Tensor, clip: float | Tensor) -> Tensor:
    """(k,) what changes of these squared lengths are multiplied by, so that none is longer than the clip.

    >>> shrink(torch.tensor([4.0, 0.0, 0.25]), 1.0).tolist()
    [0.5, 1.0, 1.0]
    """
    return (clip / squares.sqrt()).clamp(max=1.0)


def gaussian(keys: Tensor, size: int) -> Tensor:
    """(k, size) independent normal numbers, a row for each key (k,), int64: a function of the key and the place.

    >>> gaussian(torch.tensor([7, 8]), 3)[1].equal(gaussian(torch.tensor([8]), 5)[0, :3])
    True
    """
    noise = torch.empty(len(keys), size, device=keys.device)
    start = mix(keys)[:, None]
    for columns in _columns(len(keys), size):
        # two hashes make the numbers of two neighbours, by cosine and sine (Box and Muller 1958)
        pair = torch.arange(columns.start // 2, (columns.stop + 1) // 2, device=keys.device)
        first, second = (_uniform(start + (2 * pair + which) * signed(GOLDEN)) for which in (0, 1))
        length, angle = (-2 * (1 - first).log()).sqrt(), (2 * math.pi) * second
        both = torch.stack([length * angle.cos(), length * angle.sin()], dim=2).flatten(1)
        noise[:, columns] = both[:, : columns.stop - columns.start].float()
    return noise


def _uniform(z: Tensor) -> Tensor:
    """Numbers from 0 up to, but without, 1."""
    whole: Tensor = (mix(z) >> (64 - _BITS)) & (2**_BITS - 1)
    return whole.double() * 2.0**-_BITS


def _columns(rows: int, size: int) -> Iterator[slice]:
    width = max(2, _BLOCK // max(1, rows) // 2 * 2)
    return (slice(at, min(size, at + width)) for at in range(0, size, width))
