"""Counting what clients predict: one pass gives accuracy, macro F1, per-class F-measures and the confusion matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def confusion(predicted: Tensor, truth: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Counts by true (rows) and predicted (columns) class of every client, (k, classes, classes).

    >>> confusion(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]), torch.ones(1, 2), 2).tolist()
    [[[1, 1], [0, 0]]]
    """
    k = len(predicted)
    cell = truth * classes + predicted  # (k, n)
    counts = torch.zeros(k, classes * classes, dtype=torch.int64, device=predicted.device)
    counts.scatter_add_(1, cell, mask.to(torch.int64))
    return counts.view(k, classes, classes)


def accuracy(counts: Tensor) -> Tensor:
    """The share of right predictions of every client, (k,), in double; NaN for a client without samples.

    In single precision one sample of ten more would not be the same difference for everybody, and ranks need ties.

    >>> accuracy(torch.tensor([[[3, 7], [0, 0]]])).item()
    0.3
    """
    return counts.diagonal(dim1=1, dim2=2).sum(1).double() / counts.sum((1, 2))


def f_by_class(counts: Tensor) -> Tensor:
    """The F-measure of every client and class, (k, classes); 0 for a class that is neither there nor predicted.

    >>> f_by_class(torch.tensor([[[1, 1], [0, 2]]]))
    tensor([[0.6667, 0.8000]])
    """
    right = counts.diagonal(dim1=1, dim2=2)
    return 2 * right / (counts.sum(1) + counts.sum(2)).clamp(min=1)


def macro_f1(counts: Tensor) -> Tensor:
    """The mean F-measure over the classes a client's samples show, (k,); NaN for a client without samples."""
    there = counts.sum(2) > 0
    return (f_by_class(counts.double()) * there).sum(1) / there.sum(1)
