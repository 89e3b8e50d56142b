"""A task: what clients' targets are, what is minimised, what is measured of predictions, and which number leads.

A task is a frozen value that a scenario carries. Everything that trains asks it for the losses of samples, everything
that predicts for what outputs mean, everything that reports for its metrics. What is measured is kept as counts and
sums, a row a client: those are all that leaves a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedquilt._util.metric import Metric
from fedquilt._util.suggest import did_you_mean
from fedquilt.client import Change, Client, Split

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs (n, ...) and targets (n, ...): one number a sample, (n,)


@dataclass(frozen=True)
class Task:
    """The base of all tasks.

    `loss` is the name of a loss of the task, or a function of outputs and targets that gives a number for each sample.
    `metrics` are further ones of your own, `lead` names the metric that results are told, compared and tested by.
    """

    kind: ClassVar[str] = ""
    has_classes: ClassVar[bool] = False  # whether a target is one class, for methods that look at classes
    has_neighbours: ClassVar[bool] = True  # whether targets of samples nearby say something about a sample
    known: ClassVar[tuple[Metric, ...]] = ()  # what the task measures by itself, the leading one first
    known_losses: ClassVar[tuple[str, ...]] = ()  # the usual one first
    counted: ClassVar[torch.dtype] = torch.float64  # what counts are: sums, or whole numbers
    simplest: ClassVar[str] = ""  # what needs no look at a sample, in words: the answer that must be beaten

    loss: str | Loss = ""
    metrics: tuple[Metric, ...] = ()
    lead: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", tuple(self.metrics))
        object.__setattr__(self, "loss", self.loss or self.known_losses[0])
        object.__setattr__(self, "lead", self.lead or self.known[0].name)
        if isinstance(self.loss, str) and self.loss not in self.known_losses:
            raise ValueError(did_you_mean(self.loss, self.known_losses, f"loss of {self.kind}"))
        for metric in self.metrics:
            if not isinstance(metric, Metric) or metric.function is None:
                raise TypeError(f"a metric of your own is a Metric with a function, not {metric!r}")
        names = [metric.name for metric in self.all_metrics]
        if len(set(names)) < len(names):
            raise ValueError(f"two metrics are called alike: {', '.join(names)}; give each a name of its own")
        if self.lead not in names:
            raise ValueError(did_you_mean(self.lead, names, f"metric of {self.kind}"))

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        """The task's own metrics and the user's."""
        return self.known + self.metrics

    @property
    def metric(self) -> Metric:
        """The leading metric."""
        return next(metric for metric in self.all_metrics if metric.name == self.lead)

    @property
    def usual(self) -> bool:
        """Whether nothing is a user's own function, so that text can say it all."""
        return isinstance(self.loss, str) and not self.metrics

    def told(self) -> dict[str, Any]:
        """The task as plain values; `task_from` makes it again where no function is a user's own."""
        loss = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__qualname__", "own")
        own = {"own_metrics": [metric.name for metric in self.metrics]} if self.metrics else {}
        return {"kind": self.kind, "loss": loss, "lead": self.lead, **own, "metric": self.metric.told()}

    @property
    def stated(self) -> dict[str, Any]:
        """What the files of a run say about the task: nothing where it is plain classification."""
        plain = self.has_classes and self == type(self)()
        return {} if plain else {"task": self.told()}

    # --- targets ---------------------------------------------------------------------------------------------------

    def target(self, y: Tensor, whose: str) -> Tensor:
        """Targets (n, ...) in the form that losses take, or a sentence on what is wrong with them."""
        raise NotImplementedError

    def take(self, client: Client) -> Client:
        """A client with targets of this task; the same where they are already."""
        if client.task == self.kind:
            return client
        names = ("train", "validation", "test") if client.train.x.numel() else ()  # a stand-in has no features
        splits = {name: self.split(getattr(client, name), f"{name} data of client '{client.name}'") for name in names}
        if self.has_classes:  # they stay as they are
            object.__setattr__(client, "task", self.kind)
            return client
        taken = copy(client)
        changes = {start: self._change(change, client.name) for start, change in client.changes.items()}
        for name, value in {**splits, "changes": changes if names else client.changes, "labels": ()}.items():
            object.__setattr__(taken, name, value)
        object.__setattr__(taken, "task", self.kind)
        return taken

    def split(self, split: Split, whose: str) -> Split:
        """A split with targets of this task."""
        y = self.target(split.y, whose)
        return split if y is split.y else Split(split.x, y)

    def _change(self, change: Change, name: str) -> Change:
        if not isinstance(change.train, Split):
            return change
        return replace(change, train=self.split(change.train, f"train data of client '{name}'"))

    def width(self, clients: Sequence[Client], names: Sequence[str]) -> int:
        """How many numbers an answer has, over all clients: classes, labels, tokens or outputs."""
        raise NotImplementedError

    # --- models ----------------------------------------------------------------------------------------------------

    def output(self, y: Tensor, width: int) -> tuple[int, ...]:
        """The shape of what a model gives for a sample, from targets (..., n, *shape of a target)."""
        raise NotImplementedError

    def check_outputs(self, outputs: Tensor, y: Tensor, width: int, whose: str) -> None:
        """Refuse outputs (n, ...) of a client's model that do not go with its targets (n, ...)."""
        wanted = self.output(y[None], width)
        if tuple(outputs.shape[1:]) != wanted:
            raise ValueError(
                f"{whose}: its model gives {_shape(outputs.shape[1:])} for a sample, and its targets "
                f"({self.kind}) want {_shape(wanted)}; let it give that"
            )

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(n,) the loss of each sample."""
        return self.usual_losses(outputs, y) if isinstance(self.loss, str) else self.loss(outputs, y)

    def usual_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(n,) the loss of each sample, by the loss of the task that is named."""
        raise NotImplementedError

    # --- what outputs mean -----------------------------------------------------------------------------------------

    def answers(self, outputs: Tensor) -> Tensor:
        """What read-outs pass on: log-probabilities, or whatever else losses take in the place of outputs."""
        return outputs

    def predictions(self, outputs: Tensor) -> Tensor:
        """What is predicted, from outputs or answers: classes, say."""
        return outputs

    def mixable(self, outputs: Tensor) -> Tensor:
        """What may be averaged over models: probabilities, or numbers as they are."""
        return outputs

    def unmixed(self, mixed: Tensor) -> Tensor:
        """Answers, from an average of what `mixable` gave."""
        return mixed

    def mixture(self, weights: Tensor, outputs: Tensor) -> Tensor:
        """Outputs (n, ...) of a mixture of models with outputs (models, n, ...), weighted by (models,)."""
        mixed = self.mixable(outputs)
        return self.unmixed((weights.view(-1, *[1] * (mixed.ndim - 1)) * mixed).sum(0))

    def neighbours(self, weight: Tensor, near: Tensor, y: Tensor, width: int) -> Tensor:
        """(k, n, ...) as `mixable`: what samples at the places `near` (k, n, few) say, with targets y (k, m, ...)."""
        flat = y.flatten(2)  # (k, m, numbers)
        rows = torch.arange(len(y), device=y.device)[:, None, None]
        mean = (weight[..., None] * flat[rows, near]).sum(2)
        return mean.view(*near.shape[:2], *y.shape[2:])

    def likelihoods(self, said: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """How likely each of several models, `said` (k, models, n, ...) as `mixable`, makes each event (a target, or
        one of the parts of it), (k, models, events), and which are there, (k, events)."""
        raise NotImplementedError

    def judged(self, answers: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """(k, ways, 2) how many samples each way gets right, 0 where nothing is right or wrong, and the sum of its
        losses with the sign turned; `answers` (k, ways, n, ...)."""
        k, ways = answers.shape[:2]
        targets = y[:, None].expand(k, ways, *y.shape[1:])
        losses = self.losses(answers.flatten(0, 2), targets.flatten(0, 2)).view(k, ways, -1).double()
        lost = -losses.where(mask[:, None] > 0, 0.0).sum(2)
        return torch.stack([torch.zeros_like(lost), lost], dim=2)

    # --- measuring -------------------------------------------------------------------------------------------------

    def counts(self, predicted: Tensor, y: Tensor, mask: Tensor, width: int) -> Tensor:
        """(k, ...) counts and sums of predictions (k, n, ...) that the metrics are computed from."""
        raise NotImplementedError

    def counts_shape(self, width: int) -> tuple[int, ...]:
        """The shape of one client's counts, dense."""
        raise NotImplementedError

    def mean_losses(self, answers: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """(k,) the mean loss of every client, in double; NaN for one without samples."""
        there = mask > 0
        return self._each(self.losses, answers, y).where(there, 0.0).sum(1) / there.sum(1)

    def own(self, answers: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """(k, metrics) the means of a user's own metrics, in double."""
        there = mask > 0
        found = [self._each(m.function, answers, y).where(there, 0.0).sum(1) / there.sum(1)
                 for m in self.metrics if m.function is not None]  # fmt: skip
        return torch.stack(found, dim=1)

    def _each(self, function: Loss, answers: Tensor, y: Tensor) -> Tensor:
        """(k, n) what a function says of every sample of every client."""
        k, n = y.shape[:2]
        if not k * n:
            return torch.zeros(k, n, dtype=torch.float64, device=y.device)
        found = function(answers.flatten(0, 1), y.flatten(0, 1))
        if found.shape != (k * n,):
            raise ValueError(
                f"a loss or metric of your own gives {tuple(found.shape)} for {k * n} samples; give one number a sample"
            )
        return found.view(k, n).double()

    def samples(self, counts: Tensor) -> Tensor:
        """(k,) how many samples counts are of."""
        raise NotImplementedError

    def measures(self, counts: Tensor) -> dict[str, Tensor]:
        """(k,) each of the task's own metrics, by name, in double; NaN where it cannot be said."""
        raise NotImplementedError

    def from_losses(self, losses: Tensor | None) -> dict[str, Tensor]:
        """(k,) the task's own metrics that follow from the clients' mean losses."""
        return {}

    def details(self, counts: Tensor) -> Mapping[str, list[list[float | None]]]:
        """Metrics by class, label or output, by name: for each client a list."""
        return {}

    def chance(self, counts: Tensor) -> tuple[float, float]:
        """What the simplest answer, the same for all clients, reaches in the mean, and by how much a mean may be off
        by chance; NaN where that cannot be said."""
        return math.nan, math.nan


def _shape(shape: Sequence[int]) -> str:
    """A shape in words."""
    if len(shape) < 2:
        return "one number" if math.prod(shape) == 1 else f"{math.prod(shape)} numbers"
    return f"numbers of shape {' x '.join(map(str, shape))}"
