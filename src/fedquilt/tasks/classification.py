"""One class a sample: cross-entropy, confusion counts, accuracy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt._util.metric import ACCURACY, Metric
from fedquilt.client import Client, Split
from fedquilt.layers.prepare import cross_entropies
from fedquilt.tasks.confusion import accuracy, confusion, f_by_class, macro_f1, margins, mean_losses
from fedquilt.tasks.task import Task


@dataclass(frozen=True)
class Classification(Task):
    """One class a sample, numbered from 0 up: the highest of a model's outputs is its answer.

    >>> Classification().metric.heading, Classification(lead="f1").metric.heading
    ('accuracy %', 'f1 %')
    """

    kind: ClassVar[str] = "classification"
    has_classes: ClassVar[bool] = True
    known: ClassVar[tuple[Metric, ...]] = (ACCURACY, Metric("f1", percent=True))
    known_losses: ClassVar[tuple[str, ...]] = ("cross-entropy",)
    counted: ClassVar[torch.dtype] = torch.int64
    simplest: ClassVar[str] = "always naming the commonest class"

    def target(self, y: Tensor, whose: str) -> Tensor:
        if y.ndim != 1:
            raise ValueError(
                f"{whose}: targets of shape {tuple(y.shape)} are no classes, of which there is one a sample; say what "
                "they are, as in task='multilabel', 'tokens' or 'regression'"
            )
        if y.is_floating_point():
            odd = float(y[y != y.round()][0]) if bool((y != y.round()).any()) else float(y.min())
            raise ValueError(f"{whose}: labels are whole numbers from 0 up, but one is {odd:g}")
        if len(y) and int(y.min()) < 0:
            raise ValueError(
                f"{whose}: label {int(y.min())} is negative; leave unlabelled samples out, or say task='regression' if "
                "these are numbers to predict"
            )
        return y

    def width(self, clients: Sequence[Client], names: Sequence[str]) -> int:
        highest = max(max(c.labels, default=0) for c in clients)
        changes = [change for c in clients for change in c.changes.values()]
        changed = [max(change.labels, default=0) for change in changes if change.labels]
        streamed = [int(change.train.y.max()) for change in changes if isinstance(change.train, Split)]
        return max(highest + 1, max(changed + streamed, default=0) + 1, len(names))

    def output(self, y: Tensor, width: int) -> tuple[int, ...]:
        return (width,)

    def check_outputs(self, outputs: Tensor, y: Tensor, width: int, whose: str) -> None:
        if outputs.ndim != 2:
            shape = tuple(outputs.shape[1:])
            raise ValueError(f"{whose}: its model gives {shape} for a sample, not one number for each class")
        ones = torch.ones(len(outputs), device=outputs.device)
        if isinstance(self.loss, str) and bool((outputs >= 0).all()) and torch.allclose(outputs.float().sum(1), ones):
            warnings.warn(
                "what models give are probabilities, and cross-entropy takes scores: leave out the softmax that they "
                "end with, or they learn slowly",
                stacklevel=2,
            )

    def usual_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropies(outputs, y)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.log_softmax(-1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def mixable(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def unmixed(self, mixed: Tensor) -> Tensor:
        return mixed.log()

    def mixture(self, weights: Tensor, outputs: Tensor) -> Tensor:
        logs = outputs.log_softmax(-1)
        return (weights.log().view(-1, *[1] * (logs.ndim - 1)) + logs).logsumexp(0)

    def neighbours(self, weight: Tensor, near: Tensor, y: Tensor, width: int) -> Tensor:
        labels = y[:, None].expand(-1, near.shape[1], -1).gather(2, near)
        return weight.new_zeros(*near.shape[:2], width).scatter_add_(2, labels, weight)

    def likelihoods(self, said: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        truth = y[:, None, :, None].expand(*said.shape[:3], 1)
        return said.gather(3, truth)[..., 0].double(), mask

    def judged(self, answers: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        there = mask[:, None] > 0  # (k, 1, n)
        right = (answers.argmax(3) == y[:, None]) & there
        of_truth = answers.gather(3, y[:, None, :, None].expand(*answers.shape[:3], 1))[..., 0]  # (k, ways, n)
        return torch.stack([right.sum(2).double(), of_truth.double().where(there, 0.0).sum(2)], dim=2)

    # --- measuring -------------------------------------------------------------------------------------------------

    def counts(self, predicted: Tensor, y: Tensor, mask: Tensor, width: int) -> Tensor:
        return confusion(predicted, y, mask, width)

    def counts_shape(self, width: int) -> tuple[int, ...]:
        return (width, width)

    def mean_losses(self, answers: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return mean_losses(answers, y, mask) if isinstance(self.loss, str) else super().mean_losses(answers, y, mask)

    def samples(self, counts: Tensor) -> Tensor:
        return margins(counts).there.sum(1)

    def measures(self, counts: Tensor) -> dict[str, Tensor]:
        return {"accuracy": accuracy(counts), "f1": macro_f1(counts)}

    def details(self, counts: Tensor) -> Mapping[str, list[list[float | None]]]:
        there = margins(counts).there > 0
        return {
            "f_by_class": [[round(f, 6) if t else None for f, t in zip(*pair, strict=True)]
                           for pair in zip(f_by_class(counts).tolist(), there.tolist(), strict=True)]
        }  # fmt: skip

    def chance(self, counts: Tensor) -> tuple[float, float]:
        """The highest mean accuracy over clients that one class, the same for all of them, can reach."""
        if self.lead != "accuracy":
            return math.nan, math.nan
        there = margins(counts).there.double()  # (k, classes)
        measured = there[there.sum(1) > 0]
        if not len(measured):
            return math.nan, math.nan
        best = float((measured / measured.sum(1, keepdim=True)).mean(0).max())
        return best, math.sqrt(max(best * (1 - best), 0.0) / float(measured.sum()))
