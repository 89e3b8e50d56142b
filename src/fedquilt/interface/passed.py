"""What passed between the server and its clients in a round, and how much of it there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.interface.messages import Instructions, Roster, Update
from fedquilt.sharing import Compression, Plan, Traffic, traffic
from fedquilt.sharing.traffic import BYTES, HALF, Lengths


@dataclass(frozen=True)
class Passed:
    """What went to clients and came back, without the values: enough to count it when somebody asks.

    `sent` are, by unit, the places of those who sent it, None: of all of them.
    """

    ids: tuple[int, ...]
    told: int | Tensor  # bytes for each client, beside values of units
    reported: int | Tensor
    sent: Mapping[str, Tensor | None]
    coded: Mapping[str, Tensor | None] = field(default_factory=dict)  # (k,) who sent codes of a unit, None: all of them

    @classmethod
    def of(cls, down: Instructions, up: Update) -> Passed:
        """A message and its answer."""
        sent: dict[str, Tensor | None] = {unit: block.places for block in up.blocks for unit in block.units}
        told, reported = bytes_each(down.told), bytes_each(up.reports)
        if up.masked is None:
            return cls(up.ids, told, reported, sent, up.coded)
        return cls(up.ids, told + up.masked.down, reported + up.masked.up, {**sent, **up.masked.sent})


def start_of(down: Instructions, unit: str) -> tuple[Tensor, Tensor | None] | None:
    """The value (k, size) of a unit that clients are to start from as it is, and (k,) who of them, None: everybody.

    Nothing where it is not sent, or is among values that a client chooses from or mixes itself.
    """
    if unit in down.offers or unit in down.copies:
        return None
    for block, pull in zip(down.blocks, down.pulls, strict=True):
        value = block.columns([unit])
        if value is not None:
            return value, None if pull is None else pull == 1
    return None


def lengths_of(roster: Roster, how: Compression) -> Lengths | None:
    """Bytes of each unit on each client where parameters are compressed; None where nothing is."""
    if how == Compression():
        return None
    up, down = {}, {}
    for unit, size in roster.sizes().items():
        learned = torch.tensor([member.parameters.get(unit, 0) for member in roster.members])
        kinds, which = learned.unique(return_inverse=True)
        code = torch.tensor([how.bytes(n) for n in kinds.tolist()])[which]
        rest = BYTES * (size - learned)
        up[unit], down[unit] = rest + code, rest + (BYTES if how.down == "float32" else HALF) * learned
    return Lengths(up, down)


def counted(
    plan: Plan, sizes: Mapping[str, Tensor], passed: Sequence[Passed], lengths: Lengths | None = None
) -> Traffic:  # fmt: skip
    """What a round moved: what its plan says, less what clients chose not to send, and what passed beside units."""
    moved = traffic(plan, sizes, torch.tensor([i for each in passed for i in each.ids]), lengths)
    told, reported = torch.zeros(2, plan.clients, dtype=torch.int64)
    really, coded = torch.zeros_like(moved.up, dtype=torch.bool), torch.zeros_like(moved.up, dtype=torch.bool)
    for each in passed:
        ids = torch.tensor(each.ids)
        told[ids], reported[ids] = each.told, each.reported
        for unit, places in each.sent.items():
            really[ids if places is None else ids[places], moved.units.index(unit)] = True
        for unit, who in each.coded.items():
            coded[ids, moved.units.index(unit)] = torch.ones_like(ids, dtype=torch.bool) if who is None else who.cpu()
    moved = replace(moved, up=moved.up * really, told=told, reported=reported)
    if lengths is None or moved.compressed is None:
        return moved
    code = torch.stack([lengths.up[unit] for unit in moved.units], 1)
    return replace(moved, compressed=(torch.where(coded, code, BYTES * moved.up) * really, moved.compressed[1]))


def bytes_each(beside: Mapping[str, Tensor]) -> int:
    """Bytes of one client's part of tensors (k, ...) that pass beside the values of units.

    >>> bytes_each({"active": torch.ones(5, 3, dtype=torch.bool), "loss": torch.zeros(5)})
    7
    """
    return sum(value[0].numel() * value.element_size() for value in beside.values() if len(value))
