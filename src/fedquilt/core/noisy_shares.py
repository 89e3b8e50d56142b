"""Noise in shares (dp.level=distributed): under secure sums each client adds a part of it, and no sum is without.

The distributed discrete Gaussian mechanism (Kairouz, Liu and Steinke 2021). A client's change, all units together, is
shortened to the clip C, rounded towards zero to a grid, and gets whole numbers from a discrete Gaussian of `SIGMA`
steps. The step is such that the noise of `enough` clients together is z C long. Noise in whole numbers has the
concentrated privacy of Gaussian noise of that length; a sum of several has it up to 10 (n - 1) exp(-pi^2 SIGMA^2) a
number, which is 0 to thousands of digits. Rounding towards zero makes no change longer, and a sum that wraps around
tells no more than one that does not.

It differs from the paper in that nothing is rotated: the grid is so fine, and the bits are so many, that there is
nothing to gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.core.protection import places, received
from fedquilt.interface.messages import Instructions, Update
from fedquilt.privacy import Privacy
from fedquilt.privacy.discrete_gaussian import Words, discrete_gaussian
from fedquilt.privacy.mechanism import INSIDE
from fedquilt.secure.fixed_point import Whole, unwrapped, wrapped
from fedquilt.secure.settings import SecureSums

SIGMA = 2**16  # steps of the grid that a client's share of the noise is long
_TAIL = 16  # lengths of noise that one share is never longer than


def in_shares(privacy: Privacy | None) -> Privacy | None:
    """The privacy of a run, where its clients add noise in shares."""
    return privacy if privacy is not None and privacy.level == "distributed" else None


@dataclass(frozen=True)
class NoisyShares:
    """The grid and the noise of one circle's sum, of so many members that gave keys.

    >>> shares = NoisyShares(Privacy(noise=2.0, clip=0.5, level="distributed"), SecureSums(), members=8)
    >>> shares.enough, shares.step == 2.0 * 0.5 / (4**0.5 * SIGMA)
    (4, True)
    """

    privacy: Privacy
    settings: SecureSums
    members: int

    def __post_init__(self) -> None:
        if self.largest(self.members) / self.step >= 2.0 ** (self.settings.bits - 1):
            cure = "take secure.bits=64" if self.settings.bits == 32 else "give more noise"
            raise ValueError(
                f"dp.level=distributed: sums of {self.members} clients with noise of {self.privacy.found:.3g} do not "
                f"fit into {self.settings.bits} bits; {cure}"
            )

    @property
    def enough(self) -> int:
        """How many clients together add all of the noise; a sum of fewer is not opened."""
        return enough(self.privacy, self.members)

    @property
    def step(self) -> float:
        """The distance of two numbers of the grid."""
        return self.privacy.found * self.privacy.clip / (math.sqrt(self.enough) * SIGMA)

    def encode(self, change: NDArray[np.float64], words: Words) -> Whole:
        """A client's change with its share of the noise, in steps; `words` is what noise is drawn by."""
        steps = np.trunc(change / self.step).astype(np.int64) + discrete_gaussian(SIGMA, len(change), words)
        return wrapped(steps, self.settings.bits)

    def decode(self, whole: Whole) -> NDArray[np.float64]:
        """A sum of what `encode` gave as numbers again."""
        return unwrapped(whole) * self.step

    def largest(self, members: int) -> float:
        """What a number of the sum of so many members is never beyond."""
        return members * (self.privacy.clip + _TAIL * SIGMA * self.step)


def enough(privacy: Privacy, members: int) -> int:
    """How many of so many members together add all of the noise.

    >>> enough(Privacy(noise=1.0, level="distributed", honest=0.7), 10)
    7
    """
    return max(1, math.ceil(privacy.honest * members - 1e-9))


def clipped_changes(up: Update, down: Instructions, clip: float) -> Update:
    """How far clients moved from what they received, in double precision and at most as far as the clip, all units of a
    client together; nowhere, where one of its numbers is not finite: that it is not would tell of its data."""
    if not up.blocks:
        return up
    device, k = up.blocks[0].value.device, len(up.ids)
    moved = [block.value.double() - received(block, down).double() for block in up.blocks]
    squares = torch.zeros(k, dtype=torch.float64, device=device)
    for block, change in zip(up.blocks, moved, strict=True):
        squares.index_add_(0, places(block, k, device), change.square().sum(1))
    shrink = torch.where(squares > clip**2, INSIDE * clip / squares.sqrt(), 1.0)
    blocks = []
    for block, change in zip(up.blocks, moved, strict=True):
        at = places(block, k, device)
        finite = torch.isfinite(squares[at])[:, None]
        blocks.append(replace(block, value=torch.where(finite, shrink[at, None] * change, 0.0)))
    return replace(up, blocks=tuple(blocks))
