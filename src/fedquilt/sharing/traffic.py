"""What moves: how many values each client sends and receives of each unit, from the plan alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt.sharing.plan import Plan

BYTES = 4  # a value travels as float32


@dataclass(frozen=True, eq=False)
class Traffic:
    """Values sent up and received down by each client (rows) for each unit (columns) in one round.

    >>> from fedquilt.sharing import everyone, nobody
    >>> moved = traffic(everyone(["conv"], [1, 1]) | nobody(["head"], 2), {"conv": 100, "head": 10})
    >>> moved.bytes_up.tolist(), moved.total_up, moved.by_unit()
    ([400, 400], 800, {'conv': (800, 800), 'head': (0, 0)})
    """

    units: tuple[str, ...]
    up: Tensor  # (K, U) int64 values
    down: Tensor  # (K, U)
    reported: int | Tensor = 0  # (K,) bytes of what each client reports beside units
    told: int | Tensor = 0  # (K,) bytes of what the server tells it beside units

    @property
    def bytes_up(self) -> Tensor:
        """(K,) bytes each client sends."""
        return self.up.sum(1) * BYTES + self.reported

    @property
    def bytes_down(self) -> Tensor:
        """(K,) bytes each client receives."""
        return self.down.sum(1) * BYTES + self.told

    @property
    def total_up(self) -> int:
        """Bytes all clients send."""
        return int(self.bytes_up.sum())

    @property
    def total_down(self) -> int:
        """Bytes all clients receive."""
        return int(self.bytes_down.sum())

    def by_unit(self) -> dict[str, tuple[int, int]]:
        """Bytes up and down of each unit, over all clients."""
        up, down = (self.up.sum(0) * BYTES).tolist(), (self.down.sum(0) * BYTES).tolist()
        return {unit: (up[i], down[i]) for i, unit in enumerate(self.units)}

    def __add__(self, other: Traffic) -> Traffic:
        """Several rounds together."""
        if self.units != other.units or self.up.shape != other.up.shape:
            raise ValueError("traffic adds up only over the same clients and units; count each federation by itself")
        beside = self.reported + other.reported, self.told + other.told
        return Traffic(self.units, self.up + other.up, self.down + other.down, *beside)


def traffic(
    plan: Plan, sizes: Mapping[str, int | Tensor], participants: Tensor | Sequence[int] | None = None
) -> Traffic:
    """What a round under `plan` moves. `sizes`: values in each unit, one number or one per client (0: lacks the unit).

    `participants` are the numbers of the clients that take part, or a mask over all; None is everybody. A unit whose
    circle has one member does not move. A client that is offered a unit receives a value of each circle,
    and one that is offered copies each of them.
    """
    missing = [unit for unit in plan.units if unit not in sizes]
    if missing:
        raise ValueError(f"unit '{missing[0]}' is in the plan but its size is not given; add it to sizes")
    part = torch.ones(plan.clients, dtype=torch.bool)
    if participants is not None:
        chosen = torch.as_tensor(participants).cpu()
        part = torch.zeros(plan.clients, dtype=torch.bool)
        part[chosen if chosen.dtype == torch.bool else chosen.long()] = True
    up, down = [], []
    for unit in plan.units:
        size = torch.as_tensor(sizes[unit], dtype=torch.int64).cpu().expand(plan.clients)
        up.append((plan.sends(unit) & part) * size)
        values = plan.receives(unit).long()
        if unit in plan.offered:
            values = torch.where(plan.offered[unit], plan[unit].count, values)
        if unit in plan.copies:
            values = values + (plan.copies[unit] >= 0).sum(1)
        down.append(values * part * size)
    return Traffic(tuple(plan.units), torch.stack(up, 1), torch.stack(down, 1))
