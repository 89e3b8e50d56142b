"""Choosing one of several ways to answer, client by client, by validation samples alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fedquilt.interface.client_stack import PaddedSplit


def judged(logs: Tensor, table: PaddedSplit) -> Tensor:
    """(k, ways, 2) how many samples each way gets right, and the log-likelihood that it gives their labels.

    `logs` (k, ways, n, classes) are log-probabilities.
    """
    there = table.mask[:, None] > 0  # (k, 1, n)
    right = (logs.argmax(3) == table.y[:, None]) & there
    of_truth = logs.gather(3, table.y[:, None, :, None].expand(*logs.shape[:3], 1))[..., 0]  # (k, ways, n)
    return torch.stack([right.sum(2).double(), of_truth.double().where(there, 0.0).sum(2)], dim=2)


def best(evidence: Tensor, pooled: Tensor | None) -> Tensor:
    """(k,) the way that is right most often, and of several the likeliest, by (k, ways, 2) of `judged`.

    A client without validation samples takes the federation's choice, by `pooled` (ways, 2); the first way, where that
    is not known either.

    >>> mine = torch.tensor([[[3.0, -2.0], [4.0, -2.0], [4.0, -1.0]], [[0.0, 0.0]] * 3])
    >>> best(mine, mine.sum(0)).tolist(), best(mine, None).tolist()
    ([2, 2], [2, 0])
    """
    nothing = (evidence == 0).flatten(1).all(1)
    if pooled is not None:
        evidence = torch.where(nothing[:, None, None], pooled.to(evidence.device), evidence)
    right, likely = evidence.unbind(2)
    likely = likely.clamp(min=torch.finfo(likely.dtype).min)  # above those that are not right as often
    return likely.where(right == right.max(1, keepdim=True).values, -torch.inf).argmax(1)
