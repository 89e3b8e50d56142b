"""A client: its data, its model, its labels, and what it declares about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt._util.plain_values import labels_of, python, whole

ModelBuilder = Callable[[], nn.Module]
Pair = tuple[Any, Any]  # samples and targets: numpy arrays, tensors or nested lists
_MOST_CLASSES = 2**20  # every client's scores are counted by class


@dataclass(frozen=True)
class Split:
    """Samples and their targets: one of a client's train, validation and test splits."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def __repr__(self) -> str:  # never what samples hold: it may be of people, and there is much of it
        return f"Split({len(self)} samples, {kind_of(self)})"


def as_split(pair: Pair | Split, whose: str) -> Split:
    """Arrays, tensors or lists as a checked split; `whose` names it in errors.

    Targets are whole numbers where there is one whole number a sample, else what they are: the task says the rest.

    >>> len(as_split(([[0.5], [1.5]], [0, 1]), "train data of client 'a'"))
    2
    """
    if isinstance(pair, Split):
        given: tuple[Any, Any] = (pair.x, pair.y)
    elif isinstance(pair, tuple | list) and len(pair) == 2:
        given = (pair[0], pair[1])
    else:
        raise TypeError(f"{whose}: give a pair (samples, labels), not a {type(pair).__name__}")
    x, y = (_tensor(part, f"{whose}: {what}") for part, what in zip(given, ("samples", "labels"), strict=True))
    if y.is_floating_point():
        if not bool(torch.isfinite(y).all()):
            raise ValueError(f"{whose}: targets hold NaN or infinite values; leave samples without a target out")
        y = y.long() if y.ndim == 1 and torch.equal(y, y.round()) else y.float()
    elif y.dtype != torch.bool or y.ndim == 1:
        y = y.long()
    if x.is_floating_point():
        x = x.float()
    if x.ndim == 0 or y.ndim == 0 or x.shape[0] != y.shape[0]:
        raise ValueError(
            f"{whose}: samples of shape {tuple(x.shape)} do not go with labels of shape {tuple(y.shape)}; "
            "give (n, ...) samples and (n,) labels, or (n, ...) targets where the task is another"
        )
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise ValueError(f"{whose}: samples hold NaN or infinite values; clean or drop them first")
    return pair if isinstance(pair, Split) and x is pair.x and y is pair.y else Split(x, y)


