"""Values on their way down in half precision: parameters are rounded, running statistics and state are not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedquilt.core.values import Key, size_of
from fedquilt.interface.messages import Roster
from fedquilt.sharing.compression import Compression, half


class Halved:
    """What becomes of values that clients of a roster receive; nothing, unless compress.down says so."""

    def __init__(self, roster: Roster, how: Compression, device: torch.device) -> None:
        self.members = roster.members if how.down == "float16" else ()
        self.device = device
        self._parameters = {(u, m.units[u]): n for m in self.members for u, n in m.parameters.items()}
        self._columns: dict[tuple[Key, ...], Tensor] = {}  # (size,) by units that lie together, which are parameters

    def units(self, client: int) -> Mapping[str, int]:
        """How many numbers of each unit, its first ones, a client receives in half precision."""
        return self.members[client].parameters if self.members else {}

    def __call__(self, value: Tensor, *keys: Key) -> Tensor:
        """Values (..., size) of some units as they arrive."""
        if not self.members:
            return value
        if keys not in self._columns:
            parts = [torch.arange(size_of(key[1])) < self._parameters.get(key, 0) for key in keys]
            self._columns[keys] = torch.cat(parts).to(self.device)
        return torch.where(self._columns[keys], half(value).float(), value)
