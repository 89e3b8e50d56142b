"""What moves: how many values each client sends and receives of each unit, from the plan alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt.sharing.plan import Plan

BYTES = 4  # a value travels as float32, unless it is compressed
HALF = 2  # bytes of one in half precision


@dataclass(frozen=True)
class Lengths:
    """Bytes that each unit has on each client, (K,) by unit, where values are compressed: up as a code, and down."""

    up: Mapping[str, Tensor]
    down: Mapping[str, Tensor]


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
    compressed: tuple[Tensor, Tensor] | None = None  # (K, U) bytes up and down; None: `BYTES` a value

    @property
    def _bytes(self) -> tuple[Tensor, Tensor]:
        """(K, U) bytes up and down."""
        return (self.up * BYTES, self.down * BYTES) if self.compressed is None else self.compressed

    @property
    def bytes_up(self) -> Tensor:
        """(K,) bytes each client sends."""
        return self._bytes[0].sum(1) + self.reported

    @property
    def bytes_down(self) -> Tensor:
        """(K,) bytes each client receives."""
        return self._bytes[1].sum(1) + self.told

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
        up, down = (each.sum(0).tolist() for each in self._bytes)
        return {unit: (up[i], down[i]) for i, unit in enumerate(self.units)}

    def __add__(self, other: Traffic) -> Traffic:
        """Several rounds together."""
        if self.units != other.units or self.up.shape != other.up.shape:
            raise ValueError("traffic adds up only over the same clients and units; count each federation by itself")
        beside = self.reported + other.reported, self.told + other.told
        both = None
        if self.compressed is not None or other.compressed is not None:
            both = self._bytes[0] + other._bytes[0], self._bytes[1] + other._bytes[1]
        return Traffic(self.units, self.up + other.up, self.down + other.down, *beside, both)


def traffic(
    plan: Plan, sizes: Mapping[str, int | Tensor], participants: Tensor | Sequence[int] | None = None,
    lengths: Lengths | None = None,
) -> Traffic:  # fmt: skip
    """What a round under `plan` moves. `sizes`: values in each unit, one number or one per client (0: lacks the unit).

    `participants` are the numbers of the clients that take part, or a mask over all; None is everybody. A unit whose
    circle has one member does not move. A client that is offered a unit receives a value of each circle,
    and one that is offered copies each of them. With `lengths` a client sends codes of the units that the plan lets it
    start from as it receives them.
    """
    missing = [unit for unit in plan.units if unit not in sizes]
    if missing:
        raise ValueError(f"unit '{missing[0]}' is in the plan but its size is not given; add it to sizes")
    part = torch.ones(plan.clients, dtype=torch.bool)
    if participants is not None:
        chosen = torch.as_tensor(participants).cpu()
        part = torch.zeros(plan.clients, dtype=torch.bool)
        part[chosen if chosen.dtype == torch.bool else chosen.long()] = True
    up, down, coded = [], [], []
    for unit in plan.units:
        size = torch.as_tensor(sizes[unit], dtype=torch.int64).cpu().expand(plan.clients)
        sends = plan.sends(unit) & part
        up.append(sends * size)
        values = plan.receives(unit).long()
        if unit in plan.offered:
            values = torch.where(plan.offered[unit], plan[unit].count, values)
        if unit in plan.copies:
            values = values + (plan.copies[unit] >= 0).sum(1)
        down.append(values * part * size)
        if lengths is not None:
            chooses = unit in plan.offered or unit in plan.copies
            takes = torch.zeros_like(part) if chooses else plan.receives(unit) & (plan[unit].taken == 1)
            bytes_up = torch.where(takes, lengths.up[unit], BYTES * size)
            coded.append((sends * bytes_up, values * part * lengths.down[unit]))
    both = (torch.stack([u for u, _ in coded], 1), torch.stack([d for _, d in coded], 1)) if coded else None
    return Traffic(tuple(plan.units), torch.stack(up, 1), torch.stack(down, 1), compressed=both)
