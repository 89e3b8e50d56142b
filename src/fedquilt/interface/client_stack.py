"""What a method's client half sees: a stack of clients of one family, with their own data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedquilt._util.turns import one_at_a_time
from fedquilt.client import Client, Split
from fedquilt.families.copies import copy_of
from fedquilt.families.family import Family
from fedquilt.families.habits import seeded
from fedquilt.interface.messages import ClientInfo, Instructions
from fedquilt.interface.step_graphs import StepGraphs
from fedquilt.layers.prepare import stackable
from fedquilt.tasks import Classification, Task

SAMPLES_AT_ONCE = 2**16  # of all clients of a stack together, where nothing says how much memory a sample takes


@dataclass(frozen=True)
class PaddedSplit:
    """One split of the clients of a family, padded to the longest: x (k, n, ...), y (k, n, ...), mask (k, n).

    `count` (k,) says how many samples each client has; what follows them is padding, a sample of its own again.
    `mask` is 0 for padding and for samples of labels that a client does not own.
    `public` (k, n) says where a sample is among the public ones (`common`, then `public_test`), -1: it is not public;
    None where there are no public samples.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    count: Tensor
    public: Tensor | None = None

    def to(self, device: torch.device) -> PaddedSplit:
        """The same on a device."""
        public = None if self.public is None else self.public.to(device)
        return PaddedSplit(self.x.to(device), self.y.to(device), self.mask.to(device), self.count.to(device), public)

    @property
    def real(self) -> Tensor:
        """(k, n) 1 for samples, 0 for padding."""
        return (torch.arange(self.y.shape[1], device=self.y.device) < self.count[:, None]).float()

    def samples(self, start: int, stop: int) -> PaddedSplit:
        """The same with some samples of each client only."""
        public = None if self.public is None else self.public[:, start:stop]
        count = (self.count.clamp(max=stop) - start).clamp(min=0)
        return PaddedSplit(self.x[:, start:stop], self.y[:, start:stop], self.mask[:, start:stop], count, public)

    def for_each(self, clients: int) -> PaddedSplit:
        """The samples of the one client that this is of, for several clients, without a copy."""
        x, y, mask, count = (part.expand(clients, *part.shape[1:]) for part in (self.x, self.y, self.mask, self.count))
        return PaddedSplit(x, y, mask, count, None if self.public is None else self.public.expand(clients, -1))

    def of(self, places: Tensor | slice) -> PaddedSplit:
        """The same for some clients only."""
        public = None if self.public is None else self.public[places]
        return PaddedSplit(self.x[places], self.y[places], self.mask[places], self.count[places], public)


def where_public(x: Tensor, public: Tensor) -> Tensor:
    """(k, n) the place of each of the samples x (k, n, ...) among public ones (m, ...), -1 for the others.

    >>> where_public(torch.tensor([[[1.0], [5.0]]]), torch.tensor([[4.0], [5.0]])).tolist()
    [[-1, 1]]
    """
    place = {sample.tobytes(): at for at, sample in enumerate(public.numpy(force=True))}
    return torch.tensor(
        [[place.get(sample.tobytes(), -1) for sample in client] for client in x.numpy(force=True)], dtype=torch.int64
    ).reshape(x.shape[:2])


