"""A class at every place of a sequence: next characters or words, tags. Places that do not count are marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedquilt._util.metric import ACCURACY, Metric
from fedquilt.client import Client, Split
from fedquilt.tasks.classification import Classification
from fedquilt.tasks.confusion import accuracy

IGNORED = -100  # a target that does not count, as in PyTorch: padding, say


@dataclass(frozen=True)
class Tokens(Classification):
    """Token prediction: targets (n, length) are token numbers, and a model gives (length, tokens) scores for a sample.

    The target -100 marks places that do not count: padding, or a prompt. A sequence's loss is the mean over the places
    that count; metrics are over all such places of a client together. `perplexity` is exp of their mean cross-entropy.

    >>> Tokens().metric.heading, Tokens(lead="perplexity").metric.higher
    ('accuracy %', False)
    """

    kind: ClassVar[str] = "tokens"
    has_classes: ClassVar[bool] = False
    has_neighbours: ClassVar[bool] = False
    known: ClassVar[tuple[Metric, ...]] = (ACCURACY, Metric("perplexity", higher=False, low=1.0))
    simplest: ClassVar[str] = "always naming the commonest token"

    def target(self, y: Tensor, whose: str) -> Tensor:
        if y.ndim != 2:
            raise ValueError(f"{whose}: targets of shape {tuple(y.shape)} are no sequences of tokens; give (n, length)")
        if y.is_floating_point() and bool((y != y.round()).any()):
            raise ValueError(f"{whose}: tokens are whole numbers from 0 up, but one is {float(y[y != y.round()][0]):g}")
        y = y.long()
        strange = (y < 0) & (y != IGNORED)
        if bool(strange.any()):
            raise ValueError(
                f"{whose}: a token is {int(y[strange][0])}; tokens are numbered from 0 up, and {IGNORED} marks places "
                "that do not count"
            )
        return y

    def width(self, clients: Sequence[Client], names: Sequence[str]) -> int:
        changed = [change.train for c in clients for change in c.changes.values() if isinstance(change.train, Split)]
        every = [s for c in clients for s in (c.train, c.validation, c.test)] + changed
        return max([int(split.y.max()) + 1 for split in every if split.y.numel()] + [len(names), 1])

    def output(self, y: Tensor, width: int) -> tuple[int, ...]:
        return (*y.shape[2:], width)

    def check_outputs(self, outputs: Tensor, y: Tensor, width: int, whose: str) -> None:
        super(Classification, self).check_outputs(outputs, y, width, whose)

    def usual_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        counts = y != IGNORED
        each = F.cross_entropy(outputs.transpose(1, 2), y.where(counts, 0), reduction="none") * counts  # (n, length)
        return each.sum(1) / counts.sum(1).clamp(min=1)

    def likelihoods(self, said: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        places, there = self._places(y, mask)
        return super().likelihoods(said.flatten(2, 3), places, there)

    def judged(self, answers: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return super().judged(answers.flatten(2, 3), *self._places(y, mask))

    def _places(self, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(k, n * length) tokens, and 1 for those that count."""
        counts = (y != IGNORED) & (mask > 0)[..., None]
        return y.where(counts, 0).flatten(1), counts.flatten(1).to(mask.dtype)

    # --- measuring -------------------------------------------------------------------------------------------------

    def counts(self, predicted: Tensor, y: Tensor, mask: Tensor, width: int) -> Tensor:
        said = predicted.flatten(1) if y.shape[1] else torch.zeros(len(y), 0, dtype=torch.int64, device=y.device)
        return super().counts(said, *self._places(y, mask), width)

    def mean_losses(self, answers: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        if not isinstance(self.loss, str) or not y.shape[1]:
            return super(Classification, self).mean_losses(answers, y, mask)
        return super().mean_losses(answers.flatten(1, 2), *self._places(y, mask))

    def measures(self, counts: Tensor) -> dict[str, Tensor]:
        return {"accuracy": accuracy(counts)}

    def from_losses(self, losses: Tensor | None) -> dict[str, Tensor]:
        if losses is None or not isinstance(self.loss, str):
            return {}
        return {"perplexity": losses.exp()}

    def details(self, counts: Tensor) -> Mapping[str, list[list[float | None]]]:
        return {}
