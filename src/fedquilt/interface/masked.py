"""What passes under secure sums in the place of clients' copies: sums for the server half, and what hiding took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedquilt.families.layout import Signature
from fedquilt.sharing.weighted_sums import Sums


@dataclass(frozen=True)
class Summed:
    """What the server gets of units that lie together under secure sums: sums of their circles, and of whom."""

    keys: tuple[tuple[str, Signature], ...]
    ids: Tensor  # (k,) who is in the sums, and who kept a faulty copy to itself: `sums.refused`
    sums: Sums


@dataclass(frozen=True)
class Masked:
    """What clients sent under masks in the place of copies, and what hiding it took."""

    sent: Mapping[str, Tensor | None]  # by unit the places of those who sent it
    up: Tensor  # (k,) bytes beside the numbers themselves
    down: Tensor  # (k,)
    sums: tuple[Summed, ...] = ()  # of all clients of the round; with its first message