@dataclass(frozen=True)
class ClientStack:
    """Clients of one family in one round: their numbers, parameters, buffers and data, all with the client first.

    `rows` (k, width) are the clients' numbers. `epochs` are those of the settings, `passes` those that a round's steps
    make over the clients' own samples together. `installed` says whether what was received is in the rows already.
    `public` are the samples that all of them hold, `common` and then `public_test`.
    """

    family: Family
    ids: tuple[int, ...]
    clients: Sequence[Client | ClientInfo]
    round: int
    rounds: int
    epochs: int
    seed: int
    classes: int
    rows: Tensor
    tables: Callable[[str], PaddedSplit]
    down: Instructions | None = None
    public: Sequence[Split] = ()
    vectorised: bool = True
    installed: bool = True
    batch: int = 1
    passes: int = 1
    lr: float = 0.0
    task: Task = field(default_factory=Classification)
    graphs: StepGraphs | None = None  # where what steps compute is captured on a GPU
    samples_at_once: int = SAMPLES_AT_ONCE  # of all clients together, that their models are run on

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names."""
        return tuple(client.name for client in self.clients)

    @property
    def labels(self) -> tuple[tuple[int, ...], ...]:
        """The labels each client owns."""
        return tuple(client.labels for client in self.clients)

    @property
    def samples(self) -> tuple[int, ...]:
        """How many training samples each client has."""
        return tuple(client.samples for client in self.clients)

    def data(self, split: str) -> PaddedSplit:
        """A split of every client: train, validation or test."""
        return self.tables(split)

    @property
    def receives(self) -> dict[str, Tensor]:
        """(k,) for which clients what was sent of a unit is meant, by unit."""
        everybody = torch.ones(len(self.ids), dtype=torch.bool)
        down = self.down
        pairs = zip(down.blocks, down.pulls, strict=True) if down is not None else ()
        return {unit: everybody if pull is None else pull > 0 for block, pull in pairs for unit in block.units}

    @property
    def received_rows(self) -> Tensor:
        """(k, width) the rows with what the clients were sent in the place of their own."""
        if self.down is None or not self.down.blocks:
            return self.rows
        rows, layout = self.rows.clone(), self.family.layout
        for block, pull in zip(self.down.blocks, self.down.pulls, strict=True):
            for own, sent in layout.pieces(rows, block.value.to(rows.device), *block.units):
                own.copy_(sent if pull is None else torch.where((pull > 0).to(rows.device)[:, None], sent, own))
        return rows

    @property
    def public_x(self) -> Tensor | None:
        """(m, ...) the public samples, on the clients' device, in the form that they hold."""
        return torch.cat([split.x for split in self.public]).to(self.rows.device) if self.public else None

    @property
    def public_y(self) -> Tensor | None:
        """(m,) their labels."""
        return torch.cat([split.y for split in self.public]).to(self.rows.device) if self.public else None

    def map(self, function: Callable[..., Tensor], *tensors: Tensor, rows: Tensor | None = None) -> Tensor:
        """function(call, *its part of the tensors) for every client; `call` runs the client's module in eval mode.

        Vectorised where the engine is, else one client after another; nothing is differentiated.
        """
        return map_rows(self.family, function, self.rows if rows is None else rows, *tensors, stacked=self.vectorised)


@one_at_a_time
def map_rows(
    family: Family, function: Callable[..., Tensor], rows: Tensor, *tensors: Tensor, stacked: bool
) -> Tensor:  # fmt: skip
    """function(call, *its part of the tensors) for every row (k, width) of a family; `call` runs its module.

    Stacked where that is wanted and the module lets itself be; where it does not, that is found out once.
    """
    habits = family.habits

    def one(row: Tensor, *parts: Tensor) -> Tensor:
        module, named = family.evaluator(rows.device), family.layout.split(row)
        if habits.apart:
            module = copy_of(module)

        def call(*args: Any, **kwargs: Any) -> Tensor:
            # A model may write on its input (an activation in place, say); clients' samples must stay as they are.
            own = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
            result: Tensor = functional_call(module, named, tuple(own), kwargs)
            return result

        return function(call, *parts)

    with torch.no_grad():
        if habits.apart or habits.guesses:  # chance and what a model keeps are the same for all, whoever else is there
            found = []
            for at, row in enumerate(rows):
                with seeded(0):
                    found.append(one(row, *(t[at] for t in tensors)))
            return torch.stack(found)
        if stacked and not family.one_by_one:
            try:
                with stackable(rows.device):
                    return vmap(one, randomness="different")(rows, *tensors)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # recurrent layers, say, batch over clients while they train but not in eval mode
                family.one_by_one.append(True)
        return torch.stack([one(row, *(t[i] for t in tensors)) for i, row in enumerate(rows)])
