"""What clients score: every read-out on the samples that were kept aside, the same in a simulation and on a device."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fedquilt.fleet import Fleet
from fedquilt.messages import Down
from fedquilt.readouts import Look, Readout
from fedquilt.training.evaluate import confusion

SPLITS = ("validation", "test")


def look_at(fleet: Fleet, down: Down, memory: dict[str, Tensor] | None = None, last: bool = False) -> Look:
    """The clients that a message is for, as read-outs see them: before and after installing what it brings.

    `memory` is what their read-outs keep from round to round, `last` whether no round follows.
    """
    ((received, adapted),) = fleet.looks({down.ids: down})
    return Look(
        received,
        adapted,
        predict=fleet.terms.method.predicts,
        memory={} if memory is None else memory,
        fine_tune=lambda rows: fleet.fine_tune(down.ids, rows, down.round),
        last=last,
    )


def counts_of(look: Look, readouts: Iterable[Readout]) -> dict[tuple[str, str], Tensor]:
    """By read-out and split, counts by true and predicted class of every client, a sparse (k, classes, classes).

    Read-outs that need the last round are left out before it.
    """
    counts: dict[tuple[str, str], Tensor] = {}
    for readout in readouts:
        if readout.needs_last_round and not look.last:
            continue
        for split in SPLITS:
            table, predicted = look.table(split), readout.predictions(look, split)
            counts[readout.name, split] = confusion(predicted, table.y, table.mask, look.received.classes)
    return counts
