"""Where clients rest between rounds: a row each, and no memory for those who never took part.

Many rows rest in a file that is mapped into memory: the system keeps there what is used, and writes out what is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedquilt._util.shared_memory import common_zeros, place_on

_IN_MEMORY = 2**30  # bytes of rows on a CPU; more of them rest in a file


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
        on_disk = len(which) * first.shape[1] * first.element_size() > _IN_MEMORY
        self.store = common_zeros(shape, on_disk=on_disk) if on_cpu else torch.empty(shape, device=device)
        self.fresh = set(range(len(which)))  # those that nobody put back yet
        self.changed: set[int] | None = None  # who was put back since the last checkpoint; None: there is none of these

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
        self.changed = None
        return self.store

    def take(self, places: Sequence[int]) -> Tensor:
        """(n, width) a copy of some rows."""
        seen = [i for i, place in enumerate(places) if place not in self.fresh] if self.fresh else ()
        if not self.fresh or len(seen) == len(places):
            return self.store[self.index(places)]
        rows = self.started(places)  # rows that were never written are not read either: that would make room for them
        if seen:
            rows[self.index(seen)] = self.store[self.index([places[i] for i in seen])]
        return rows

    def started(self, places: Sequence[int]) -> Tensor:
        """(n, width) a copy of the rows that some clients had at first."""
        return self.first[[self.which[place] for place in places]]

    def put(self, places: Sequence[int], rows: Tensor) -> None:
        """Put rows (n, width) back."""
        self.store.index_copy_(0, self.index(places), rows.to(self.device))
        if self.fresh:
            self.fresh.difference_update(places)
        if self.changed is not None:
            self.changed.update(places)

    def index(self, places: Sequence[int]) -> Tensor:
        """(n,) places as a tensor where the rows are."""
        return place_on(places, self.device)
