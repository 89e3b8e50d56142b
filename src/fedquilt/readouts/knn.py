"""kNN-Per (Marfoq et al. 2022). A client's own training samples answer beside the model that it received.

    p(y | x) = lambda_i p_kNN(y | x) + (1 - lambda_i) softmax(received model)(y | x)
    p_kNN(y | x) = sum over the k nearest training samples x_j of label y of w_j / sum over all k of w_j,
    w_j = exp(-|f(x) - f(x_j)|^2 / (dim scale)),    f: what the received model's last layer is given, of size dim

Probabilities are mixed, never logits. lambda_i is, of 0, 0.1, ..., 1, what gets most of the client's validation samples
right (of several the likeliest); a client that has none takes what is best for all clients together, and on a device by
itself the received model alone, lambda 0. The squared distance is the authors' code's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.client_stack import PaddedSplit
from fedquilt.interface.readout import EvaluationContext, Readout
from fedquilt.readouts.chosen import best
from fedquilt.tasks import Task

_GRID = tuple(step / 10 for step in range(11))
_DISTANCES_AT_ONCE = 2**24


def nearest(look: EvaluationContext, split: str, k: int, scale: float) -> Tensor | None:
    """(k, n, ...) what a sample's nearest neighbours say: the share of each label among them, or their mean target.

    None where features are not seen, or neighbours say nothing about the task.
    """
    if not look.task.has_neighbours:
        return None
    return look.once(f"{k} neighbours, scale {scale}", split, lambda: _nearest(look, split, k, scale))


def _nearest(look: EvaluationContext, split: str, k: int, scale: float) -> Tensor | None:
    table = look.table("train")
    features, own = look.features(split), look.features("train")
    if features is None or own is None:
        return None
    step = max(1, _DISTANCES_AT_ONCE // max(1, own[:, :, 0].numel()))
    parts = [_said(features[:, at : at + step], own, table, look, k, scale) for at in range(0, features.shape[1], step)]
    return torch.cat(parts, dim=1) if parts else look.task.mixable(look.scores("received", split))


def _said(x: Tensor, own: Tensor, table: PaddedSplit, look: EvaluationContext, k: int, scale: float) -> Tensor:
    """(k, n, ...) for samples of features x (k, n, dim), among those of a table, of features `own` (k, m, dim)."""
    apart = torch.cdist(x, own, compute_mode="donot_use_mm_for_euclid_dist").square()
    near = apart.where(table.mask[:, None] > 0, torch.inf).topk(min(k, own.shape[1]), dim=2, largest=False)
    weight = torch.softmax(-near.values / (own.shape[2] * scale), dim=2)  # the same, and sums never vanish
    return look.task.neighbours(weight, near.indices, table.y, look.received.classes)


@dataclass(frozen=True)
class KNN(Readout):
    """The received model and the labels of the client's `k` nearest training samples, mixed as validation says."""

    kind: ClassVar[str] = "knn"
    pools: ClassVar[int] = 1
    k: int = 10
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.k < 1 or self.scale <= 0:
            raise ValueError(f"knn: k={self.k} and scale={self.scale} leave no neighbour a say; give ones above 0")

    def check_task(self, task: Task) -> None:
        if not task.has_neighbours:
            raise ValueError(
                f"the read-out '{self.name}' asks the nearest samples, which say nothing about {task.kind}: use the "
                "read-out 'received'"
            )

    @property
    def name(self) -> str:
        return self.kind if self.k == KNN.k else f"{self.kind}-{self.k}"

    def logs(self, look: EvaluationContext, split: str) -> Tensor:
        which = best(self.evidence(look), look.pooled.get(self.name))
        near, model = self._both(look, split)
        part = torch.tensor(_GRID, device=which.device)[which].view(-1, *[1] * (near.ndim - 1))
        return look.task.unmixed(part * near + (1 - part) * model)

    def evidence(self, look: EvaluationContext) -> Tensor:
        near, model = self._both(look, "validation")
        mixed = torch.stack([part * near + (1 - part) * model for part in _GRID], dim=1)  # (k, ways, n, ...)
        table = look.table("validation")
        return look.task.judged(look.task.unmixed(mixed), table.y, table.mask)

    def _both(self, look: EvaluationContext, split: str) -> tuple[Tensor, Tensor]:
        """(k, n, ...) what neighbours say and what the model does."""
        look.must_be_logits(self.name)
        near = nearest(look, split, self.k, self.scale)
        if near is None:
            view = look.received
            raise ValueError(
                f"the read-out '{self.name}' compares what the last layer is given, and the unit "
                f"'{view.family.head.name}' of client '{view.names[0]}' is not seen to be given anything, sample by "
                "sample; let forward call it as a layer, or leave this read-out out"
            )
        return near, look.task.mixable(look.scores("received", split))
