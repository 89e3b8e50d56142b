"""Counting what clients predict: one pass gives accuracy, macro F1, per-class F-measures and the confusion matrix.

Counts are sparse: with many classes nearly all cells of a confusion matrix are empty, and a client has no more of the
others than it has samples.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor


def confusion(predicted: Tensor, truth: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Counts by true (rows) and predicted (columns) class of every client, a sparse (k, classes, classes).

    >>> confusion(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]), torch.ones(1, 2), 2).to_dense().tolist()
    [[[1, 1], [0, 0]]]
    """
    client = torch.arange(len(truth), device=truth.device)[:, None]
    cells = ((client * classes + truth) * classes + predicted)[mask > 0]  # (samples,)
    cells, counts = cells.unique(return_counts=True)
    places = torch.stack([cells // classes**2, cells // classes % classes, cells % classes])
    shape = (len(truth), classes, classes)
    with warnings.catch_warnings():  # of being told whether to check, which some versions of PyTorch do all the same
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        return torch.sparse_coo_tensor(places, counts, shape, check_invariants=False, is_coalesced=True)


def mean_losses(logs: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """The mean cross-entropy of every client, (k,), in double, from log-probabilities (k, n, classes).

    NaN for a client without samples, infinite where one of its labels was held to be impossible.

    >>> logs = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]).log()
    >>> mean_losses(logs, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]))
    tensor([0.6931], dtype=torch.float64)
    """
    of_truth = logs.gather(2, truth[:, :, None])[:, :, 0].double()
    return -of_truth.where(mask > 0, 0.0).sum(1) / (mask > 0).sum(1)


class Margins(NamedTuple):
    """(k, classes) how many samples of each class a client has, took for it, and both."""

    there: Tensor
    taken: Tensor
    right: Tensor


def margins(counts: Tensor) -> Margins:
    """The margins and the diagonal of sparse counts (k, classes, classes).

    >>> margins(torch.tensor([[[1, 1], [0, 2]]]).to_sparse()).taken
    tensor([[1, 3]])
    """
    client, truth, predicted = counts.coalesce().indices()
    found, (clients, classes) = counts.coalesce().values(), counts.shape[:2]

    def by(label: Tensor, some: Tensor) -> Tensor:
        empty = torch.zeros(clients * classes, dtype=torch.int64, device=some.device)
        return empty.index_add_(0, client * classes + label, some).view(clients, classes)

    return Margins(by(truth, found), by(predicted, found), by(truth, torch.where(truth == predicted, found, 0)))


def accuracy(counts: Tensor) -> Tensor:
    """The share of right predictions of every client, (k,), in double; NaN for a client without samples.

    In single precision one sample of ten more would not be the same difference for everybody, and ranks need ties.

    >>> accuracy(torch.tensor([[[3, 7], [0, 0]]]).to_sparse()).item()
    0.3
    """
    there, _, right = margins(counts)
    return right.sum(1).double() / there.sum(1)


def f_by_class(counts: Tensor) -> Tensor:
    """The F-measure of every client and class, (k, classes); 0 for a class that is neither there nor predicted.

    >>> f_by_class(torch.tensor([[[1, 1], [0, 2]]]).to_sparse())
    tensor([[0.6667, 0.8000]], dtype=torch.float64)
    """
    there, taken, right = margins(counts)
    return 2 * right.double() / (there + taken).clamp(min=1)


def macro_f1(counts: Tensor) -> Tensor:
    """The mean F-measure over the classes a client's samples show, (k,); NaN for a client without samples."""
    there = margins(counts).there > 0
    return (f_by_class(counts) * there).sum(1) / there.sum(1)
