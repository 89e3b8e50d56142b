"""Several labels a sample, each there or not: binary cross-entropy, counts by label, F-measures."""

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

_SUMS = 4  # by label: samples, those that have it, those it is predicted for, both; then samples that are all right
_BELOW_ONE = 1e-7  # a probability nearer to 0 or 1 than this counts as this: its logit would be infinite in float32


@dataclass(frozen=True)
class MultiLabel(Task):
    """Several labels a sample: targets (n, labels) are 0 or 1, and a model gives a logit for each label.

    A label is predicted where its logit is above 0. `f1` is over all labels and samples together (micro), `f1_macro`
    the mean over the labels that are there, `exact` the share of samples with all labels right, `hamming` the share of
    single labels that are wrong, as scikit-learn has them.

    >>> MultiLabel().metric.heading, MultiLabel(lead="hamming").metric.higher
    ('f1 %', False)
    """

    kind: ClassVar[str] = "multilabel"
    known: ClassVar[tuple[Metric, ...]] = (
        Metric("f1", percent=True), Metric("f1_macro", percent=True), Metric("exact", percent=True),
        Metric("hamming", higher=False, percent=True),
    )  # fmt: skip
    known_losses: ClassVar[tuple[str, ...]] = ("binary cross-entropy",)
    simplest: ClassVar[str] = "always naming the commonest labels"

    def target(self, y: Tensor, whose: str) -> Tensor:
        if y.ndim != 2:
            raise ValueError(
                f"{whose}: targets of shape {tuple(y.shape)} are no lists of labels; give (n, labels), 1 where a "
                "sample has a label and 0 where not"
            )
        odd = (y != 0) & (y != 1)
        if bool(odd.any()):
            raise ValueError(
                f"{whose}: a target is {float(y[odd][0]):g}; give 1 where a sample has a label, 0 where not"
            )
        return y.float()

    def width(self, clients: Sequence[Client], names: Sequence[str]) -> int:
        return max(clients[0].train.y.shape[1] if clients[0].train.x.numel() else 1, len(names))

    def output(self, y: Tensor, width: int) -> tuple[int, ...]:
        return tuple(y.shape[2:])

    def usual_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs > 0

    def mixable(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def unmixed(self, mixed: Tensor) -> Tensor:
        return mixed.logit(_BELOW_ONE)

    def likelihoods(self, said: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        likely = torch.where(y[:, None] > 0, said, 1 - said).double()  # (k, models, n, labels)
        return likely.flatten(2), mask.repeat_interleave(y.shape[2], dim=1)

    # --- measuring -------------------------------------------------------------------------------------------------

    def counts(self, predicted: Tensor, y: Tensor, mask: Tensor, width: int) -> Tensor:
        said = predicted.reshape(y.shape) > 0
        true, there = y > 0, (mask > 0)[..., None]
        by_label = [torch.ones_like(true), true, said, true & said]
        sums = torch.stack([(each & there).sum(1) for each in by_label], dim=1)  # (k, sums, labels)
        right = ((said == true).all(2) & (mask > 0)).sum(1)
        return torch.cat([sums, right[:, None, None].expand(-1, 1, sums.shape[2])], dim=1).double()

    def counts_shape(self, width: int) -> tuple[int, ...]:
        return (_SUMS + 1, width)

    def samples(self, counts: Tensor) -> Tensor:
        return counts[:, 0, 0].long()

    def measures(self, counts: Tensor) -> dict[str, Tensor]:
        n, there, said, both, right = counts.unbind(1)  # (k, labels)
        shown = (there > 0).double()
        micro = 2 * both.sum(1) / (there + said).sum(1).clamp(min=1)
        macro = (_f(there, said, both) * shown).sum(1) / shown.sum(1)
        wrong = (there + said - 2 * both).sum(1) / n.sum(1)
        of_none = n[:, 0] > 0
        return {
            "f1": micro.where(of_none, torch.nan), "f1_macro": macro,
            "exact": right[:, 0] / n[:, 0], "hamming": wrong,
        }  # fmt: skip

    def details(self, counts: Tensor) -> Mapping[str, list[list[float | None]]]:
        _, there, said, both, _ = counts.unbind(1)
        pairs = zip(_f(there, said, both).tolist(), (there > 0).tolist(), strict=True)
        return {"f_by_class": [[round(f, 6) if t else None for f, t in zip(*pair, strict=True)] for pair in pairs]}

    def chance(self, counts: Tensor) -> tuple[float, float]:
        """The highest mean F-measure that one set of labels, the same for all clients and samples, can reach."""
        counts = counts[counts[:, 0, 0] > 0]
        if self.lead != "f1" or not len(counts):
            return math.nan, math.nan
        n, there = counts[:, 0], counts[:, 1]  # (k, labels)
        order = (there / n).mean(0).argsort(descending=True)
        both, said = there[:, order].cumsum(1), n[:, order].cumsum(1)  # of the 1, 2, ... commonest labels
        best = float((2 * both / (there.sum(1, keepdim=True) + said)).mean(0).max())
        return best, math.sqrt(max(best * (1 - best), 0.0) / float(n[:, 0].sum()))


def _f(there: Tensor, said: Tensor, both: Tensor) -> Tensor:
    """(k, labels) F-measures; 0 for a label that is neither there nor predicted."""
    return 2 * both / (there + said).clamp(min=1)
