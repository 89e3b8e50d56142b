"""What there is to predict, by name: the objective, its targets, its metrics and which of them leads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedquilt._util.metric import ACCURACY, Metric, metric_of
from fedquilt._util.suggest import did_you_mean
from fedquilt.client import Client
from fedquilt.tasks.classification import Classification
from fedquilt.tasks.forecasting import Forecasting
from fedquilt.tasks.multilabel import MultiLabel
from fedquilt.tasks.regression import Regression
from fedquilt.tasks.task import Task
from fedquilt.tasks.tokens import IGNORED, Tokens

TASKS: dict[str, type[Task]] = {
    task.kind: task for task in (Classification, Regression, MultiLabel, Tokens, Forecasting)
}  # fmt: skip


def as_task(task: str | Task | None, clients: Sequence[Client] = ()) -> Task:
    """A task from its name, or as it is; without one, what the clients' targets can only be.

    >>> as_task("regression")
    Regression(loss='squared', metrics=(), lead='rmse')
    """
    if task is None:
        return inferred(clients)
    if isinstance(task, Task):
        return task
    other: object = task
    if not isinstance(other, str):
        hint = f"as in {other.__name__}()" if isinstance(other, type) else f"not a {type(other).__name__}"
        raise TypeError(f"a task is a name such as 'regression' or a task made ready, {hint}")
    if task not in TASKS:
        raise ValueError(did_you_mean(task, TASKS, "task"))
    return TASKS[task]()


def inferred(clients: Sequence[Client]) -> Task:
    """The task of clients whose targets can be of one task only: whole numbers are classes, others are numbers.

    >>> from torch import nn
    >>> inferred([Client("a", lambda: nn.Linear(1, 1), train=([[0.0], [1.0]], [0.5, 1.0]))]).kind
    'regression'
    """
    targets = [(client, client.train.y) for client in clients if client.train.x.numel()]
    if any(y.is_floating_point() and bool((y != y.round()).any()) for _, y in targets):
        return Regression()
    for client, y in targets:
        if y.dtype == torch.bool and y.ndim == 2:
            return MultiLabel()
        if y.ndim > 1:
            raise ValueError(
                f"the targets of client '{client.name}' have the shape {tuple(y.shape)}: they may be numbers, labels "
                "that are there or not, or tokens; say which, as in task='regression', 'multilabel' or 'tokens'"
            )
    return Classification()


def task_from(told: Mapping[str, Any]) -> Task:
    """The task that `Task.told` described; plain classification where nothing is said.

    >>> task_from(Regression(loss="huber", lead="mae").told()) == Regression(loss="huber", lead="mae")
    True
    """
    if not told:
        return Classification()
    kind = TASKS.get(str(told.get("kind")))
    if kind is None or "own_metrics" in told or told.get("loss") not in kind.known_losses:
        raise ValueError(f"the task {dict(told)!r} is not known here, or has functions of somebody's own")
    return kind(loss=str(told["loss"]), lead=str(told.get("lead", "")))


__all__ = [
    "ACCURACY",
    "IGNORED",
    "TASKS",
    "Classification",
    "Forecasting",
    "Metric",
    "MultiLabel",
    "Regression",
    "Task",
    "Tokens",
    "as_task",
    "inferred",
    "metric_of",
    "task_from",
]
