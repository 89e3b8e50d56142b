"""Where clients rest between rounds: a row each, and no memory for those who never took part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedquilt._util.shared_memory import common_zeros, place_on


class RowStore:
    """The rows (k, width) of a family's clients. Until a client is first put back it has one of the `first` rows.

    >>> rest = RowStore(torch.tensor([[1.0, 2.0]]), [0, 0])
    >>> rest.put([1], torch.tensor([[5.0, 6.0]]))
    >>> rest.take([0, 1]).tolist()
    [[1.0, 2.0], [5.0, 6.0]]
    """

    def __init__(self, first: Tensor, which: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.first, self.which = first.to(device), list(which)
        shape = (len(which), first.shape[1])
        on_cpu = self.first.device.type == "cpu"
        self.store = common_zeros(shape) if on_cpu else torch.empty(shape, device=device)
        self.fresh = set(range(len(which)))  # those that nobody put back yet

    @property
    def device(self) -> torch.device:
        """Where the rows rest."""
        return self.store.device

    def all(self) -> Tensor:
        """(k, width) everyone's row itself, to be written to."""
        for number, row in enumerate(self.first):  # there are few: clients of one family mostly start alike
            places = [place for place in self.fresh if self.which[place] == number]
            self.store[self.index(places)] = row
        self.fresh.clear()
        return self.store

    def take(self, places: Sequence[int]) -> Tensor:
        """(n, width) a copy of some rows."""
        rows = self.store[self.index(places)]
        if self.fresh:
            at = [i for i, place in enumerate(places) if place in self.fresh]
            if at:
                rows[at] = self.first[[self.which[places[i]] for i in at]]
        return rows

    def started(self, places: Sequence[int]) -> Tensor:
        """(n, width) a copy of the rows that some clients had at first."""
        return self.first[[self.which[place] for place in places]]

    def put(self, places: Sequence[int], rows: Tensor) -> None:
        """Put rows (n, width) back."""
        self.store.index_copy_(0, self.index(places), rows.to(self.device))
        if self.fresh:
            self.fresh.difference_update(places)

    def index(self, places: Sequence[int]) -> Tensor:
        """(n,) places as a tensor where the rows are."""
        return place_on(places, self.device)
