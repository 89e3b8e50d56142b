"""Who is there: what each client holds and declares, and families of clients; who changes keeps what it had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedquilt._util.randomness import key_of
from fedquilt.client import Client
from fedquilt.core.family_state import FamilyState
from fedquilt.core.row_store import RowStore
from fedquilt.core.terms import Terms
from fedquilt.engines.check_models import check_parts
from fedquilt.engines.engine import Samples
from fedquilt.families.architecture import Description, content
from fedquilt.families.family import Family
from fedquilt.families.habits import Fickle, seeded
from fedquilt.families.kinds import Build, Kinds, families
from fedquilt.families.layout import Layout, Signature
from fedquilt.families.parts import Parts
from fedquilt.interface.messages import ClientInfo
from fedquilt.interface.method import Method

Home = tuple[int, int]  # the number of a family, and a place in it


class Membership:
    """Builds what clients hold, once for all that hold the same, and groups them into families."""

    def __init__(self, terms: Terms, device: torch.device) -> None:
        self.terms, self.device = terms, device
        self._kinds = Kinds(wait=terms.compress.codes)
        self._builders: dict[int, str] = {}  # what a function that builds models is, by its content
        self._builds: dict[tuple[object, ...], Build] = {}
        self._mentioned: list[Description] = []  # builders' contents hold while what they mention lives

    def group(
        self, now: Mapping[int, Client], before: Sequence[FamilyState], home: Mapping[int, Home], fresh: Set[int]
    ) -> tuple[list[FamilyState], dict[int, Home]]:
        """Clients as they are now, by family, and where each is: the number of its family, and its place there.

        They keep what they had `before`, except those with `fresh` models.
        """
        builds = {n: self._build(client) for n, client in now.items()}
        family_states: list[FamilyState] = []
        homes: dict[int, Home] = {}
        for index, family in enumerate(families(builds)):
            clients = tuple(now[n] for n in family.ids)
            store = self._first_rows(family, builds)
            for at, n in enumerate(family.ids):
                homes[n] = (index, at)
                if n in home:
                    self._keep(before[home[n][0]], home[n][1], family, store, at, builds[n], n in fresh)
            same = [c for c in before if c.family.ids == family.ids and _labels(c.clients) == _labels(clients)]
            tables = {
                key: table for family_state in same for key, table in family_state.tables.items() if key[0] != "train"
            }
            family_states.append(
                FamilyState(family, clients, store, self._samples(clients), tables, len(family_states))
            )
        return family_states, homes

    def _keep(
        self, old: FamilyState, was: int, family: Family, store: RowStore, at: int, build: Build, fresh: bool
    ) -> None:  # fmt: skip
        """Write into a client's first row what it had before, but for what new labels or models decide."""
        first, (had,), layout = store.take([at]), old.store.take([was]).to(store.device), family.layout
        row = first[0].clone()
        self._write_old(old, was, had, layout, row, build, fresh)
        if was not in old.store.fresh or not torch.equal(row, first[0]):
            store.put([at], row[None])

    def _write_old(
        self, old: FamilyState, at: int, had: Tensor, layout: Layout, row: Tensor, build: Build, fresh: bool
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
        held = tuple(map(id, self.terms.public(client)))  # clients of a family hold one form of the public samples
        key += held
        if type(self.terms.method).parts is not Method.parts:  # it may look at what a client declares
            key += (client.labels, tuple(sorted(client.traits.items())))
        if key not in self._builds:
            parts = self.parts(client)
            declared = getattr(client.model, "constant", ())
            try:
                self._builds[key] = self._kinds.of(
                    parts.module(), lambda _: parts.cut(), client.train, parts.written, declared, held
                )  # fmt: skip
            except Fickle as error:
                raise ValueError(f"client '{client.name}': {error}") from None
        return self._builds[key]

    def parts(self, client: Client, draw: int = 0) -> Parts:
        """What a client holds, made anew."""
        with seeded(self._key(draw)):
            model = self._model(client)
            parts = self.terms.method.parts(model, self.member(client), self.terms.classes)

        def another(number: int) -> nn.Module:
            with seeded(self._key(draw, number)):
                return self._model(client)

        return parts.drawn(another)

    def _key(self, *draws: int) -> int:
        """The seed of first weights: another one for each draw but the first."""
        return key_of("model", self.terms.seed, *(draws if any(draws) else ()))

    def _model(self, client: Client) -> nn.Module:
        """A client's model, made anew."""
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
        return model

    def first_values(self, family_states: Sequence[FamilyState], draw: int) -> dict[tuple[str, Signature], Tensor]:
        """The value of every unit, in every shape, on the first client that has it; of another draw if not of 0."""
        first: dict[tuple[str, Signature], Tensor] = {}
        for family_state in sorted(family_states, key=lambda family_state: min(family_state.family.ids)):
            layout = family_state.family.layout
            rows = (
                layout.row(self.parts(family_state.clients[0], draw).module())[None]
                if draw
                else family_state.store.take([0])
            )
            for unit in layout.units:
                value = layout.take(rows, unit.name)[0].clone()
                first.setdefault((unit.name, layout.signatures[unit.name]), value)
        return first

    def member(self, client: Client, layout: Layout | None = None) -> ClientInfo:
        """What a client declares; of its units, once they are laid out."""
        member = ClientInfo(client.name, client.samples, client.traits, client.labels, {}, self.terms.public_counts)
        if layout is None:
            return member
        kinds = {unit.name: unit.kinds for unit in layout.units}
        return replace(
            member, units=layout.signatures, kinds=kinds, statistics=layout.statistics, constant=layout.constant,
            parameters={unit: stop - start for unit, (start, stop) in layout.learned.items()},
        )  # fmt: skip

    def _first_rows(self, family: Family, builds: Mapping[int, Build]) -> RowStore:
        """Rows at rest: on the device where they take a quarter of it at most, else in host memory."""
        bytes_ = len(family.ids) * family.layout.width * 4
        total = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        device = self.device if bytes_ * 4 <= total else torch.device("cpu")
        place: dict[Build, int] = {}
        for n in family.ids:  # clients may start alike
            place.setdefault(builds[n], len(place))
        first = torch.stack([build.first(family.layout) for build in place])
        return RowStore(first, [place[builds[n]] for n in family.ids], device)

    def _samples(self, clients: Sequence[Client]) -> Samples:
        counts = tuple(client.samples for client in clients)
        keys = tuple(key_of(self.terms.seed, client.name) for client in clients)
        parts = tuple((client.train.x, client.train.y) for client in clients)
        samples = Samples(parts, tuple(range(len(clients))), counts, keys)
        total = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        return samples.to(self.device) if samples.bytes * 4 <= total else samples


def _labels(clients: Sequence[Client]) -> list[tuple[int, ...]]:
    return [client.labels for client in clients]
