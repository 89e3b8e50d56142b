"""Ways to predict from what a client has, by name."""

import re

from fedquilt.readouts.averaged import Averaged, AveragedByClass
from fedquilt.readouts.base import Look, Readout
from fedquilt.readouts.best_of_both import BestOfBoth
from fedquilt.readouts.best_of_last import BestOfLast
from fedquilt.readouts.fine_tuned import FineTuned
from fedquilt.readouts.plain import Adapted, Own, Received

READOUTS: dict[str, type[Readout]] = {
    readout.kind: readout
    for readout in (Received, Adapted, Own, FineTuned, BestOfBoth, BestOfLast, Averaged, AveragedByClass)
}


def named(name: str) -> Readout | None:
    """The read-out of a name, None where there is none; best-of-last takes its number of rounds in the name.

    >>> named("best-of-last-5")
    BestOfLast(k=5)
    """
    last = re.fullmatch(rf"{BestOfLast.kind}-(\d+)", name)
    if last:
        return BestOfLast(int(last[1]))
    return READOUTS[name]() if name in READOUTS else None


__all__ = [
    "READOUTS",
    "Adapted",
    "Averaged",
    "AveragedByClass",
    "BestOfBoth",
    "BestOfLast",
    "FineTuned",
    "Look",
    "Own",
    "Readout",
    "Received",
    "named",
]
