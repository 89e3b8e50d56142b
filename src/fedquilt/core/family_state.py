"""A family at work: what is kept of clients of one architecture, and how their numbers become messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt.client import Client, Split
from fedquilt.core.row_store import RowStore
from fedquilt.engines.engine import Engine, Samples
from fedquilt.families.family import Family
from fedquilt.families.layout import Layout
from fedquilt.interface.client_stack import SAMPLES_AT_ONCE, ClientStack, PaddedSplit, where_public
from fedquilt.interface.me import each
from fedquilt.interface.messages import Instructions, UnitValues
from fedquilt.interface.step_graphs import StepGraphs
from fedquilt.interface.steps import Do
from fedquilt.sharing import install
from fedquilt.tasks import Classification

_LITTLE = 2**26  # bytes of samples that are looked at together
_KEPT = 2**28  # bytes of a split of all clients that is kept, padded, from round to round
_SCORE_BYTES = 8  # that a class of a sample takes: the scores of two models


@dataclass
class FamilyState:
    """A family at work: its clients, their rows, their training samples and their engine."""

    family: Family
    clients: tuple[Client, ...]
    store: RowStore
    samples: Samples
    tables: dict[tuple[str, tuple[int, ...]], PaddedSplit]  # by split and places; no places: all clients
    number: int = 0  # which of the families it is
    engines: dict[int, Engine] = field(default_factory=dict)  # by the number of the step that they train
    at_once: int = 0
    samples_at_once: int = SAMPLES_AT_ONCE  # of a stack of clients, where their models are run and not trained
    still: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by step, the units that it does not train
    loss: Tensor | None = None  # (k,) of those who trained last, their mean over the steps of the last training
    lost: tuple[int, tuple[int, ...]] = (0, ())  # in which round that was, and their places
    scratch: Tensor | None = None  # on a GPU, where chosen clients train: one place, so that graphs can be replayed
    graphs: StepGraphs = field(default_factory=StepGraphs)  # of what steps compute on a GPU
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

    def groups(self, places: Sequence[int], most: int, classes: int) -> list[tuple[int, ...]]:
        """Clients' places in groups of `most` at a time that are looked at together.

        Where some have far more samples than others, those with about as many go together: a group is padded to its
        longest, and that must not take much more memory than the samples themselves.
        """
        if self.even(classes):
            return [tuple(places[at : at + most]) for at in range(0, len(places), most)]
        found: list[list[int]] = []
        longest = own = np.zeros(2, dtype=np.int64)  # of the validation and the test split of the last group
        for place in (places[at] for at in np.argsort(self.lengths[list(places)].max(axis=1), kind="stable").tolist()):
            lengths = self.lengths[place]
            now = np.maximum(longest, lengths), own + lengths
            if not found or len(found[-1]) == most or not self._pads_little(len(found[-1]) + 1, *now, classes):
                found.append([])
                now = lengths, lengths
            longest, own = now
            found[-1].append(place)
        return [tuple(sorted(group)) for group in found]

    def even(self, classes: int) -> bool:
        """Whether the validation and test samples of all clients can be padded to the longest with little to lose."""
        return self._pads_little(len(self.clients), self.lengths.max(axis=0), self.lengths.sum(axis=0), classes)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(clients, 2) how many validation and test samples each client has."""
        return np.array([(len(client.validation), len(client.test)) for client in self.clients], dtype=np.int64)

    def _pads_little(self, clients: int, longest: NDArray[np.int64], own: NDArray[np.int64], classes: int) -> bool:
        sample = self.clients[0].train.x[0]
        bytes_ = sample.numel() * sample.element_size() + _SCORE_BYTES * classes
        return clients * int(longest.sum()) * bytes_ <= max(_LITTLE, 2 * int(own.sum()) * bytes_)

    def table(
        self, split: str, places: tuple[int, ...], public: Sequence[Split], device: torch.device
    ) -> PaddedSplit:  # fmt: skip
        """A split of the clients at some places, or of all; the same clients are looked at in every round."""
        found = self.tables.get((split, places))
        if found is None:
            clients = [self.clients[at] for at in places] or self.clients
            found = table_of(clients, split, public).to(device)
            if self.much(split) and device.type == "cpu":  # only that of the latest look
                self.tables = {key: table for key, table in self.tables.items() if key[0] != split}
            self.tables[split, places] = found
        return found

    def much(self, split: str) -> bool:
        """Whether a split of all clients is too much to be kept once more."""
        sample = self.clients[0].train.x[0]
        count = self._trained if split == "train" else int(self.lengths[:, ("validation", "test").index(split)].sum())
        return count * sample.numel() * sample.element_size() > _KEPT

    @cached_property
    def _trained(self) -> int:
        return sum(client.samples for client in self.clients)

    def room(self, k: int, device: torch.device) -> Tensor:
        """(k, width) of memory to train chosen clients in, with whatever is in it."""
        if device.type != "cuda":
            return torch.empty(k, self.family.layout.width)
        if self.scratch is None or len(self.scratch) < k:
            self.scratch = torch.empty(k, self.family.layout.width, device=device)
        return self.scratch[:k]


