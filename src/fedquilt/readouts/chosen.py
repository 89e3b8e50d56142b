"""Choosing one of several ways to answer, client by client, by validation samples alone."""

from __future__ import annotations

import torch
from torch import Tensor


def best(evidence: Tensor, pooled: Tensor | None) -> Tensor:
    """(k,) the way that is right most often, and of several the likeliest, by (k, ways, 2) of `Task.judged`.

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
