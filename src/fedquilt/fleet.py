"""The client side of a federation: it receives, installs, trains and sends, for many clients at once or for one.

In a simulation a fleet holds all clients; on a device it holds one. The code is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from fedquilt.client import Client, Split
from fedquilt.messages import Block, Down, Member, Up
from fedquilt.methods.base import Method, Prepared
from fedquilt.sharing import install
from fedquilt.stacks import Family, Signature, families
from fedquilt.training.batches import key_of
from fedquilt.training.choose import choose, how_many_at_once
from fedquilt.training.engine import Engine, Job, Recipe, Samples
from fedquilt.training.settings import Training
from fedquilt.view import StackView, Table


@dataclass(frozen=True)
class Terms:
    """What all clients of a federation agree on before it starts."""

    method: Method
    training: Training
    classes: int
    seed: int = 0
    common: Split | None = None
    public_test: Split | None = None


@dataclass
class _Crew:
    """A family at work: its clients, their rows at rest, their training samples and their engine."""

    family: Family
    clients: tuple[Client, ...]
    rows: Tensor  # (k, width)
    samples: Samples
    tables: dict[str, Table]
    engine: Engine | None = None
    at_once: int = 0


class Fleet:
    """Clients and their models. `numbers` are the clients' numbers in the federation (default: 0, 1, ...).

    `engine` is auto, vectorised, parallel or sequential; `clients_at_once` bounds how many are trained in one stack.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        terms: Terms,
        device: torch.device | str = "cpu",
        engine: str = "auto",
        clients_at_once: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        if clients_at_once is not None and clients_at_once < 1:
            raise ValueError(f"clients_at_once={clients_at_once} trains nobody; give at least 1")
        self.terms, self.device = terms, torch.device(device)
        self.engine_name, self.clients_at_once = engine, clients_at_once
        self.clients = tuple(clients)
        self.numbers = tuple(numbers) if numbers is not None else tuple(range(len(clients)))
        self.round = 0
        self.crews: list[_Crew] = []
        self.home: dict[int, tuple[int, int]] = {}
        self._modules: dict[tuple[int, tuple[int, ...], int], nn.Module] = {}
        self._labels: dict[int, tuple[int, ...]] = {}
        self._muster({})

    # --- who is there ------------------------------------------------------------------------------------------------

    def members(self) -> dict[int, Member]:
        """What each client declares, by its number."""
        now = {}
        for crew in self.crews:
            units: Mapping[str, Signature] = crew.family.layout.signatures
            for number, client in zip(crew.family.ids, crew.clients, strict=True):
                now[number] = Member(client.name, client.samples, client.traits, client.labels, units)
        return dict(sorted(now.items()))

    def first_values(self) -> dict[tuple[str, Signature], Tensor]:
        """The value of every unit, in every shape, on the first client that has it: what the server starts from."""
        first: dict[tuple[str, Signature], Tensor] = {}
        for crew in sorted(self.crews, key=lambda crew: min(crew.family.ids)):
            layout = crew.family.layout
            for unit in layout.units:
                value = layout.take(crew.rows[:1], unit.name)[0].clone()
                first.setdefault((unit.name, layout.signatures[unit.name]), value)
        return first

    def changes(self, round_: int) -> dict[int, Member]:
        """Go to a round: clients whose model, labels or data change there change now, and declare themselves anew."""
        before = dict(zip(self.numbers, self.clients, strict=True))
        due = {n for n, c in before.items() if any(self.round < start <= round_ for start in c.changes)}
        self.round = round_
        if not due:
            return {}
        kept = {}
        for crew in self.crews:
            for at, number in enumerate(crew.family.ids):
                kept[number] = (crew.family.layout.key(), crew.rows[at].clone())
        fresh = {
            n for n in due if any(c.model is not None for start, c in before[n].changes.items() if start == round_)
        }
        self.close()
        self._muster({n: row for n, row in kept.items() if n not in fresh})
        members = self.members()
        return {n: members[n] for n in due}

    def families(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """The chosen clients, family by family."""
        wanted = set(chosen)
        groups = [tuple(i for i in crew.family.ids if i in wanted) for crew in self.crews]
        return [group for group in groups if group]

    def _muster(self, kept: Mapping[int, tuple[str, Tensor]]) -> None:
        """Group the clients as they are now into families, with first rows for all whose rows are not kept."""
        now = {n: client.at(self.round) for n, client in zip(self.numbers, self.clients, strict=True)}
        modules = {n: self._module(client) for n, client in now.items()}
        units = {n: self.terms.method.cut(module) for n, module in modules.items()}
        shapes = {n: tuple(client.train.x.shape[1:]) for n, client in now.items()}
        self.crews, self.home = [], {}
        for index, family in enumerate(families(modules, units, shapes)):
            clients = tuple(now[n] for n in family.ids)
            rows = self._first_rows(family, modules)
            for at, n in enumerate(family.ids):
                self.home[n] = (index, at)
                if n in kept and kept[n][0] == family.layout.key():
                    inside = family.layout.parameters
                    rows[at, :inside] = kept[n][1][:inside].to(rows.device)
                    if now[n].labels == self._labels.get(n, now[n].labels):
                        rows[at, inside:] = kept[n][1][inside:].to(rows.device)
            self.crews.append(_Crew(family, clients, rows, self._samples(clients), {}))
        self._labels = {n: client.labels for n, client in now.items()}

    def _module(self, client: Client) -> nn.Module:
        """A client's module with its first weights. Clients with one builder and one set of labels share it."""
        key = (id(client.model), client.labels, hash(tuple(sorted(client.traits.items()))))
        if key not in self._modules:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(key_of("model", self.terms.seed))
                model = client.model()
                if not isinstance(model, nn.Module):
                    kind = type(model).__name__
                    raise TypeError(f"client '{client.name}': its model function gave a {kind}, not an nn.Module")
                member = Member(client.name, client.samples, client.traits, client.labels, {})
                self._modules[key] = self.terms.method.wrap(model, member, self.terms.classes)
        return self._modules[key]

    def _first_rows(self, family: Family, modules: Mapping[int, nn.Module]) -> Tensor:
        """(k, width) rows at rest: on the device where they take a quarter of it at most, else in host memory."""
        bytes_ = len(family.ids) * family.layout.width * 4
        total = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        device = self.device if bytes_ * 4 <= total else torch.device("cpu")
        made: dict[int, Tensor] = {}
        rows = torch.empty(len(family.ids), family.layout.width, device=device)
        for at, n in enumerate(family.ids):
            key = id(modules[n])
            if key not in made:
                made[key] = family.layout.row(modules[n]).to(device)
            rows[at] = made[key]
        return rows

    def _samples(self, clients: Sequence[Client]) -> Samples:
        counts = [client.samples for client in clients]
        starts = accumulate([0, *counts[:-1]])
        x, y = (torch.cat([getattr(client.train, part) for client in clients]) for part in ("x", "y"))
        keys = tuple(key_of(self.terms.seed, client.name) for client in clients)
        samples = Samples(x, y, tuple(starts), tuple(counts), keys)
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            if x.numel() * x.element_size() * 4 <= total:
                return samples.to(self.device)
        return samples

    # --- a round -----------------------------------------------------------------------------------------------------

    def run(self, down: Down) -> Up:
        """A round of some clients of one family: receive, install, train, send."""
        crew = self.crews[self.home[down.ids[0]][0]]
        places = [self.home[i][1] for i in down.ids]
        everybody = places == list(range(len(crew.family.ids))) and crew.rows.device == self.device
        index = torch.tensor(places, device=crew.rows.device)
        rows = crew.rows if everybody else crew.rows[index].to(self.device)
        self.install(crew.family, rows, down)
        view = self.view(crew, down.ids, rows, down)
        prepared = self.terms.method.prepare(view)
        loss = self._train(crew, rows, places, down.round, prepared)
        reports = dict(self.terms.method.report(view))
        reports["loss"] = loss
        if not everybody:
            crew.rows[index] = rows.to(crew.rows.device)
        return Up(down.round, down.ids, _blocks(crew.family, rows, down.send), reports)

    def install(self, family: Family, rows: Tensor, down: Down) -> None:
        """Move rows (k, width), in place, towards what was received."""
        for block, pull in zip(down.blocks, down.pulls, strict=True):
            for own, received in family.layout.pieces(rows, block.value.to(rows.device), *block.units):
                own.copy_(received if pull is None else install(own, received, pull.to(rows.device)))

    def _train(self, crew: _Crew, rows: Tensor, places: list[int], round_: int, prepared: Prepared) -> Tensor:
        recipe = self._recipe(crew)
        extras = dict(prepared.extras)
        scale = _scale(crew.family, prepared.rates, len(rows))
        if crew.at_once == 0:
            crew.at_once = self.clients_at_once or how_many_at_once(recipe, extras)
        step = crew.at_once
        if crew.engine is None:
            few = {name: value[:step] for name, value in extras.items()}
            crew.engine = choose(self.engine_name, recipe, rows[: min(step, len(crew.clients))], few)
        losses = []
        for at in range(0, len(rows), step):
            part = slice(at, at + step)
            job = Job(
                rows[part],
                tuple(places[part]),
                round_,
                self.terms.training.rate(round_),
                None if scale is None else scale[part].to(rows.device),
                {name: value[part].to(rows.device) for name, value in extras.items()},
            )
            losses.append(crew.engine.train(job))
        return torch.cat(losses)

    def _recipe(self, crew: _Crew) -> Recipe:
        objective, training = self.terms.method.objective(), self.terms.training
        return Recipe(crew.family.template, crew.family.layout, crew.samples, training, objective, self.device)

    def fine_tune(self, ids: Sequence[int], rows: Tensor, round_: int) -> Tensor:
        """One more round of local training from these rows, (k, width), on a copy; nothing is kept or sent."""
        crew = self.crews[self.home[ids[0]][0]]
        rows = rows.clone()
        prepared = self.terms.method.prepare(self.view(crew, tuple(ids), rows, None, round_))
        self._train(crew, rows, [self.home[i][1] for i in ids], round_, prepared)
        return rows

    # --- looking -----------------------------------------------------------------------------------------------------

    def view(
        self, crew: _Crew, ids: tuple[int, ...], rows: Tensor, down: Down | None, round_: int | None = None
    ) -> StackView:
        """What a method's client half sees of some clients."""
        places = [self.home[i][1] for i in ids]
        clients = [crew.clients[at] for at in places]

        def tables(split: str) -> Table:
            whole = self._table(crew, split)
            if places == list(range(len(crew.clients))):
                return whole
            index = torch.tensor(places, device=whole.y.device)
            return Table(whole.x[index], whole.y[index], whole.mask[index])

        return StackView(
            family=crew.family,
            ids=ids,
            names=tuple(client.name for client in clients),
            round=down.round if down is not None else (self.round if round_ is None else round_),
            rounds=self.terms.training.rounds,
            epochs=self.terms.training.epochs,
            seed=self.terms.seed,
            classes=self.terms.classes,
            rows=rows,
            tables=tables,
            down=down,
            common=self.terms.common,
            public_test=self.terms.public_test,
            vectorised=crew.engine is not None and crew.engine.name == "vectorised",
            traits=tuple(client.traits for client in clients),
            labels=tuple(client.labels for client in clients),
            samples=tuple(client.samples for client in clients),
        )

    def _table(self, crew: _Crew, split: str) -> Table:
        """A split of a whole family, padded to the longest; made once."""
        if split not in crew.tables:
            parts = [getattr(client, split) for client in crew.clients]
            longest = max(len(part) for part in parts)
            x = torch.zeros(len(parts), longest, *parts[0].x.shape[1:], dtype=parts[0].x.dtype)
            y = torch.zeros(len(parts), longest, dtype=torch.int64)
            mask = torch.zeros(len(parts), longest)
            for i, part in enumerate(parts):
                x[i, : len(part)], y[i, : len(part)], mask[i, : len(part)] = part.x, part.y, 1.0
            crew.tables[split] = Table(x.to(self.device), y.to(self.device), mask.to(self.device))
        return crew.tables[split]

    def looks(self, down: Mapping[tuple[int, ...], Down]) -> list[tuple[StackView, StackView]]:
        """For each family, its clients as they would be after installing (received) and as they are (adapted)."""
        pairs = []
        for ids, message in down.items():
            crew = self.crews[self.home[ids[0]][0]]
            own = crew.rows[torch.tensor([self.home[i][1] for i in ids], device=crew.rows.device)].to(self.device)
            received = own.clone()
            self.install(crew.family, received, message)
            pairs.append((self.view(crew, ids, received, message), self.view(crew, ids, own, message)))
        return pairs

    def model(self, number: int, down: Down | None = None) -> nn.Module:
        """A client's personal model: what it has, after installing what is sent to it."""
        index, at = self.home[number]
        crew = self.crews[index]
        row = crew.rows[at : at + 1].to(self.device, copy=True)
        if down is not None:
            self.install(crew.family, row, down)
        return crew.family.model(row[0].cpu())

    @property
    def engines(self) -> list[str]:
        """The engine of each family, once chosen."""
        return [crew.engine.name for crew in self.crews if crew.engine is not None]

    def close(self) -> None:
        """Give back worker processes and captured graphs."""
        for crew in self.crews:
            if crew.engine is not None:
                crew.engine.close()
                crew.engine = None


def _blocks(family: Family, rows: Tensor, send: Mapping[str, Tensor]) -> tuple[Block, ...]:
    """What is sent: for each set of senders one block of all the units they send."""
    groups: list[tuple[Tensor, list[str]]] = []
    for unit, senders in send.items():
        for other, units in groups:
            if torch.equal(other, senders):
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


def _scale(family: Family, rates: Mapping[str, Tensor], k: int) -> Tensor | None:
    """Multipliers of the learning rate, (k, parameters), from those of units; None where all are 1."""
    if not rates:
        return None
    first = next(iter(rates.values()))
    scale = torch.ones(k, family.layout.parameters, device=first.device)
    for unit, rate in rates.items():
        for start, stop in family.layout.ranges[unit]:
            if stop <= family.layout.parameters:
                scale[:, start:stop] = rate[:, None]
    return scale
