"""A family at work: what a fleet keeps of clients of one architecture, and how their numbers become messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedquilt.client import Client, Split
from fedquilt.messages import Block, Down
from fedquilt.rest import Rest
from fedquilt.stacks import Family, Layout
from fedquilt.training.engine import Engine, Samples
from fedquilt.view import Table, where_public


@dataclass
class Crew:
    """A family at work: its clients, their rows, their training samples and their engine."""

    family: Family
    clients: tuple[Client, ...]
    rest: Rest
    samples: Samples
    tables: dict[str, Table]
    engines: dict[int, Engine] = field(default_factory=dict)  # by the number of the step that they train
    at_once: int = 0
    loss: Tensor | None = None  # (k,) of those who trained last, their mean over the steps of the last training
    scratch: Tensor | None = None  # on a GPU, where chosen clients train: one place, so that graphs can be replayed
    tried: bool = False  # whether the model has been seen to take these samples and labels

    @cached_property
    def place(self) -> dict[int, int]:
        """The place in the family of each client, by its number; empty where that is the number itself."""
        ids = self.family.ids
        return {} if ids == tuple(range(len(ids))) else {number: at for at, number in enumerate(ids)}

    def places(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The places in the family of some clients."""
        return tuple(self.place[i] for i in ids) if self.place else ids

    def everybody(self, places: tuple[int, ...]) -> bool:
        """Whether these are all clients of the family, in order."""
        return len(places) == len(self.clients) and places == tuple(range(len(places)))

    def room(self, k: int, device: torch.device) -> Tensor:
        """(k, width) of memory to train chosen clients in, with whatever is in it."""
        if device.type != "cuda":
            return torch.empty(k, self.family.layout.width)
        if self.scratch is None or len(self.scratch) < k:
            self.scratch = torch.empty(k, self.family.layout.width, device=device)
        return self.scratch[:k]


def table_of(clients: Sequence[Client], split: str, public: Sequence[Split]) -> Table:
    """A split of a whole family, padded to the longest; samples of labels that a client does not own are masked."""
    parts = [getattr(client, split) for client in clients]
    count = torch.tensor([len(part) for part in parts])
    longest = int(count.max())
    x = torch.empty(len(parts), longest, *parts[0].x.shape[1:], dtype=parts[0].x.dtype)
    y = torch.zeros(len(parts), longest, dtype=torch.int64)
    mask = torch.zeros(len(parts), longest)
    for i, part in enumerate(parts):
        x[i, : len(part)], y[i, : len(part)] = part.x, part.y
        x[i, len(part) :] = part.x[0] if len(part) else clients[i].train.x[0]  # not zeros, which a model may not take
        mask[i, : len(part)] = torch.isin(part.y, torch.tensor(clients[i].labels)).float()
    table = Table(x, y, mask, count)
    if not public:
        return table
    found = where_public(x, torch.cat([split.x for split in public]))
    return replace(table, public=found.where(table.real > 0, -1))


def covers(family: Family, down: Down) -> bool:
    """Whether a message replaces every unit of its clients whole."""
    units = {unit for block, pull in zip(down.blocks, down.pulls, strict=True) if pull is None for unit in block.units}
    return all(unit.name in units for unit in family.layout.units)


def blocks_of(family: Family, rows: Tensor, send: Mapping[str, Tensor]) -> tuple[Block, ...]:
    """What is sent: for each set of senders one block of all the units they send."""
    groups: list[tuple[Tensor, list[str]]] = []
    for unit, senders in send.items():
        for other, units in groups:
            if other is senders or torch.equal(other, senders):
                units.append(unit)
                break
        else:
            groups.append((senders, [unit]))
    blocks = []
    for senders, units in groups:
        value = family.layout.take(rows, *units)
        places = None if bool(senders.all()) else senders.nonzero()[:, 0]
        sizes = tuple(family.layout.size(unit) for unit in units)
        blocks.append(Block(tuple(units), sizes, places, value if places is None else value[places.to(value.device)]))
    return tuple(blocks)


def write(layout: Layout, rows: Tensor, found: Mapping[str, Tensor]) -> None:
    """Write what a step gave, (k, ...) by unit or state, into the rows."""
    for unit, value in found.items():
        if unit not in layout.ranges:
            raise KeyError(
                f"a step writes '{unit}', which no unit or state is called; there are {', '.join(layout.ranges)}. What "
                "is meant for the server is named in the step's `reports`"
            )
        for own, part in layout.pieces(rows, value.reshape(len(rows), -1), unit):
            own.copy_(part)


def scale_of(family: Family, rates: Mapping[str, Tensor], rows: Tensor) -> Tensor | None:
    """Multipliers of the learning rate, (k, parameters), from those of units; None where all are 1."""
    if not rates:
        return None
    scale = torch.ones(len(rows), family.layout.parameters, device=rows.device)
    for unit, rate in rates.items():
        for start, stop in family.layout.ranges[unit]:
            if stop <= family.layout.parameters:
                scale[:, start:stop] = rate[:, None]
    return scale


def resting_of(
    family: Family, trained: Collection[str], rates: Mapping[str, Tensor], rows: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Buffers of units that do not train: a view (k, size), a copy, and for whom the unit rests, (k,)."""
    everybody = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    still = {unit: rate.to(rows.device) == 0 for unit, rate in rates.items()}
    still |= {unit.name: everybody for unit in family.layout.units if unit.name not in trained}
    return [
        (rows[:, start:stop], rows[:, start:stop].clone(), who)
        for unit, who in still.items()
        for start, stop in family.layout.ranges[unit]
        if family.layout.parameters <= start < family.layout.trained
    ]
