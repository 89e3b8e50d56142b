"""Some of all clients, and their part of tensors over all of them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fedquilt._util.shared_memory import place_on


class Selection:
    """Takes the part of some clients out of tensors over all of them, (K, ...); everybody's part is the tensor."""

    def __init__(self, ids: tuple[int, ...], everyone: int) -> None:
        self.ids = ids
        self.everybody = len(ids) == everyone and ids == tuple(range(everyone))
        self.places: dict[torch.device, Tensor] = {}

    def __call__(self, whole: Tensor) -> Tensor:
        if self.everybody:
            return whole
        if whole.device not in self.places:
            self.places[whole.device] = place_on(self.ids, whole.device)
        return whole[self.places[whole.device]]

    @cached_property
    def all(self) -> Tensor:
        """(k,) true for each of them."""
        return torch.ones(len(self.ids), dtype=torch.bool)
