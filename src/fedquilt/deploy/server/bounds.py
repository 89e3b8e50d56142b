"""How far an update may be from the others of its round.

A bound that knows one update alone must allow for every model; the round's others say what is usual. A unit's change is
measured against the numbers that the client was sent, so that a value that has gone astray does not make the honest
look like culprits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fedquilt.core.protection import CLIP, shortened, squared_distances
from fedquilt.interface.messages import Instructions
from fedquilt.privacy import Privacy
from fedquilt.privacy.mechanism import INSIDE, shrink

_SOME = 0.1  # a share of ordinary weights, below which changes are not compared
_ENOUGH = 3  # of two, nobody can say which is odd
_REPORTS = 1000.0  # times the usual size of a report
Answer = tuple[dict[str, Tensor], dict[str, Tensor]]  # values by unit, reports by name


def sent_values(down: Instructions) -> dict[str, Tensor]:
    """What a client was sent, by unit."""
    return {
        unit: part
        for block in down.blocks
        for unit, part in zip(block.units, torch.split(block.value[0], list(block.sizes)), strict=True)
    }


def change(value: Tensor, sent: Tensor | None) -> float:
    """How far a unit went, for each length of what was sent.

    >>> round(change(torch.ones(4) * 1.2, torch.ones(4)), 3)
    0.182
    """
    before = torch.zeros_like(value) if sent is None or sent.shape != value.shape else sent.to(value)
    length = float(before.double().norm()) + _SOME * math.sqrt(value.numel())
    return float((value.double() - before.double()).norm()) / max(length, 1e-12)


def clipped(answer: Answer, down: Instructions, privacy: Privacy | None) -> Answer:
    """An answer as it is where the server adds noise to a sum (dp.level=client): no further from what was sent than the
    clip, all units together. Clients see to that themselves; of one that does not, no more than that is merged."""
    values, reports = answer
    if privacy is None or privacy.level != "client" or not values:
        return answer
    clip = float(down.told[CLIP][0, 0]) if CLIP in down.told else privacy.clip
    sent = {unit: torch.zeros_like(value) for unit, value in values.items()} | sent_values(down)
    squares = torch.stack([squared_distances(sent[unit][None], value[None]) for unit, value in values.items()]).sum(0)
    if float(squares) <= clip**2:
        return answer
    factor = shrink(squares, INSIDE * clip)
    return {unit: shortened(sent[unit][None], value[None], factor)[0] for unit, value in values.items()}, reports


def outliers(
    answers: Mapping[int, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]],
    downs: Mapping[int, Instructions],
    most: float,
    privacy: Privacy | None = None,
) -> dict[int, str]:
    """Clients with a unit or report that is many times what is usual in the round, and which it was.

    Nobody where the server adds noise to a sum: all were clipped, and leaving one out would tell of others.
    """
    if privacy is not None and privacy.level == "client":
        return {}
    sent = {number: sent_values(downs[number]) for number in answers}
    changes = {n: {unit: change(v, sent[n].get(unit)) for unit, v in answers[n][0].items()} for n in answers}
    reports = {n: {name: float(r.double().norm()) for name, r in answers[n][1].items()} for n in answers}
    found = dict(_far(changes, lambda usual: most * max(usual, _SOME)))
    return dict(_far(reports, lambda usual: _REPORTS * max(usual, 1.0))) | found


def _far(sizes: Mapping[int, Mapping[str, float]], allowed: Callable[[float], float]) -> Iterator[tuple[int, str]]:
    for name in {name for own in sizes.values() for name in own}:
        own = {number: found[name] for number, found in sizes.items() if name in found}
        if len(own) >= _ENOUGH:
            limit = allowed(statistics.median(own.values()))
            yield from ((number, name) for number, size in own.items() if size > limit)
