"""A scenario: clients, what the server holds, and the settings it is meant to be trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedquilt.client import Client, Pair, Split, as_split
from fedquilt.training.settings import Training


@dataclass(frozen=True)
class Scenario:
    """Clients and what the server holds.

    `common` is the sample set on the server that methods comparing models look at (FedDL's affinity, the public data of
    score sharing); its labels may be used only by methods that say so. `public_test` is the part of the public data
    that accuracy of score sharing is reported on. `origin` says how to build it again, where that is known: a run on
    disk keeps it.

    >>> from torch import nn
    >>> c = Client("a", lambda: nn.Linear(1, 2), train=([[0.], [1.]], [0, 1]))
    >>> Scenario("two points", [c]).classes
    2
    """

    name: str
    clients: tuple[Client, ...]
    training: Training = field(default_factory=Training)
    common: Split | None = None
    public_test: Split | None = None
    label_names: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        name: str,
        clients: Sequence[Client],
        training: Training | None = None,
        common: Pair | Split | None = None,
        public_test: Pair | Split | None = None,
        label_names: Sequence[str] = (),
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        if not clients:
            raise ValueError(f"scenario '{name}' has no clients")
        names = [c.name for c in clients]
        twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"scenario '{name}': the client name '{twice[0]}' is used twice; names must be unique")
        object.__setattr__(self, "name", str(name))
        object.__setattr__(self, "clients", tuple(clients))
        object.__setattr__(self, "training", training or Training())
        for key, pair in (("common", common), ("public_test", public_test)):
            object.__setattr__(self, key, None if pair is None else as_split(pair, f"{key} data of scenario '{name}'"))
        object.__setattr__(self, "label_names", tuple(str(n) for n in label_names))
        object.__setattr__(self, "origin", dict(origin or {}))
        if label_names and len(label_names) < self.classes:
            raise ValueError(
                f"scenario '{name}' has {len(label_names)} label names, but labels up to {self.classes - 1} occur"
            )

    @property
    def classes(self) -> int:
        """How many classes there are over all clients: the highest label and one, or the number of label names."""
        highest = max(max(c.labels, default=0) for c in self.clients)
        changes = [change for c in self.clients for change in c.changes.values()]
        changed = [max(change.labels, default=0) for change in changes if change.labels]
        streamed = [int(change.train.y.max()) for change in changes if isinstance(change.train, Split)]
        return max(highest + 1, max(changed + streamed, default=0) + 1, len(self.label_names))
