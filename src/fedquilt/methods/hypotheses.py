"""Who could share a unit with whom: what was seen of clients in looks, and the groupings that it speaks for.

What was seen of a unit is a dict of tensors: `products` (K, K) and `noise` (K,), and whether each pair and each client
was there, `pairs` (K, K) and `times` (K,). Only clients of one circle are compared: they started from one point, or,
where a look takes several rounds, from points that are near to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.sharing import PRIVATE, circles_by_trait
from fedquilt.sharing.evidence import Evidence, agglomerate, evidence
from fedquilt.sharing.grouping import number_circles

Seen = dict[str, Tensor]
Visit = tuple[Tensor, Tensor, Tensor]  # of a round: who was heard, (k,), and what was measured on halves, (k, numbers)
_COARSER, _FINER = 1 / 3, 3.0  # times lam: proposals on either side of the one by lam


def seen_in(visits: Sequence[Visit], circle: Tensor) -> Seen:
    """What the rounds of a look say of a unit; who was heard in several counts with the mean of what it measured."""
    pairs = torch.zeros(len(circle), len(circle), dtype=torch.float64)
    seen = {"products": pairs.clone(), "pairs": pairs, "noise": pairs[0].clone(), "times": pairs[0].clone()}
    for group in circle[circle != PRIVATE].unique().tolist():
        mine = [[each[circle[visit[0]] == group] for each in visit] for visit in visits]
        who = torch.tensor(list(dict.fromkeys(i for ids, *_ in mine for i in ids.tolist())))
        if len(who) > 1:
            ids, *halves = (torch.cat(parts) for parts in zip(*(heard for heard in mine if len(heard[0])), strict=True))
            place = (ids[:, None] == who).nonzero()[:, 1]
            found = evidence(*(_means(half.double(), place) for half in halves))
            seen["products"][who[:, None], who], seen["noise"][who] = found.products, found.noise
            seen["pairs"][who[:, None], who], seen["times"][who] = 1, 1
    return seen


def _means(values: Tensor, place: Tensor) -> Tensor:
    """The means of those rows of values that have the same place."""
    times = place.bincount()[:, None]
    return values.new_zeros(len(times), values.shape[1]).index_add(0, place, values) / times


def enough(seen: Seen, circle: Tensor) -> bool:
    """Whether nearly all pairs that share a circle were seen."""
    shared = (circle[:, None] == circle) & (circle != PRIVATE)
    return bool((seen["pairs"][shared] > 0).double().mean() > 0.75) if bool(shared.any()) else True


def of_group(seen: Seen, who: Tensor) -> Evidence:
    """The evidence of some clients that were all seen; pairs that were not are taken to be as others are."""
    pairs = seen["pairs"][who[:, None], who]
    products = seen["products"][who[:, None], who] / pairs.clamp(min=1)
    others = (pairs > 0) & ~torch.eye(len(who), dtype=torch.bool)
    usual = products[others].mean() if bool(others.any()) else products.new_zeros(())
    return Evidence(torch.where(pairs > 0, products, usual), seen["noise"][who] / seen["times"][who])


def all_units(seen: Mapping[str, Seen]) -> Seen:
    """What was seen of all units together, each in terms of its own noise: a client's groups may be the same in all."""
    total: Seen = {}
    for of_unit in seen.values():
        scale = (of_unit["noise"].sum() / of_unit["times"].sum().clamp(min=1)).clamp(min=1e-300)
        scaled = {n: value / scale if n in ("products", "noise") else value for n, value in of_unit.items()}
        total = {name: total[name] + value for name, value in scaled.items()} if total else scaled
    # Pairs and times count units now, so that means are over units: what differs in one of them still shows.
    return total


