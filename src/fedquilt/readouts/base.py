"""Read-outs: ways to predict from what a client has. They change predictions, not training.

"received" is a client's model after installing what the server sent, "adapted" its model after local training, before
that. Other read-outs combine the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.view import StackView, Table

_SAMPLES_AT_ONCE = 512

Predict = Callable[[StackView, str], Tensor | None]


@dataclass
class Look:
    """Some clients of one family after a round, as a read-out sees them; scores are computed once and shared.

    `memory` lasts from round to round: a read-out may keep things there under its own name. `fine_tune` gives rows
    trained on for one more round of local training.
    """

    received: StackView
    adapted: StackView
    predict: Predict
    memory: dict[str, Tensor] = field(default_factory=dict)
    fine_tune: Callable[[Tensor], Tensor] | None = None
    last: bool = False
    _scores: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def table(self, split: str) -> Table:
        """The samples of a split: x (k, n, ...), y (k, n), mask (k, n)."""
        return self.received.data(split)

    def scores(self, which: str, split: str, rows: Tensor | None = None) -> Tensor:
        """Class scores of a model on a split, (k, n, classes): `which` is received, adapted, or names other `rows`."""
        if (which, split) not in self._scores:
            view = self.adapted if which == "adapted" else self.received
            own = self.predict(view, split) if rows is None else None
            self._scores[which, split] = _forward(view, split, rows) if own is None else own
        return self._scores[which, split]


def _forward(view: StackView, split: str, rows: Tensor | None) -> Tensor:
    """The outputs of every client's module on a split, in chunks of samples."""
    x = view.data(split).x
    parts = [
        view.map(lambda call, part: call(part), x[:, at : at + _SAMPLES_AT_ONCE], rows=rows)
        for at in range(0, x.shape[1], _SAMPLES_AT_ONCE)
    ]
    if not parts:
        return torch.zeros(len(x), 0, view.classes, device=x.device)
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Readout:
    """A way to predict. `needs_last_round` marks those that cost extra training and are made once, at the end."""

    name: ClassVar[str] = ""
    needs_last_round: ClassVar[bool] = False

    def predictions(self, look: Look, split: str) -> Tensor:
        """Predicted classes, (k, n)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Received(Readout):
    """The client's model after installing what the server sent."""

    name: ClassVar[str] = "received"

    def predictions(self, look: Look, split: str) -> Tensor:
        return look.scores("received", split).argmax(2)


@dataclass(frozen=True)
class Adapted(Readout):
    """The client's model after its local training, before anything is installed on it."""

    name: ClassVar[str] = "adapted"

    def predictions(self, look: Look, split: str) -> Tensor:
        return look.scores("adapted", split).argmax(2)
