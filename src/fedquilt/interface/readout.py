"""Read-outs: ways to predict from what a client has. They change predictions, not training.

"received" is a client's model after installing what the server sent, "adapted" its model after local training, before
that. Other read-outs combine the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedquilt.engines.objective import Batch
from fedquilt.families.inputs import taking_inputs
from fedquilt.families.parts import Holding
from fedquilt.interface.client_stack import ClientStack, PaddedSplit
from fedquilt.interface.me import Me, each
from fedquilt.tasks import Task
from fedquilt.tasks.confusion import confusion, f_by_class

_LEAST_AT_ONCE = 32  # samples of one client that its model is run on together, however many clients there are
_MOST_AT_ONCE = 512

SPLITS = ("validation", "test")  # what read-outs are measured on
EVERYONE = "everyone"  # and on wish, in a simulation, all clients' test samples

Predict = Callable[[Me, Batch], Tensor]


class FineTune(Protocol):
    """Trains a copy of rows for one more round; with `epoch`, counted from 1, for that epoch, of all units or head."""

    def __call__(self, rows: Tensor, epoch: int | None = None, units: str = "all") -> Tensor: ...


@dataclass
class EvaluationContext:
    """Some clients of one family after a round, as a read-out sees them; scores are computed once and shared.

    Scores are what models give, (k, n, classes) where there are classes; `task` says what they mean.

    `predict` is how the method predicts, None: by its module alone; `logits` says whether softmax makes probabilities
    of it. `memory` lasts from round to round: a read-out may keep tensors there under its own name. `pooled` has, by
    read-out, the sum over the federation of what its clients gave as `evidence`; a device that is by itself knows no
    such sums. `known` are scores, by model and split; `splits` is what they are wanted for. `twin` gives the same
    clients as they are when trained alone, where a run has them so.
    """

    received: ClientStack
    adapted: ClientStack
    predict: Predict | None
    memory: dict[str, Tensor] = field(default_factory=dict)
    fine_tune: FineTune | None = None
    last: bool = False
    logits: bool = True
    pooled: Mapping[str, Tensor] = field(default_factory=dict)
    known: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    splits: tuple[str, ...] = SPLITS
    twin: Callable[[], ClientStack] | None = None
    _rows: dict[str, Tensor] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """What there is to predict."""
        return self.received.task

    def table(self, split: str) -> PaddedSplit:
        """The samples of a split: x (k, n, ...), y (k, n, ...), mask (k, n)."""
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
        if (which, split) not in self.known:
            view = {"received": self.received, "adapted": self.adapted, "own": self.adapted}.get(which)
            if view is None:
                view = replace(self.received, rows=self._rows[which])
            self.known[which, split] = self._predicted(view, split, which == "own")
        return self.known[which, split]

    def scores_of(self, which: str, split: str, rows: Tensor | Callable[[], Tensor]) -> Tensor:
        """(k, n, classes) scores of a further model: run on all splits at once, as its rows are not kept."""
        if (which, split) not in self.known:
            view = replace(self.received, rows=rows if isinstance(rows, Tensor) else rows())
            self.known |= {(which, each): self._predicted(view, each, own=False) for each in self.splits}
        return self.known[which, split]

    def predictions(self, which: str, split: str) -> Tensor:
        """(k, n, ...) what a model predicts: classes, where there are some."""
        return self.task.predictions(self.scores(which, split))

    def logs(self, which: str, split: str) -> Tensor | None:
        """(k, n, classes) log-probabilities of what `scores` gives, or what the task has in their place.

        None where a method's scores are no logits.
        """
        return self.task.answers(self.scores(which, split)) if self.logits or which == "own" else None

    def must_be_logits(self, readout: str) -> None:
        """Refuse to mix what a method's clients say where that has no probabilities."""
        if not self.logits:
            raise ValueError(
                f"the read-out '{readout}' mixes probabilities, and this method predicts with scores that are none: "
                "use the read-out 'received'"
            )

    def alone(self, split: str) -> Tensor | None:
        """(k, n, classes) scores of clients' models that are trained alone: a part of that name, or the run's twins."""
        template, twin = self.adapted.family.template, self.twin
        if isinstance(template, Holding) and "alone" in dict(template.named_children()):
            part = partial(_of_part, "alone")
            return self.once("alone", split, lambda: _forward(self.adapted, split, part))
        return None if twin is None else self.once("alone", split, lambda: _forward(twin(), split))

    def once(self, which: str, split: str, make: Callable[[], Tensor | None]) -> Tensor | None:
        """Whatever else is said of a split, (k, n, ...), made on the first call of this name; nothing is not kept."""
        if (which, split) not in self.known:
            made = make()
            if made is None:
                return None
            self.known[which, split] = made
        return self.known[which, split]

    def features(self, split: str) -> Tensor | None:
        """(k, n, size) what the received models' last layers are given on a split; None where none is seen at work.

        The last layer is the one of the last unit that is called last; what it is given is flattened sample by sample.
        """
        view, n = self.received, self.table(split).y.shape[1]
        head = view.family.head
        layers = dict.fromkeys(name.rpartition(".")[0] for name in head.parameters + head.buffers)
        with taking_inputs(view.family.evaluator(view.rows.device), layers) as inputs:

            def of_head(call: Callable[..., Tensor], x: Tensor) -> Tensor:
                inputs.clear()
                call(x)
                seen = [each for each in inputs if len(each) == len(x)]  # one for each sample
                return seen[-1].flatten(1) if seen else x.new_zeros(len(x), 0)

            found = _forward(view, split, of_head)
        return found if found.shape[2] or not n else None

    def _predicted(self, view: ClientStack, split: str, own: bool) -> Tensor:
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
        return torch.cat(parts, dim=1) if parts else _nothing(view, table)

    def measures(self, predicted: Tensor) -> Tensor:
        """(k, classes) F-measures of predictions (k, n) on the validation split; 0 for a class that is not in it."""
        table = self.table("validation")
        return f_by_class(confusion(predicted, table.y, table.mask, self.received.classes))


