"""What clients on devices say of their scores, as the core's results: a client can spoil its own only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedquilt.interface.readout import SPLITS, Readout
from fedquilt.results import Evaluation

Said = Mapping[str, Any]  # counts and losses, by read-out and split
Losses = Mapping[str, float]


def evaluations(
    round_: int, readouts: Sequence[Readout], names: Sequence[str], classes: int, said: Mapping[int, Said],
    trained: Losses,
) -> list[Evaluation]:  # fmt: skip
    """The clients' own scores after a round, by their numbers, as the core's results; who did not answer has none.

    `trained` are losses of training, by name.
    """
    found = []
    training = torch.tensor([trained.get(name, math.nan) for name in names], dtype=torch.float64)
    for readout in readouts:
        for split in SPLITS:
            table = torch.zeros(len(names), classes, classes, dtype=torch.int64)
            losses = torch.full_like(training, math.nan)
            for number, own in said.items():
                table[number] = _counts(own.get("counts"), readout.name, split, classes)
                losses[number] = loss_of(own.get("losses"), readout.name, split)
            if bool(table.any()):
                found.append(Evaluation(round_, readout.name, split, tuple(names), table.to_sparse(), losses, training))
    return found


def loss_of(own: Any, *keys: str) -> float:
    """A loss that a client says it has, if it is one; else NaN."""
    try:
        for key in keys:
            own = own[key]
        return float(own)
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan


def _counts(own: Any, readout: str, split: str, classes: int) -> Tensor:
    """A client's counts, if they are counts at all; a client can spoil its own score only."""
    try:
        table = torch.tensor(own[readout][split], dtype=torch.int64)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        return torch.zeros(classes, classes, dtype=torch.int64)
    good = table.shape == (classes, classes) and bool((table >= 0).all()) and bool((table < 2**31).all())
    return table if good else torch.zeros(classes, classes, dtype=torch.int64)
