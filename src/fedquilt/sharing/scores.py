"""Scores of samples that everybody holds, as units to share: label by label, or sample by sample under its label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NEVER = -1e9  # the score of a label that somebody does not speak about; finite, so that 0 times it is 0


class Sheet(NamedTuple):
    """How a table of scores, (..., classes, samples), lies in units, one a label.

    With `labels` None a unit is a label's row: what is said of that label about every sample. With the samples' labels,
    (samples,), it is the columns of the samples that have it, class after class, in the order in which they come.

    >>> table = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    >>> {unit: part.tolist() for unit, part in Sheet(2).units(torch.tensor([[1, 2, 3], [4, 5, 6]])).items()}
    {'label-0': [1, 2, 3], 'label-1': [4, 5, 6]}
    >>> by_sample = Sheet(2, torch.tensor([1, 0, 1]))
    >>> {unit: part.tolist() for unit, part in by_sample.units(torch.tensor([[1, 2, 3], [4, 5, 6]])).items()}
    {'label-0': [2, 5], 'label-1': [1, 4, 3, 6]}
    >>> bool((by_sample.table(by_sample.units(table)) == table).all())
    True
    """

    classes: int
    labels: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """The units, by label."""
        return [f"label-{label}" for label in range(self.classes)]

    def units(self, table: Tensor) -> dict[str, Tensor]:
        """The units of a table (classes, samples)."""
        if self.labels is None:
            return dict(zip(self.names, table, strict=True))
        by_sample = table[:, self._order].T  # (samples, classes), the samples of a label together
        counts = self.labels.bincount(minlength=self.classes).tolist()
        return {name: part.flatten() for name, part in zip(self.names, by_sample.split(counts), strict=True)}

    def table(self, units: Mapping[str, Tensor]) -> Tensor:
        """(..., classes, samples) the table of some units, (..., size) each."""
        parts = [units[name] for name in self.names]
        if self.labels is None:
            return torch.stack(parts, -2)
        together = torch.cat(parts, -1)
        by_sample = together.view(*together.shape[:-1], -1, self.classes)
        return by_sample.transpose(-1, -2)[..., self._order.argsort()]

    @property
    def _order(self) -> Tensor:
        assert self.labels is not None
        return self.labels.argsort(stable=True)


def public_labels(counts: Sequence[int], classes: int, client: str) -> Tensor:
    """(n,) the labels of public samples, label after label, of which a client holds so many of each.

    >>> public_labels((2, 0, 1), 3, "ann").tolist()
    [0, 0, 2]
    """
    if not counts:
        raise ValueError(
            f"score sharing: client '{client}' holds no public samples; give the scenario common=(x, y), and "
            "public_test=(x, y) to measure on"
        )
    if len(counts) > classes:
        raise ValueError(
            f"score sharing: there are public samples of label {len(counts) - 1}, which nobody owns; leave them out"
        )
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def masked(outputs: Tensor, owned: Tensor) -> Tensor:
    """A model's outputs (n, classes), silent about labels that its client does not own."""
    if outputs.shape[1] != len(owned):
        raise ValueError(
            f"score sharing: a model gives {outputs.shape[1]} outputs, but there are {len(owned)} labels; give it an "
            "output for every label of the federation, those that its client does not own are masked"
        )
    return torch.where(owned, outputs, NEVER)


def accuracy_by_label(scores: Tensor, labels: Tensor) -> Tensor:
    """(K, classes) how often each client's scores (K, classes, n) are right about the samples of each label (n,).

    >>> accuracy_by_label(torch.tensor([[[0.9, 0.8, 0.3], [0.1, 0.2, 0.7]]]), torch.tensor([0, 1, 1])).tolist()
    [[1.0, 0.5]]
    """
    of_label = labels == torch.arange(scores.shape[1])[:, None]  # (classes, n)
    right = (scores.argmax(1) == labels).float() @ of_label.float().T
    return right / of_label.sum(1).clamp(min=1)
