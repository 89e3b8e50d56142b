"""Read-outs: ways to predict from what a client has. They change predictions, not training.

"received" is a client's model after installing what the server sent, "adapted" its model after local training, before
that. Other read-outs combine the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.me import Me, each
from fedquilt.training.evaluate import confusion, f_by_class
from fedquilt.training.objective import Batch
from fedquilt.view import StackView, Table

_SAMPLES_AT_ONCE = 2**16  # of all clients of a stack together; no client has less than 32 of them
_MOST_AT_ONCE = 512  # of one client

Predict = Callable[[Me, Batch], Tensor]


@dataclass
class Look:
    """Some clients of one family after a round, as a read-out sees them; scores are computed once and shared.

    `predict` is how the method predicts, None: by its module alone. `memory` lasts from round to round: a read-out may
    keep tensors there under its own name. `fine_tune` gives rows trained on for one more round of local training.
    """

    received: StackView
    adapted: StackView
    predict: Predict | None
    memory: dict[str, Tensor] = field(default_factory=dict)
    fine_tune: Callable[[Tensor], Tensor] | None = None
    last: bool = False
    _scores: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    _rows: dict[str, Tensor] = field(default_factory=dict)

    def table(self, split: str) -> Table:
        """The samples of a split: x (k, n, ...), y (k, n), mask (k, n)."""
        return self.received.data(split)

    def rows(self, which: str, make: Callable[[], Tensor]) -> Tensor:
        """(k, width) the numbers of a further model, made on the first call of this name and kept for the round."""
        if which not in self._rows:
            self._rows[which] = make()
        return self._rows[which]

    def scores(self, which: str, split: str) -> Tensor:
        """Class scores of a model on a split, (k, n, classes): received, adapted, or a model that `rows` has made.

        "own" is the adapted model by itself, even where a method knows more about public samples.
        """
        if (which, split) not in self._scores:
            view = {"received": self.received, "adapted": self.adapted, "own": self.adapted}.get(which)
            if view is None:
                view = replace(self.received, rows=self._rows[which])
            self._scores[which, split] = self._predicted(view, split, which == "own")
        return self._scores[which, split]

    def _predicted(self, view: StackView, split: str, own: bool) -> Tensor:
        """(k, n, classes) what clients answer; `own`: as if they knew no public sample."""
        predict = self.predict
        if predict is None:
            return _forward(view, split)
        table = view.data(split)
        if own:
            table = replace(table, public=None)

        def answer(me: Me) -> dict[str, Tensor]:
            assert me.data is not None
            return {"scores": predict(me, me.data)}

        chunks = [table.samples(at, at + _MOST_AT_ONCE) for at in range(0, table.y.shape[1], _MOST_AT_ONCE)]
        parts = [each(view, answer, chunk, padded=True)["scores"] for chunk in chunks]
        return torch.cat(parts, dim=1) if parts else torch.zeros(*table.y.shape, view.classes, device=table.y.device)

    def measures(self, predicted: Tensor) -> Tensor:
        """(k, classes) F-measures of predictions (k, n) on the validation split; 0 for a class that is not in it."""
        table = self.table("validation")
        return f_by_class(confusion(predicted, table.y, table.mask, self.received.classes))


def _forward(view: StackView, split: str) -> Tensor:
    """The outputs of every client's module on a split, in chunks of samples.

    Where what a module makes of a sample depends on the others, clients are looked at with their own samples alone:
    those of one size together, so that nothing is padded.
    """
    table = view.data(split)
    x = table.x
    if not view.family.habits.mixes:
        step = min(_MOST_AT_ONCE, max(32, _SAMPLES_AT_ONCE // max(1, len(x))))
        parts = [view.map(_outputs, x[:, at : at + step]) for at in range(0, x.shape[1], step)]
        return torch.cat(parts, dim=1) if parts else torch.zeros(len(x), 0, view.classes, device=x.device)
    found = torch.zeros(0)
    for count in table.count.unique().tolist():
        places = (table.count == count).nonzero()[:, 0]
        for at in range(0, count, _MOST_AT_ONCE):
            part = view.map(_outputs, x[places, at : min(at + _MOST_AT_ONCE, count)], rows=view.rows[places])
            if not len(found):
                found = part.new_zeros(*x.shape[:2], part.shape[2])
            found[places, at : at + part.shape[1]] = part
    return found if len(found) else torch.zeros(len(x), 0, view.classes, device=x.device)


def _outputs(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    return call(x)


@dataclass(frozen=True)
class Readout:
    """A way to predict. `needs_last_round` marks those that cost extra training and are made once, at the end."""

    kind: ClassVar[str] = ""
    needs_last_round: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What rows call it: its kind, with its setting where that has many."""
        return self.kind

    def predictions(self, look: Look, split: str) -> Tensor:
        """Predicted classes, (k, n)."""
        raise NotImplementedError
