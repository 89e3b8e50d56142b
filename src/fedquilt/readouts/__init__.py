"""Ways to predict from what a client has, by name."""

import re
from collections.abc import Callable

from fedquilt.interface.readout import SPLITS, EvaluationContext, Readout
from fedquilt.readouts.averaged import Averaged, AveragedByClass
from fedquilt.readouts.best_of_both import BestOfBoth
from fedquilt.readouts.best_of_last import BestOfLast
from fedquilt.readouts.direct import Adapted, Own, Received
from fedquilt.readouts.fine_tuned import FineTuned, FineTunedChosen
from fedquilt.readouts.knn import KNN
from fedquilt.readouts.vote import Vote

READOUTS: dict[str, type[Readout]] = {
    readout.kind: readout
    for readout in (
        Received, Adapted, Own, FineTuned, FineTunedChosen, KNN, Vote, BestOfBoth, BestOfLast, Averaged,
        AveragedByClass,
    )
}  # fmt: skip


def named(name: str) -> Readout | None:
    """The read-out of a name, None where there is none; some have a number in their name.

    >>> named("best-of-last-5"), named("fine-tuned-head-2")
    (BestOfLast(k=5), FineTuned(epochs=2, units='head'))
    """
    if name in READOUTS:
        return READOUTS[name]()
    kind, _, number = name.rpartition("-")
    if not re.fullmatch(r"\d+", number):
        return None
    with_number: dict[str, Callable[[int], Readout]] = {
        BestOfLast.kind: BestOfLast,
        KNN.kind: KNN,
        FineTuned.kind: FineTuned,
        f"{FineTuned.kind}-head": lambda epochs: FineTuned(epochs, "head"),
    }
    return with_number[kind](int(number)) if kind in with_number else None


__all__ = [
    "KNN",
    "READOUTS",
    "SPLITS",
    "Adapted",
    "Averaged",
    "AveragedByClass",
    "BestOfBoth",
    "BestOfLast",
    "EvaluationContext",
    "FineTuned",
    "FineTunedChosen",
    "Own",
    "Readout",
    "Received",
    "Vote",
    "named",
]