def table_of(clients: Sequence[Client], split: str, public: Sequence[Split]) -> PaddedSplit:
    """A split of a whole family, padded to the longest; samples of labels that a client does not own are masked."""
    parts = [getattr(client, split) for client in clients]
    count = torch.tensor([len(part) for part in parts])
    longest = int(count.max())
    if bool((count == longest).all()):  # one copy of all: of very many clients a loop takes longer than measuring them
        x, y = torch.stack([part.x for part in parts]), torch.stack([part.y for part in parts])
    else:
        x = torch.empty(len(parts), longest, *parts[0].x.shape[1:], dtype=parts[0].x.dtype)
        y = torch.zeros(len(parts), longest, *parts[0].y.shape[1:], dtype=parts[0].y.dtype)
        for i, part in enumerate(parts):
            x[i, : len(part)], y[i, : len(part)] = part.x, part.y
            x[i, len(part) :] = (
                part.x[0] if len(part) else clients[i].train.x[0]
            )  # not zeros: a model may not take them
    mask = (torch.arange(longest) < count[:, None]).float()
    if clients[0].task in ("", Classification.kind):
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, client in enumerate(clients):
            alike.setdefault(client.labels, []).append(i)
        for labels, who in alike.items():
            at = torch.tensor(who)
            mask[at] *= torch.isin(y[at], torch.tensor(labels))
    table = PaddedSplit(x, y, mask, count)
    if not public:
        return table
    found = where_public(x, torch.cat([split.x for split in public]))
    return replace(table, public=found.where(table.real > 0, -1))


def unit_names(family_state: FamilyState) -> list[str]:
    """The units of a family's models, bottom to top."""
    return [unit.name for unit in family_state.family.layout.units if not unit.state]


def covers(family: Family, down: Instructions) -> bool:
    """Whether a message replaces all of its clients' rows: every unit whole, and nothing in them stays home."""
    if family.layout.travels < family.layout.width:
        return False
    units = {unit for block, pull in zip(down.blocks, down.pulls, strict=True) if pull is None for unit in block.units}
    return all(unit.name in units for unit in family.layout.units)


def install_into(family: Family, rows: Tensor, down: Instructions) -> None:
    """Move rows (k, width), in place, towards what was received."""
    for block, pull in zip(down.blocks, down.pulls, strict=True):
        for own, received in family.layout.pieces(rows, block.value.to(rows.device), *block.units):
            own.copy_(received if pull is None else install(own, received, pull.to(rows.device)))


def blocks_of(family: Family, rows: Tensor, send: Mapping[str, Tensor]) -> tuple[UnitValues, ...]:
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
        if not bool(senders.any()):  # all of them keep it back
            continue
        value = family.layout.take(rows, *units)
        places = None if bool(senders.all()) else senders.nonzero()[:, 0]
        sizes = tuple(family.layout.size(unit) for unit in units)
        blocks.append(
            UnitValues(tuple(units), sizes, places, value if places is None else value[places.to(value.device)])
        )
    return tuple(blocks)


def write(layout: Layout, rows: Tensor, found: Mapping[str, Tensor]) -> None:
    """Write what a step gave, (k, ...) by unit or state, into the rows: all of it as the rows were before."""
    here = rows.untyped_storage().data_ptr()
    found = {u: v.clone() if v.untyped_storage().data_ptr() == here else v for u, v in found.items()}  # parts of rows
    for unit, value in found.items():
        if unit not in layout.ranges:
            raise KeyError(
                f"a step writes '{unit}', which no unit or state is called; there are {', '.join(layout.ranges)}. What "
                "is meant for the server is named in the step's `reports`"
            )
        for own, part in layout.pieces(rows, value.reshape(len(rows), -1), unit):
            own.copy_(part)


def do(step: Do, view: ClientStack) -> dict[str, Tensor]:
    """Write what a step computes into a stack's rows, in place; what is meant for the server is given back."""
    found = each(view, step.function, None if step.data in (None, "public") else view.data(step.data))
    reports = {name: found.pop(name) for name in step.reports if name in found}
    write(view.family.layout, view.rows, found)
    return reports


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
    family: Family, still: Collection[str], rates: Mapping[str, Tensor], rows: Tensor
) -> list[tuple[Tensor, Tensor, Tensor | None]]:  # fmt: skip
    """Buffers of units that rest: a view (k, size), a copy, and for whom the unit rests, (k,); None: for all.

    These are the units that are `still` for everybody, and those that have a learning rate of 0 for somebody.
    """
    resting: dict[str, Tensor | None] = {unit: rate.to(rows.device) == 0 for unit, rate in rates.items()}
    return [
        (rows[:, start:stop], rows[:, start:stop].clone(), who)
        for unit, who in (resting | dict.fromkeys(still)).items()
        for start, stop in family.layout.ranges[unit]
        if family.layout.parameters <= start < family.layout.trained
    ]