def groups(seen: Seen, circle: Tensor, samples: Tensor, lam: float) -> Tensor:
    """(K,) each circle split as the evidence says; whoever is alone is private.

    Those who were not seen stay with the others where these stay together, and with one another where they part.
    """
    parts = torch.zeros_like(circle)
    for group in circle.unique().tolist():
        who = ((circle == group) & (seen["times"] > 0)).nonzero()[:, 0]
        if group != PRIVATE and len(who) > 1:
            found = agglomerate(of_group(seen, who), samples[who], lam)
            parts[who] = found + int(found.max() > 0)
    return tidy(number_circles(circle, parts, circle == PRIVATE))


def tidy(circle: Tensor) -> Tensor:
    """(K,) circles numbered in the order of their first client; whoever is alone is private.

    >>> tidy(torch.tensor([4, 2, 2, -1])).tolist()
    [-1, 0, 0, -1]
    """
    alone = (circle[:, None] == circle).sum(1) < 2
    return number_circles(circle, torch.zeros_like(circle), alone | (circle == PRIVATE))


def hypotheses(
    unit: str, circles: Mapping[str, Tensor], seen: Mapping[str, Seen], roster: Roster, lam: float, traits: bool
) -> dict[str, Tensor]:
    """By name, other ways to share a unit than its circles now, each once: finer circles, found in several ways."""
    circle, samples = circles[unit], roster.samples
    alike = all_units({name: of for name, of in seen.items() if bool((of["times"] > 0).any())})
    named = {
        "its own evidence": groups(seen[unit], circle, samples, lam),
        "its own evidence, fewer circles": groups(seen[unit], circle, samples, _COARSER * lam),
        "its own evidence, more circles": groups(seen[unit], circle, samples, _FINER * lam),
        "the circles above it": _as_above(unit, circles, roster),
        "all units together": groups(alike, circle, samples, lam) if alike else circle,
    }
    if traits:
        for trait in sorted({key for member in roster.members for key in member.traits}):
            values = circles_by_trait([member.traits.get(trait) for member in roster.members])
            named[f"the trait {trait}"] = tidy(number_circles(circle, values, (circle == PRIVATE) | (values < 0)))
    return different(named, circle)


def different(named: Mapping[str, Tensor], circle: Tensor) -> dict[str, Tensor]:
    """Those groupings that are not the present one, each once."""
    known, found = [tidy(circle).tolist()], {}
    for name, grouping in named.items():
        if grouping.tolist() not in known and bool((grouping != PRIVATE).any()):
            known.append(grouping.tolist())
            found[name] = grouping
    return found


def joined(circle: Tensor, values: Mapping[int, Tensor]) -> Tensor:
    """(K,) circles where those two are joined that are nearest to each other; `values` are the circles' own."""
    ids = list(values)
    if len(ids) < 2:
        return circle
    table = torch.stack([values[i].double() for i in ids])
    distance = torch.cdist(table, table).fill_diagonal_(torch.inf)
    nearest = distance.argmin(1)
    merged = circle.clone()
    for i, j in enumerate(nearest.tolist()):
        if i < j and nearest[j] == i:
            merged[circle == ids[j]] = ids[i]
    return merged


def _as_above(unit: str, circles: Mapping[str, Tensor], roster: Roster) -> Tensor:
    """(K,) its circles split as those of the unit above it are, client by client."""
    circle = circles[unit]
    upper = torch.tensor([int(circles[above(m, unit) or unit][i]) for i, m in enumerate(roster.members)])
    return tidy(number_circles(circle, upper, (circle == PRIVATE) | (upper == PRIVATE)))


def above(member: ClientInfo, unit: str) -> str | None:
    """The unit above one in a client's model; None where there is none."""
    units = list(member.units)
    return units[units.index(unit) + 1] if unit in units[:-1] else None


def top_down(roster: Roster) -> list[str]:
    """All units, those nearest to the output first."""
    height: dict[str, int] = {}
    for member in roster.members:
        for steps, unit in enumerate(reversed(list(member.units))):
            height[unit] = min(steps, height.get(unit, steps))
    return sorted(height, key=height.__getitem__)
