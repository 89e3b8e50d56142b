"""Finding circles: from declared traits and labels, from how alike models answer, from how alike updates are."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import torch
from torch import Tensor


def circles_by_trait(values: Sequence[Hashable]) -> Tensor:
    """(K,) one circle per distinct value, numbered in sorted order; None keeps a client out.

    >>> circles_by_trait(["watch", "phone", None, "watch"]).tolist()
    [1, 0, -1, 1]
    """
    # By type first: values of different types do not compare. Tuples and the like sort by how they print.
    known = sorted(
        {v for v in values if v is not None}, key=lambda v: (type(v).__name__, v if isinstance(v, int) else str(v))
    )
    number = {value: i for i, value in enumerate(known)}
    return torch.tensor([-1 if v is None else number[v] for v in values], dtype=torch.int64)


def circles_by_labels(labels: Sequence[Collection[int]], classes: int) -> Tensor:
    """(classes, K) for each label one circle of the clients that have it.

    >>> circles_by_labels([{0, 1}, {1}], classes=2).tolist()
    [[0, -1], [0, 0]]
    """
    rows = [[0 if label in mine else -1 for mine in labels] for label in range(classes)]
    return torch.tensor(rows, dtype=torch.int64).reshape(classes, len(labels))