def _tensor(values: Any, whose: str) -> Tensor:
    """Numbers as a tensor, without a copy where they can be shared."""
    try:
        # PyTorch cannot share arrays that run backwards
        return torch.as_tensor(np.ascontiguousarray(values) if isinstance(values, np.ndarray) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        told = "; texts are numbered by fedquilt.scenario_from" if whose.endswith("labels") else ""
        raise TypeError(f"{whose} must be numbers in an array, a tensor or lists ({error}){told}") from None


@dataclass(frozen=True)
class Change:
    """What is different for a client from some round on (see `Client.changes`); None leaves a thing as it is.

    A client that gives up a label trains no longer on its samples of it.
    """

    model: ModelBuilder | None = None
    labels: tuple[int, ...] | None = None
    train: Pair | Split | None = None


@dataclass(frozen=True)
class Client:
    """One participant of a federation. Its data are used on it alone; only traits, labels and counts are declared.

    `model` is a function without arguments that builds the client's network. `traits` are declared facts such as
    `{"device": "gen1", "cohort": "sporty"}`. Targets are classes numbered from 0 up, or what else the scenario's task
    says. `labels` are the classes the client owns (default: all classes its splits show). `changes` maps a round
    (counted from 1) to a `Change` that holds from that round on: new private data of a stream, another architecture,
    another label set. A client is tested on its samples of labels it owns at the time. Where samples are rows of a
    table, `columns` says what each number is: its name, and by what it was filled and scaled; models' cards repeat it.

    >>> from torch import nn
    >>> c = Client("phone-3", model=lambda: nn.Linear(2, 2), train=([[0., 1.], [1., 0.]], [0, 1]))
    >>> c.name, c.samples, c.labels
    ('phone-3', 2, (0, 1))
    >>> c
    Client('phone-3', 2 training samples, float32 of shape (2,); 0 for validation, 0 for testing)
    """

    name: str
    model: ModelBuilder
    train: Split
    validation: Split
    test: Split
    traits: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[int, ...] = ()
    changes: Mapping[int, Change] = field(default_factory=dict)
    columns: Sequence[Mapping[str, Any]] = field(default=(), compare=False)
    # the kind of task that its targets were checked for, once it is in a scenario
    task: str = field(default="", init=False, compare=False)

    def __init__(
        self,
        name: str,
        model: ModelBuilder,
        train: Pair | Split,
        validation: Pair | Split | None = None,
        test: Pair | Split | None = None,
        traits: Mapping[str, str] | None = None,
        labels: Sequence[int] | None = None,
        changes: Mapping[int, Change] | None = None,
        columns: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        name = _name(name)
        kind = type(model).__name__
        if not callable(model) or isinstance(model, nn.Module):
            raise TypeError(f"client '{name}': model must be a function that builds an nn.Module, not {kind}")
        splits = {"train": as_split(train, f"train data of client '{name}'")}
        if len(splits["train"]) == 0:
            raise ValueError(f"client '{name}' has no training samples; leave it out or give it some")
        for key, pair in (("validation", validation), ("test", test)):
            empty = Split(splits["train"].x[:0], splits["train"].y[:0])
            splits[key] = empty if pair is None else as_split(pair, f"{key} data of client '{name}'")
            if kind_of(splits[key]) != kind_of(splits["train"]):
                raise ValueError(
                    f"client '{name}': {key} samples are {kind_of(splits[key])}, training samples "
                    f"{kind_of(splits['train'])}; they must agree"
                )
        planned = sorted((whole(at, f"client '{name}': the round of a change"), c) for at, c in (changes or {}).items())
        changed = {start: _checked(change, start, splits["train"], name) for start, change in planned}
        streamed = [change.train for change in changed.values() if isinstance(change.train, Split)]
        classes = all(_are_classes(split.y) for split in (*splits.values(), *streamed))
        if labels is not None and len(tuple(labels)) and not classes:
            raise ValueError(f"client '{name}': labels are classes, and its targets are none; leave labels out")
        seen = sorted(set(torch.cat([s.y for s in splits.values()]).tolist())) if classes else []
        later = {label for change in changed.values() for label in change.labels or ()}
        owned = tuple(sorted(set(seen if labels is None else labels_of(labels, f"client '{name}'"))))
        highest = max({*owned, *later}, default=0)
        if highest >= _MOST_CLASSES:
            raise ValueError(
                f"client '{name}' has label {highest}; labels are classes, numbered from 0 up to {_MOST_CLASSES - 1} "
                "at most: number them anew"
            )
        trained = set(splits["train"].y.tolist()) if classes else set()
        strange = sorted((set(seen) - set(owned) - later) | (trained - set(owned)))
        if strange and splits["train"].x.numel():  # samples without features stand in for a client elsewhere
            raise ValueError(
                f"client '{name}' has samples of label {strange[0]}, which is not among its labels "
                f"{', '.join(map(str, owned))}; add it there or leave these samples out"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "model", model)
        for key, split in splits.items():
            object.__setattr__(self, key, split)
        declared = {str(key): str(python(value)) for key, value in (traits or {}).items() if value is not None}
        object.__setattr__(self, "traits", declared)
        object.__setattr__(self, "labels", owned)
        object.__setattr__(self, "changes", changed)
        object.__setattr__(self, "columns", tuple(columns))
        object.__setattr__(self, "task", "")

    def __repr__(self) -> str:
        others = f"{len(self.validation)} for validation, {len(self.test)} for testing"
        return f"Client('{self.name}', {len(self.train)} training samples, {kind_of(self.train)}; {others})"

    @property
    def samples(self) -> int:
        """How many training samples the client has: the n_i of the weights."""
        return len(self.train)

    def at(self, round_: int) -> Client:
        """The client as it is in a round: every change up to that round applied."""
        due = [change for start, change in self.changes.items() if start <= round_]
        if not due:
            return self
        now = copy(self)
        for change in due:
            object.__setattr__(now, "model", change.model or now.model)
            if change.labels is not None:
                object.__setattr__(now, "labels", tuple(sorted(set(change.labels))))
            if change.train is not None:
                object.__setattr__(now, "train", change.train)
        object.__setattr__(now, "changes", {})
        mine = torch.isin(now.train.y, torch.tensor(now.labels)) if now.labels != self.labels else torch.tensor(True)
        if not bool(mine.any()):
            raise ValueError(
                f"client '{self.name}' owns {now.labels} in round {round_} but no training samples of these labels; "
                "give it some in the same change"
            )
        if not bool(mine.all()):
            object.__setattr__(now, "train", Split(now.train.x[mine], now.train.y[mine]))
        return now


def as_samples(x: Any, client: Client) -> Tensor:
    """Samples (n, ...) without targets as a checked tensor of the kind that a client has.

    >>> as_samples([[1.0, 2.0]], Client("a", lambda: nn.Linear(2, 2), train=([[0.0, 1.0]], [0]))).shape
    torch.Size([1, 2])
    """
    whose = f"samples for client '{client.name}'"
    found = _tensor(x, whose)
    if found.ndim == 0:
        raise ValueError(f"{whose}: give (n, ...) samples, not a single number")
    split = as_split((found, [0] * len(found)), whose)
    if kind_of(split) != kind_of(client.train):
        raise ValueError(f"{whose} are {kind_of(split)}, its training samples {kind_of(client.train)}; they must agree")
    return split.x


def _are_classes(y: Tensor) -> bool:
    """Whether targets may be classes: one whole number a sample, from 0 up."""
    return y.ndim == 1 and not y.is_floating_point() and (not len(y) or int(y.min()) >= 0)


def _name(name: Any) -> str:
    """A client's name as text: a number becomes its digits."""
    found = python(name)
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise TypeError(f"a client's name is a text, such as 'phone-3', not {name!r}")
    if found == "":
        raise ValueError("a client needs a name that is not empty")
    return str(found)


def kind_of(split: Split) -> str:
    """What a sample of a split is: its type and shape."""
    return f"{str(split.x.dtype).removeprefix('torch.')} of shape {tuple(split.x.shape[1:])}"


def _checked(change: Change, start: int, first: Split, name: str) -> Change:
    """A change of a client with its new training samples as a checked split."""
    if start < 1:
        raise ValueError(f"client '{name}': a change at round {start}; rounds count from 1")
    if change.labels is not None:
        whose = f"client '{name}' from round {start} on"
        change = replace(change, labels=labels_of(change.labels, whose))
    if change.train is None:
        return change
    train = as_split(change.train, f"train data of client '{name}' from round {start} on")
    if len(train) == 0:
        raise ValueError(f"client '{name}' has no training samples from round {start} on; give it some")
    if kind_of(train) != kind_of(first):
        raise ValueError(
            f"client '{name}': from round {start} on training samples are {kind_of(train)}, before that "
            f"{kind_of(first)}; they must agree"
        )
    return replace(change, train=train)
