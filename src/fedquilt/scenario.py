"""A scenario: clients, what the server holds, and the settings it is meant to be trained with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedquilt.client import Client, kind_of
from fedquilt.engines.settings import Training
from fedquilt.families.common import Common, GivenCommon, as_common, form_for, with_targets
from fedquilt.tasks import Classification, Task, as_task


@dataclass(frozen=True)
class Scenario:
    """Clients and what the server holds.

    `common` is the sample set on the server that methods comparing models look at (FedDL's affinity, the public data of
    score sharing); its labels may be used only by methods that say so. Where clients' samples are of unlike shapes, it
    is the same events as each of their sensors sees them: `common={"device": {"camera": (x, y), "radar": (x, y)}}`, a
    pair for each value of a trait, with the same labels in the same order; "client" in the place of the trait goes by
    names. `public_test` is the part of the public data that accuracy of score sharing is reported on. `task` says what
    there is to predict: classification, regression, multilabel, tokens, forecasting, or a task made ready
    (`fedquilt.tasks`); without one it is what targets can only be. `origin` says how to build it again, where that is
    known: a run on disk keeps it.

    >>> from torch import nn
    >>> c = Client("a", lambda: nn.Linear(1, 2), train=([[0.], [1.]], [0, 1]))
    >>> Scenario("two points", [c]).classes
    2
    """

    name: str
    clients: tuple[Client, ...]
    training: Training = field(default_factory=Training)
    common: Common | None = None
    public_test: Common | None = None
    label_names: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    task: Task = field(default_factory=Classification)

    def __init__(
        self,
        name: str,
        clients: Sequence[Client],
        training: Training | None = None,
        common: GivenCommon | None = None,
        public_test: GivenCommon | None = None,
        label_names: Iterable[object] = (),
        origin: Mapping[str, Any] | None = None,
        task: str | Task | None = None,
    ) -> None:
        if not clients:
            raise ValueError(f"scenario '{name}' has no clients")
        task = as_task(task, clients)
        clients = [task.take(client) for client in clients]
        object.__setattr__(self, "task", task)
        names = [c.name for c in clients]
        twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"scenario '{name}': the client name '{twice[0]}' is used twice; names must be unique")
        object.__setattr__(self, "name", str(name))
        object.__setattr__(self, "clients", tuple(clients))
        object.__setattr__(self, "training", training or Training())
        for key, given in (("common", common), ("public_test", public_test)):
            held = None if given is None else _held(given, task, f"{key} data of scenario '{name}'")
            for client in clients:
                form_for(held, client)  # which refuses whoever there is none for
            object.__setattr__(self, key, held)
        if isinstance(label_names, str):
            raise TypeError(f"scenario '{name}': label_names is a list of texts, one a class, not '{label_names}'")
        label_names = tuple(str(n) for n in label_names)
        object.__setattr__(self, "label_names", label_names)
        object.__setattr__(self, "origin", dict(origin or {}))
        if label_names and len(label_names) < self.classes:
            raise ValueError(
                f"scenario '{name}' has {len(label_names)} label names, but labels up to {self.classes - 1} occur"
            )

    def __str__(self) -> str:
        """Who is there and what of, in a line or three; never what samples hold.

        >>> from torch import nn
        >>> def of(*names): return Client("-".join(names), lambda: nn.Linear(1, 2), ([[0.], [1.]], [0, 1]))
        >>> print(Scenario("two points", [of("a"), of("b")], label_names=["no", "yes"]))
        two points: 2 clients with 2 training samples each, float32 of shape (1,); classification, labels no, yes
        2 clients have no test samples, and are not measured: a, b
        """
        counts = sorted(client.samples for client in self.clients)
        each = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
        kinds = dict.fromkeys(kind_of(client.train) for client in self.clients)
        labels = f", labels {_some(self.label_names)}" if self.label_names else ""
        many = f"{len(counts)} clients" if len(counts) > 1 else "1 client"
        told = f"{self.name}: {many} with {each} training samples each, {_some([*kinds])}; {self.task.kind}{labels}"
        untested = [client.name for client in self.clients if not len(client.test)]
        if untested:
            have = f"{len(untested)} clients have" if len(untested) > 1 else "1 client has"
            are = "are" if len(untested) > 1 else "is"
            told += f"\n{have} no test samples, and {are} not measured: {_some(untested)}"
        return told

    __repr__ = __str__

    @cached_property
    def classes(self) -> int:
        """How many classes there are over all clients: the highest label and one, or the number of label names.

        Of another task, how many labels, tokens or numbers an answer has.
        """
        return self.task.width(self.clients, self.label_names)


def _some(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, of many the first few."""
    return ", ".join([*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])])


def _held(given: GivenCommon, task: Task, whose: str) -> Common:
    """What the server holds, with targets of the task."""
    return with_targets(as_common(given, whose), lambda split: task.split(split, whose))
