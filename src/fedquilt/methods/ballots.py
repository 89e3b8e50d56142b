"""What a client answers when it is asked about sharing: where it would go, what suits it, whose patch fits it.

Three answers, each of a few numbers. A *look*: how far a round of training on either half of its samples moves each
unit, sketched. A *ballot*: validation losses with candidate values of a unit. A *fit*: training losses with the units
that others wear.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.interface.me import Me
from fedquilt.interface.steps import Do, Step, Train
from fedquilt.sharing.sketch import sketch

LOOK, BALLOT, PATCH = "look", "ballot/", "patch/"  # what the server half tells, the latter two with a unit's name
CANDIDATES = 4  # of a ballot, at most, beside the two values that a client has
_WORST = 100.0  # a loss that is worse, or none at all, counts as this
_BLOCK = 4  # neighbours that go to one half together: windows of a signal overlap those next to them


# --- a look -----------------------------------------------------------------------------------------------------------


def look(size: int) -> tuple[Step, ...]:
    """Steps that train on one half of the samples, note where that led, and go back; then on the other half."""
    return tuple(
        step
        for which in (0, 1)
        for step in (
            Train(_on_half(which), rates=_shared, told=LOOK, when="round"),
            Do(partial(_note, which=which, size=size), reports=(f"half-{which}",), told=LOOK),
        )
    )


def _on_half(which: int) -> Objective:
    def term(me: Learner, batch: Batch) -> Tensor:
        assert batch.index is not None
        mine = _half_of(batch.index) == which
        return 2 * batch.mean(batch.losses(me.model(batch.x)) * mine)

    return Objective((term,), needs_index=True)


def _half_of(index: Tensor) -> Tensor:
    return index // _BLOCK % 2


def _shared(me: Me) -> Mapping[str, Tensor]:
    """Private units rest: the server has no value of theirs to go back to."""
    here = me.number(0.0)
    return {unit: me.receives[unit].float() if unit in me.receives else here for unit in me.values}


def _note(me: Me, which: int, size: int) -> Mapping[str, Tensor]:
    """How far each unit moved, sketched, unit after unit; and back to what was received."""
    moved = [
        sketch(me.values.trained(unit) - me.received.trained(unit), sketched(size, len(me.values.trained(unit))), unit)
        for unit in me.values
    ]
    return {unit: me.received[unit] for unit in me.values} | {f"half-{which}": torch.cat(moved)}


def sketched(size: int, numbers: int) -> int:
    """To how many numbers a unit is sketched: at most to half of its own, so that a look costs less than a model.

    >>> sketched(256, 10_000), sketched(256, 100)
    (256, 50)
    """
    return min(size, -(-numbers // 2))


# --- a ballot ---------------------------------------------------------------------------------------------------------


def ballot(me: Me) -> Mapping[str, Tensor]:
    """Its validation losses, (2, candidates), and of how many samples they are, (2,), on either half of them.

    The candidates of the unit that is asked about are what it received, those that it was told, and its own copy. A
    client trains on from what it receives, so it is judged half-way between that and its own copy.
    """
    asked = [unit for unit in me.values if BALLOT + unit in me.told]
    if not asked:
        return {}
    (unit,), (data, real) = asked, _samples(me)
    halfway = {other: (me.values[other] + me.received[other]) / 2 for other in me.values}
    losses = []
    for value in (me.received[unit], *me.told[BALLOT + unit].unbind(), me.values[unit]):
        model = me.at(halfway | {unit: (me.values[unit] + value) / 2})
        losses.append(data.losses(model(data.x)) if len(real) else real)  # some layers take no empty batch
    table = torch.stack(losses).nan_to_num(_WORST).clamp(max=_WORST)
    parts = [real * (_half_of(torch.arange(len(real), device=real.device)) == half) for half in (0, 1)]
    means = [(table * part).sum(1) / part.sum().clamp(min=1) for part in parts]
    return {"losses": torch.stack(means), "judged": torch.stack([part.sum() for part in parts])}


def _samples(me: Me) -> tuple[Batch, Tensor]:
    """The samples of the split that a step looks at, and which of them are no padding."""
    assert me.data is not None
    assert me.data.mask is not None
    return me.data, me.data.mask


# --- a fit ------------------------------------------------------------------------------------------------------------


def fit(me: Me) -> dict[str, Tensor]:
    """Its training losses in each patch, (patches,), its own first, and the standard errors of their differences to it.

    A patch says for each unit that is offered whose circle's value is worn, -1: its own copy.
    """
    units = [unit for unit in me.offers if PATCH + unit in me.told]
    if not units:
        return {}
    data, real = _samples(me)
    losses = []
    for patch in zip(*(me.told[PATCH + unit].unbind() for unit in units), strict=True):
        worn = {}
        for unit, at in zip(units, patch, strict=True):
            value = me.offers[unit].index_select(0, at.clamp(min=0).view(1)).squeeze(0)
            worn[unit] = torch.where(at < 0, me.values[unit], value)
        losses.append(data.losses(me.at(worn)(data.x)))
    table = torch.stack(losses).nan_to_num(_WORST).clamp(max=_WORST)
    count = real.sum().clamp(min=1)
    mean = (table * real).sum(1) / count
    off = (table - table[0] - (mean - mean[0])[:, None]) * real
    return {"fits": mean, "errors": off.square().sum(1).sqrt() / count}
