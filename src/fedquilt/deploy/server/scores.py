"""What clients on devices say of their scores, as the core's results: a client can spoil its own only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedquilt.interface.readout import SPLITS, Readout
from fedquilt.results import Evaluation
from fedquilt.tasks import Classification, Task

Said = Mapping[str, Any]  # counts and losses, by read-out and split
Losses = Mapping[str, float]


def evaluations(
    round_: int, readouts: Sequence[Readout], names: Sequence[str], classes: int, said: Mapping[int, Said],
    trained: Losses, task: Task | None = None,
) -> list[Evaluation]:  # fmt: skip
    """The clients' own scores after a round, by their numbers, as the core's results; who did not answer has none.

    `trained` are losses of training, by name.
    """
    found, task = [], task or Classification()
    training = torch.tensor([trained.get(name, math.nan) for name in names], dtype=torch.float64)
    for readout in readouts:
        for split in SPLITS:
            table = torch.zeros(len(names), *task.counts_shape(classes), dtype=task.counted)
            losses = torch.full_like(training, math.nan)
            for number, own in said.items():
                table[number] = _counts(own.get("counts"), readout.name, split, table[number])
                losses[number] = loss_of(own.get("losses"), readout.name, split)
            if bool(table.any()):
                counts = table if table.is_floating_point() else table.to_sparse()
                found.append(
                    Evaluation(round_, readout.name, split, tuple(names), counts, losses, training, task)
                )  # fmt: skip
    return found


def loss_of(own: Any, *keys: str) -> float:
    """A loss that a client says it has, if it is one; else NaN."""
    try:
        for key in keys:
            own = own[key]
        return float(own)
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan


def _counts(own: Any, readout: str, split: str, nothing: Tensor) -> Tensor:
    """A client's counts, if they are counts at all; a client can spoil its own score only."""
    try:
        table = torch.tensor(own[readout][split], dtype=nothing.dtype)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        return nothing
    if table.shape != nothing.shape:
        return nothing
    good = torch.isfinite(table) if table.is_floating_point() else (table >= 0) & (table < 2**31)
    return table if bool(good.all()) and (not table.is_floating_point() or bool((table[0] >= 0).all())) else nothing
