"""What passed between the server and its clients in a round, and how much of it there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquilt.interface.messages import Instructions, Update
from fedquilt.sharing import Plan, Traffic, traffic


@dataclass(frozen=True)
class Passed:
    """What went to clients and came back, without the values: enough to count it when somebody asks.

    `sent` are, by unit, the places of those who sent it, None: of all of them.
    """

    ids: tuple[int, ...]
    told: int | Tensor  # bytes for each client, beside values of units
    reported: int | Tensor
    sent: Mapping[str, Tensor | None]

    @classmethod
    def of(cls, down: Instructions, up: Update) -> Passed:
        """A message and its answer."""
        sent: dict[str, Tensor | None] = {unit: block.places for block in up.blocks for unit in block.units}
        told, reported = bytes_each(down.told), bytes_each(up.reports)
        if up.masked is None:
            return cls(up.ids, told, reported, sent)
        return cls(up.ids, told + up.masked.down, reported + up.masked.up, {**sent, **up.masked.sent})


def counted(plan: Plan, sizes: Mapping[str, Tensor], passed: Sequence[Passed]) -> Traffic:
    """What a round moved: what its plan says, less what clients chose not to send, and what passed beside units."""
    moved = traffic(plan, sizes, torch.tensor([i for each in passed for i in each.ids]))
    told, reported = torch.zeros(2, plan.clients, dtype=torch.int64)
    really = torch.zeros_like(moved.up, dtype=torch.bool)
    for each in passed:
        ids = torch.tensor(each.ids)
        told[ids], reported[ids] = each.told, each.reported
        for unit, places in each.sent.items():
            really[ids if places is None else ids[places], moved.units.index(unit)] = True
    return replace(moved, up=moved.up * really, told=told, reported=reported)


def bytes_each(beside: Mapping[str, Tensor]) -> int:
    """Bytes of one client's part of tensors (k, ...) that pass beside the values of units.

    >>> bytes_each({"active": torch.ones(5, 3, dtype=torch.bool), "loss": torch.zeros(5)})
    7
    """
    return sum(value[0].numel() * value.element_size() for value in beside.values() if len(value))
