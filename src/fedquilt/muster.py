"""Who is there: what each client holds and declares, and families of clients; who changes keeps what it had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedquilt.client import Client
from fedquilt.crew import Crew
from fedquilt.habits import Fickle, seeded
from fedquilt.kinds import Build, Kinds, families
from fedquilt.messages import Member
from fedquilt.methods.base import Method
from fedquilt.parts import Parts
from fedquilt.rest import Rest
from fedquilt.stacks import Family, Layout
from fedquilt.structure import Description, content
from fedquilt.terms import Terms
from fedquilt.training.batches import key_of
from fedquilt.training.check import check_parts
from fedquilt.training.engine import Samples

Home = tuple[int, int]  # the number of a family, and a place in it


class Muster:
    """Builds what clients hold, once for all that hold the same, and groups them into families."""

    def __init__(self, terms: Terms, device: torch.device) -> None:
        self.terms, self.device = terms, device
        self._kinds = Kinds()
        self._builders: dict[int, str] = {}  # what a function that builds models is, by its content
        self._builds: dict[tuple[object, ...], Build] = {}
        self._mentioned: list[Description] = []  # builders' contents hold while what they mention lives

    def group(
        self, now: Mapping[int, Client], before: Sequence[Crew], home: Mapping[int, Home], fresh: Set[int]
    ) -> tuple[list[Crew], dict[int, Home]]:
        """Clients as they are now, by family, and where each is: the number of its family, and its place there.

        They keep what they had `before`, except those with `fresh` models.
        """
        builds = {n: self._build(client) for n, client in now.items()}
        crews: list[Crew] = []
        homes: dict[int, Home] = {}
        for index, family in enumerate(families(builds)):
            clients = tuple(now[n] for n in family.ids)
            rest = self._first_rows(family, builds)
            for at, n in enumerate(family.ids):
                homes[n] = (index, at)
                if n in home:
                    self._keep(before[home[n][0]], home[n][1], family, rest, at, builds[n], n in fresh)
            same = [c for c in before if c.family.ids == family.ids and _labels(c.clients) == _labels(clients)]
            tables = {key: table for crew in same for key, table in crew.tables.items() if key[0] != "train"}
            crews.append(Crew(family, clients, rest, self._samples(clients), tables))
        return crews, homes

    def _keep(
        self, old: Crew, was: int, family: Family, rest: Rest, at: int, build: Build, fresh: bool
    ) -> None:  # fmt: skip
        """Write into a client's first row what it had before, but for what new labels or models decide."""
        first, (had,), layout = rest.take([at]), old.rest.take([was]).to(rest.device), family.layout
        row = first[0].clone()
        self._write_old(old, was, had, layout, row, build, fresh)
        if was not in old.rest.fresh or not torch.equal(row, first[0]):
            rest.put([at], row[None])

    def _write_old(
        self, old: Crew, at: int, had: Tensor, layout: Layout, row: Tensor, build: Build, fresh: bool
    ) -> None:  # fmt: skip
        """Write what a client had, (width,) in the old layout, into its new row, in place."""
        if not fresh and old.family.layout.key() == layout.key() and old.family.layout.core == layout.core:
            earlier, core = self._build(old.clients[at]), layout.core
            begun = earlier.kind.rows[earlier.row].to(row.device)  # what was learned, then state
            learned = (row[:core], had[:core], begun[:core])
            for now, then, first in (learned, (row[layout.trained :], had[old.family.layout.trained :], begun[core:])):
                now.copy_(then if earlier == build else torch.where(now == first, then, now))
            return
        for unit in layout.state:  # it is the client's, and outlives its model
            if old.family.layout.signatures.get(unit) == layout.signatures[unit]:
                value = old.family.layout.take(had[None], unit)
                for mine, part in layout.pieces(row[None], value, unit):
                    mine.copy_(part)

    def _build(self, client: Client) -> Build:
        """What a client's model starts from. Clients with one builder share it, where nothing else makes a difference.

        A builder is known by its content: functions made in a loop with the same arguments are one.
        """
        if id(client.model) not in self._builders:
            description = content(client.model)
            self._builders[id(client.model)] = description.text
            self._mentioned.append(description)
        sample = (client.train.x.shape[1:], client.train.x.dtype)
        key: tuple[object, ...] = (self._builders[id(client.model)], sample)
        if type(self.terms.method).parts is not Method.parts:  # it may look at what a client declares
            key += (client.labels, tuple(sorted(client.traits.items())))
        if key not in self._builds:
            parts = self.parts(client)
            declared = getattr(client.model, "constant", ())
            try:
                self._builds[key] = self._kinds.of(
                    parts.module(), lambda _: parts.cut(), client.train, parts.written, declared
                )  # fmt: skip
            except Fickle as error:
                raise ValueError(f"client '{client.name}': {error}") from None
        return self._builds[key]

    def parts(self, client: Client, draw: int = 0) -> Parts:
        """What a client holds, made anew."""
        with seeded(key_of("model", self.terms.seed, *([draw] if draw else []))):
            try:
                model: object = client.model()
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise ValueError(f"client '{client.name}': its model could not be built: {told}") from error
            if not isinstance(model, nn.Module):
                kind = type(model).__name__
                raise TypeError(f"client '{client.name}': its model function gave a {kind}, not an nn.Module")
            if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
                raise ValueError(
                    f"client '{client.name}': its model has lazy layers without a shape yet; run it on a sample in "
                    "the function that builds it"
                )
            if not any(True for tensors in (model.parameters(), model.buffers()) for _ in tensors):
                raise ValueError(f"client '{client.name}': its model has no parameters, so there is nothing to train")
            check_parts(client.name, model)
            return self.terms.method.parts(model, self.member(client), self.terms.classes)

    def member(self, client: Client, layout: Layout | None = None) -> Member:
        """What a client declares; of its units, once they are laid out."""
        member = Member(client.name, client.samples, client.traits, client.labels, {}, self.terms.public_counts)
        if layout is None:
            return member
        kinds = {unit.name: unit.kinds for unit in layout.units}
        return replace(
            member, units=layout.signatures, kinds=kinds, statistics=layout.statistics, constant=layout.constant
        )  # fmt: skip

    def _first_rows(self, family: Family, builds: Mapping[int, Build]) -> Rest:
        """Rows at rest: on the device where they take a quarter of it at most, else in host memory."""
        bytes_ = len(family.ids) * family.layout.width * 4
        total = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        device = self.device if bytes_ * 4 <= total else torch.device("cpu")
        place: dict[Build, int] = {}
        for n in family.ids:  # clients may start alike
            place.setdefault(builds[n], len(place))
        first = torch.stack([build.first(family.layout) for build in place])
        return Rest(first, [place[builds[n]] for n in family.ids], device)

    def _samples(self, clients: Sequence[Client]) -> Samples:
        counts = tuple(client.samples for client in clients)
        keys = tuple(key_of(self.terms.seed, client.name) for client in clients)
        parts = tuple((client.train.x, client.train.y) for client in clients)
        samples = Samples(parts, tuple(range(len(clients))), counts, keys)
        total = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        return samples.to(self.device) if samples.bytes * 4 <= total else samples


def _labels(clients: Sequence[Client]) -> list[tuple[int, ...]]:
    return [client.labels for client in clients]
