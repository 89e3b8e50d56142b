"""Patches: the rows of circles that clients wear, offered to whoever has no place yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedquilt.interface.messages import Roster, Updates
from fedquilt.sharing import PRIVATE

Patch = tuple[int, ...]  # for some units, the circle of each
_MOST = 12  # patches that are offered: those that most clients wear
_CLEARLY = 4.0  # standard errors: a client with a place leaves it for a gain that is so clear,
_LEAST = 1e-3  # with this added to the error: losses of samples that are learnt by heart hardly differ, and are sure


def patches_of(circles: Mapping[str, Tensor], waiting: Tensor, roster: Roster, i: int) -> tuple[list[str], list[Patch]]:
    """The units of a client in which others of its architecture differ, and the patches: its own, then theirs."""
    mine = roster.members[i].units
    peers = [j for j, member in enumerate(roster.members) if member.units == mine and not waiting[j]]
    units = [unit for unit in mine if len(set(circles[unit][peers].tolist())) > 1]

    def worn(j: int) -> Patch:
        return tuple(int(circles[unit][j]) for unit in units)

    common = [patch for patch, _ in Counter(map(worn, peers)).most_common(_MOST)]
    return units, [worn(i), *common]


def offers(circles: Mapping[str, Tensor], waiting: Tensor, asked: Tensor, roster: Roster) -> dict[str, Tensor]:
    """By unit, which clients are offered the values of all its circles, (K,): those that choose among patches."""
    found: dict[str, Tensor] = {}
    for i in (waiting | asked).nonzero()[:, 0].tolist():
        for unit in patches_of(circles, waiting, roster, i)[0]:
            found.setdefault(unit, torch.zeros(len(roster), dtype=torch.bool))[i] = True
    return found


def cost_of(offered: Mapping[str, Tensor], circles: Mapping[str, Tensor], roster: Roster) -> float:
    """How many numbers more that is for the mean client than the value of its own circle."""
    cost, sizes = 0.0, roster.sizes()
    for unit, clients in offered.items():
        count = len(circles[unit][circles[unit] != PRIVATE].unique())
        cost += (count - 1) * float((clients * sizes[unit]).float().mean())
    return cost


def rows_of(circles: Mapping[str, Tensor], units: Sequence[str], patches: Sequence[Patch]) -> dict[str, Tensor]:
    """By unit, (patches,) the rows of the patches' circles among the unit's values; -1: one's own copy."""
    rows = {}
    for at, unit in enumerate(units):
        labels = circles[unit][circles[unit] != PRIVATE].unique().tolist()
        rows[unit] = torch.tensor([labels.index(p[at]) if p[at] in labels else -1 for p in patches])
    return rows


def choose(
    updates: Updates, circles: Mapping[str, Tensor], waiting: Tensor, asked: Tensor, roster: Roster
) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[int, tuple[float, float]]]:
    """The circles after clients took the patches that fit them best, those with a place only for a clear gain.

    With who waits and is asked from now on, and by how much, with its error, the loss of those who moved is lower.
    """
    new, waits, still = {u: c.clone() for u, c in circles.items()}, waiting.clone(), asked.clone()
    moved: dict[int, tuple[float, float]] = {}
    for up in updates.ups:
        if "fits" not in up.reports:
            continue
        for i, fits, errors in zip(up.ids, up.reports["fits"].cpu(), up.reports["errors"].cpu(), strict=True):
            if not (waiting[i] or asked[i]):  # nobody asked it: it is in a stack with somebody who was
                continue
            units, patches = patches_of(circles, waiting, roster, i)
            gains = fits[0] - fits
            if not waiting[i]:
                gains = torch.where(gains > _CLEARLY * (errors + _LEAST), gains, 0.0)
            best = int(gains.argmax())
            if patches[best] != patches[0]:
                for unit, group in zip(units, patches[best], strict=True):
                    new[unit][i] = group
                moved[i] = float(gains[best]), float(errors[best])
            waits[i] = still[i] = False
    return new, waits, still, moved


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


def with_most(circle: Tensor, before: Tensor, unseen: Tensor) -> Tensor:
    """(K,) circles where those that nobody has seen are, until they choose, with most of whom they shared one before.

    >>> circle, before, unseen = torch.tensor([0, 0, 1, 2]), torch.zeros(4), torch.tensor([False, False, False, True])
    >>> with_most(circle, before, unseen).tolist()
    [0, 0, 1, 0]
    """
    found = circle.clone()
    for i in unseen.nonzero()[:, 0].tolist():
        peers = circle[(before == before[i]) & ~unseen & (circle != PRIVATE)]
        if len(peers):
            found[i] = peers.mode().values
    return found
