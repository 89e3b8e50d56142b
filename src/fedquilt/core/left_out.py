"""How many updates of each client were left out of merges: counted when somebody asks, since that waits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

_COUNT_AFTER = 64  # rounds that wait to be counted


class LeftOut:
    """Counts updates of clients that were not finite, or that did not come under secure sums.

    >>> left_out = LeftOut(3)
    >>> left_out.add([(torch.tensor([0, 2]), torch.tensor([False, True])), (torch.tensor([2]), torch.tensor([True]))])
    >>> left_out.counts.tolist()
    [0, 0, 1]
    """

    def __init__(self, clients: int, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(clients, dtype=torch.int64, device=device)
        self._waiting: list[list[tuple[Tensor, Tensor]]] = []

    def add(self, round_: list[tuple[Tensor, Tensor]]) -> None:
        """A round's merges: the numbers of who sent, and whose copies were left out."""
        self._waiting.append(round_)
        if len(self._waiting) >= _COUNT_AFTER:
            self._count()

    @property
    def counts(self) -> Tensor:
        """(K,) how many updates of each client were left out so far."""
        self._count()
        return self._counts

    @counts.setter
    def counts(self, counts: Tensor) -> None:
        self._waiting.clear()
        self._counts = counts

    def _count(self) -> None:
        """Count those since the last time: one, however many of its units are bad."""
        waiting = [(at, ids, flags) for at, round_ in enumerate(self._waiting) for ids, flags in round_]
        self._waiting.clear()
        if not waiting:
            return
        clients, device = len(self._counts), self._counts.device
        updates, which = torch.cat([at * clients + ids for at, ids, _ in waiting]).unique(return_inverse=True)
        bad = torch.zeros(len(updates), dtype=torch.int64, device=device)
        bad.index_add_(0, which.to(device), torch.cat([flags for _, _, flags in waiting]).long())
        self._counts.index_add_(0, (updates % clients).to(device), (bad > 0).long())
