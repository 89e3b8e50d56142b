"""Patches: the rows of circles that clients wear, offered to whoever has no place yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedquilt.interface.messages import Roster
from fedquilt.sharing import PRIVATE

Patch = tuple[int, ...]  # for some units, the circle of each
_MOST = 12  # patches that are offered: those that most clients wear


def patches_of(circles: Mapping[str, Tensor], waiting: Tensor, roster: Roster, i: int) -> tuple[list[str], list[Patch]]:
    """The units of a client in which others of its architecture differ, and the patches: its own, then theirs."""
    mine = roster.members[i].units
    peers = [j for j, member in enumerate(roster.members) if member.units == mine and not waiting[j]]
    units = [unit for unit in mine if len(set(circles[unit][peers].tolist())) > 1]

    def worn(j: int) -> Patch:
        return tuple(int(circles[unit][j]) for unit in units)

    common = [patch for patch, _ in Counter(map(worn, peers)).most_common(_MOST)]
    return units, [worn(i), *common]


def rows_of(circles: Mapping[str, Tensor], units: Sequence[str], patches: Sequence[Patch]) -> dict[str, Tensor]:
    """By unit, (patches,) the rows of the patches' circles among the unit's values; -1: one's own copy."""
    rows = {}
    for at, unit in enumerate(units):
        labels = circles[unit][circles[unit] != PRIVATE].unique().tolist()
        rows[unit] = torch.tensor([labels.index(p[at]) if p[at] in labels else -1 for p in patches])
    return rows


def most_of(unit: str, circle: Tensor, before: Roster, roster: Roster) -> Tensor:
    """(K,) a unit's circles with those clients in the biggest circle of their shape whose unit was not there before."""
    shapes, old = roster.signatures()[unit], before.signatures().get(unit, [None] * len(before))
    now = torch.full((len(roster),), PRIVATE)
    now[: len(before)] = circle
    for i, shape in enumerate(shapes):
        if i < len(old) and old[i] == shape:
            continue
        peers = Counter(int(c) for c, of in zip(circle, old, strict=True) if of == shape and c != PRIVATE)
        free = max([*now.tolist(), -1]) + 1
        now[i] = PRIVATE if shape is None else peers.most_common(1)[0][0] if peers else free
    return now
