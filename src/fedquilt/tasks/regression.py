"""Numbers to predict, one or several a sample: squared, absolute or Huber's loss, sums of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedquilt._util.metric import Metric
from fedquilt.client import Client
from fedquilt.tasks.task import Task

_SUMS = 5  # number of samples, sums of targets, of their squares, of errors' squares and sizes


@dataclass(frozen=True)
class Regression(Task):
    """Numbers to predict: a model gives as many as a target has.

    Losses are squared (the default), absolute or huber (of errors up to 1 the half square). Metrics of several outputs
    are means over them, as scikit-learn has them.

    >>> Regression().metric.heading, Regression(loss="huber", lead="mae").metric.higher
    ('rmse', False)
    """

    kind: ClassVar[str] = "regression"
    known: ClassVar[tuple[Metric, ...]] = (
        Metric("rmse", higher=False, low=0.0), Metric("mae", higher=False, low=0.0), Metric("r2", high=1.0),
    )  # fmt: skip
    known_losses: ClassVar[tuple[str, ...]] = ("squared", "absolute", "huber")
    simplest: ClassVar[str] = "always answering with the mean target"

    def target(self, y: Tensor, whose: str) -> Tensor:
        return y.float()[:, None] if y.ndim == 1 else y.float()

    def width(self, clients: Sequence[Client], names: Sequence[str]) -> int:
        return max(math.prod(clients[0].train.y.shape[1:]) if clients[0].train.x.numel() else 1, len(names))

    def output(self, y: Tensor, width: int) -> tuple[int, ...]:
        return tuple(y.shape[2:])

    def check_outputs(self, outputs: Tensor, y: Tensor, width: int, whose: str) -> None:
        if math.prod(outputs.shape[1:]) != 1 or math.prod(y.shape[1:]) != 1:
            super().check_outputs(outputs, y, width, whose)

    def usual_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        outputs = outputs.reshape(y.shape)
        if self.loss == "huber":
            each = F.huber_loss(outputs, y, reduction="none")
        else:
            each = (outputs - y).square() if self.loss == "squared" else (outputs - y).abs()
        return each.flatten(1).mean(1)

    def likelihoods(self, said: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Errors are taken to be normal, with the variance of each client's best model."""
        off = (said.reshape(*said.shape[:2], *y.shape[1:]) - y[:, None]).double().flatten(3).square().mean(3)
        there = mask[:, None] > 0
        mean = off.where(there, 0.0).sum(2) / there.sum(2).clamp(min=1)  # (k, models)
        variance = mean.amin(1).clamp(min=torch.finfo(off.dtype).tiny)[:, None, None]
        logs = -off / (2 * variance)
        return (logs - logs.amax(1, keepdim=True)).exp(), mask

    # --- measuring -------------------------------------------------------------------------------------------------

    def counts(self, predicted: Tensor, y: Tensor, mask: Tensor, width: int) -> Tensor:
        truth = y.flatten(2).double() if y.ndim > 2 else y.double()[..., None]
        off = predicted.reshape(truth.shape).double() - truth  # (k, n, outputs)
        each = torch.stack([torch.ones_like(truth), truth, truth.square(), off.square(), off.abs()], dim=1)
        return each.where(mask[:, None, :, None] > 0, 0.0).sum(2)  # (k, sums, outputs)

    def counts_shape(self, width: int) -> tuple[int, ...]:
        return (_SUMS, width)

    def samples(self, counts: Tensor) -> Tensor:
        return counts[:, 0, 0].round().long()

    def measures(self, counts: Tensor) -> dict[str, Tensor]:
        n, total, squares, off_squares, off = counts.unbind(1)  # (k, outputs) each
        spread = squares - total.square() / n
        # as in scikit-learn: where all targets are alike, 1 if nothing is wrong, else 0; of one sample nothing is said
        level = spread <= 1e-12 * squares.clamp(min=torch.finfo(squares.dtype).tiny)
        r2 = torch.where(level, (off_squares == 0).double(), 1 - off_squares / spread.where(~level, 1.0))
        return {
            "rmse": (off_squares / n).sqrt().mean(1),
            "mae": (off / n).mean(1),
            "r2": r2.mean(1).where(n[:, 0] > 1, torch.nan),
        }

    def details(self, counts: Tensor) -> Mapping[str, list[list[float | None]]]:
        if counts.shape[2] == 1:
            return {}
        rmse = (counts[:, 3] / counts[:, 0]).sqrt()
        return {"rmse_by_output": [[round(value, 6) for value in client] for client in rmse.tolist()]}

    def chance(self, counts: Tensor) -> tuple[float, float]:
        """The mean error over clients of the answer with the smallest square over all of them: the mean target."""
        there = counts[counts[:, 0, 0] > 0]
        if self.lead != "rmse" or not len(there):
            return math.nan, math.nan
        n, total, squares = there[:, 0], there[:, 1], there[:, 2]
        mean = total.sum(0) / n.sum(0)
        off = (squares - 2 * mean * total + n * mean.square()).clamp(min=0) / n
        best = float(off.sqrt().mean())
        return best, best / math.sqrt(2 * float(n[:, 0].sum()))