def _of_part(part: str, call: Callable[..., Tensor], x: Tensor) -> Tensor:
    return call(x, part=part)


def _outputs(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    return call(x)


def _forward(view: ClientStack, split: str, function: Callable[..., Tensor] = _outputs) -> Tensor:
    """The outputs of every client's module on a split, or what else a function gives, in chunks of samples.

    Where what a module makes of a sample depends on the others, clients are looked at with their own samples alone:
    those of one size together, so that nothing is padded.
    """
    table = view.data(split)
    x = table.x
    if not view.family.habits.mixes:
        step = min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, view.samples_at_once // max(1, len(x))))
        parts = [view.map(function, x[:, at : at + step]) for at in range(0, x.shape[1], step)]
        return torch.cat(parts, dim=1) if parts else _nothing(view, table)
    found = torch.zeros(0)
    for count in table.count.unique().tolist():
        places = (table.count == count).nonzero()[:, 0]
        for at in range(0, count, _MOST_AT_ONCE):
            part = view.map(function, x[places, at : min(at + _MOST_AT_ONCE, count)], rows=view.rows[places])
            if not len(found):
                found = part.new_zeros(*x.shape[:2], *part.shape[2:])
            found[places, at : at + part.shape[1]] = part
    return found if len(found) else _nothing(view, table)


def _nothing(view: ClientStack, table: PaddedSplit) -> Tensor:
    """(k, 0, ...) the outputs of no sample."""
    return torch.zeros(len(table.y), 0, *view.task.output(table.y, view.classes), device=table.y.device)


@dataclass(frozen=True)
class Readout:
    """A way to predict. `needs_last_round` marks those that cost extra training and are made once, at the end.

    `pools` says how often they are told what all clients' validation samples say together: see `evidence`.
    """

    kind: ClassVar[str] = ""
    needs_last_round: ClassVar[bool] = False
    pools: ClassVar[int] = 0
    asks_alone: ClassVar[bool] = False  # whether models that are trained alone are of use to it
    remembers: ClassVar[bool] = False  # whether it asks models of earlier rounds too
    needs_classes: ClassVar[str] = ""  # what it does with classes, where it has to have some

    def check_task(self, task: Task) -> None:
        """Refuse a task that this read-out makes no sense for, before any work."""
        if self.needs_classes and not task.has_classes:
            raise ValueError(
                f"the read-out '{self.name}' {self.needs_classes}, and there are no classes in {task.kind}: use the "
                "read-out 'received', 'adapted' or 'averaged'"
            )

    @property
    def name(self) -> str:
        """What rows call it: its kind, with its setting where that has many."""
        return self.kind

    def predictions(self, look: EvaluationContext, split: str) -> Tensor:
        """Predicted classes, (k, n), or what else the task predicts: by default the likeliest."""
        logs = self.logs(look, split)
        if logs is None:
            raise NotImplementedError(f"the read-out '{self.name}' says neither classes nor how likely they are")
        return look.task.predictions(logs)

    def logs(self, look: EvaluationContext, split: str) -> Tensor | None:
        """(k, n, classes) log-probabilities, or what the task has for answers; None where it names classes only."""
        return None

    def evidence(self, look: EvaluationContext) -> Tensor:
        """(k, ...) what each client's validation samples say; the sum over all clients is then in `look.pooled`.

        Where `pools` is 2 it is asked twice, and the second time knows the first sum.
        """
        raise NotImplementedError
