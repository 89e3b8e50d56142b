"""The client side of a federation: it receives, installs, trains and sends, for many clients at once or for one.

In a simulation it holds all clients, on a device one. The code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedquilt._util.randomness import key_of
from fedquilt._util.turns import one_at_a_time
from fedquilt.client import Client
from fedquilt.core.compressed import compressed
from fedquilt.core.evaluation import Scored, evaluate, sent_models
from fedquilt.core.everyone import everyone_of
from fedquilt.core.family_state import FamilyState, blocks_of, covers, do, install_into, write
from fedquilt.core.local_training import LocalTraining
from fedquilt.core.membership import Membership
from fedquilt.core.protection import protect
from fedquilt.core.secure_round import close
from fedquilt.core.server import Server
from fedquilt.core.terms import Terms
from fedquilt.engines.check_models import naming
from fedquilt.engines.engine import TrainingJob
from fedquilt.engines.sample_noise import NOISE
from fedquilt.families.common import Common
from fedquilt.families.layout import Signature
from fedquilt.interface.client_stack import ClientStack, PaddedSplit
from fedquilt.interface.me import each
from fedquilt.interface.messages import ClientInfo, Instructions, Update, Updates
from fedquilt.interface.readout import EVERYONE, Readout
from fedquilt.interface.sent_models import SentModels
from fedquilt.interface.steps import Do, Install, Train
from fedquilt.results import Evaluation


class Simulation:
    """Clients and their models. `numbers` are the clients' numbers in the federation (default: 0, 1, ...).

    `engine` is auto, vectorised, compiled, parallel or sequential, or one for each family with commas between;
    `clients_at_once` bounds how many are trained in one stack. Clients' own noise is drawn by `secret` (default: the
    seed).
    """

    late: ClassVar[bool] = False  # scores of a round come when it is over

    def __init__(
        self,
        clients: Sequence[Client],
        terms: Terms,
        device: torch.device | str = "cpu",
        engine: str = "auto",
        clients_at_once: int | None = None,
        numbers: Sequence[int] | None = None,
        secret: int | None = None,
    ) -> None:
        self.terms, self.device = terms, torch.device(device)
        self.clients = tuple(terms.task.take(client) for client in clients)
        self.numbers = tuple(numbers) if numbers is not None else tuple(range(len(clients)))
        self.round, self.secret = 0, terms.seed if secret is None else secret
        self.steps = terms.method.local()  # asked for once: engines are built for its objectives
        self.training = LocalTraining(terms, self.steps, self.device, engine, clients_at_once)
        train = [s for s in self.steps if isinstance(s, Train) and s.when != "tuning" and not s.told]
        self.passes = sum(step.epochs or terms.training.epochs for step in train if step.data == "train")
        self._starts = {start for client in clients for start in client.changes}
        self.family_states: list[FamilyState] = []
        self.home: dict[int, tuple[int, int]] = {}
        self.memory: dict[tuple[int, ...], dict[str, Tensor]] = {}  # what read-outs keep from round to round
        self.twins: Simulation | None = None  # the same clients trained alone, where a run has them: read-outs may ask
        self.membership = Membership(terms, self.device)
        self._gather(set())

    # --- who is there ------------------------------------------------------------------------------------------------

    def members(self) -> dict[int, ClientInfo]:
        """What each client declares, by its number."""
        now = {}
        for family_state in self.family_states:
            layout = family_state.family.layout
            for number, client in zip(family_state.family.ids, family_state.clients, strict=True):
                now[number] = self.membership.member(client, layout)
        return dict(sorted(now.items()))

    def first_values(self, draw: int = 0) -> dict[tuple[str, Signature], Tensor]:
        """The value of every unit, in every shape, on the first client that has it: what the server starts from.

        Another `draw` gives other first weights: those of the same models, built with another seed.
        """
        return self.membership.first_values(self.family_states, draw)

    def architectures(self) -> list[tuple[Client, nn.Module]]:
        """Of each family its first client and the module that its clients have in common."""
        return [(family_state.clients[0], family_state.family.template) for family_state in self.family_states]

    def changes(self, round_: int) -> dict[int, ClientInfo]:
        """Go to a round: clients whose model, labels or data change there change now, and declare themselves anew."""
        if not any(self.round < start <= round_ for start in self._starts):
            self.round = round_
            return {}
        due = {
            n: [change for start, change in client.changes.items() if self.round < start <= round_]
            for n, client in zip(self.numbers, self.clients, strict=True)
        }
        self.round = round_
        self.close()
        self._gather({n for n, changes in due.items() if any(change.model is not None for change in changes)})
        members = self.members()
        return {n: members[n] for n, changes in due.items() if changes}

    def families(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """The chosen clients, family by family."""
        if len(self.family_states) == 1:
            return [tuple(sorted(chosen))]
        groups: dict[int, list[int]] = {}
        for i in sorted(chosen):
            groups.setdefault(self.home[i][0], []).append(i)
        return [tuple(ids) for _, ids in sorted(groups.items())]

    @one_at_a_time
    def _gather(self, fresh: Set[int]) -> None:
        """Group the clients as they are now into families. They keep their numbers, except those with fresh models."""
        now = {n: client.at(self.round) for n, client in zip(self.numbers, self.clients, strict=True)}
        self.family_states, self.home = self.membership.group(now, self.family_states, self.home, fresh)

    # --- a round -----------------------------------------------------------------------------------------------------

    def turn(self, server: Server, round_: int) -> None:
        """Go to a round, and let the server hear of those who change there."""
        changed = self.changes(round_)
        if changed:
            server.declare(changed)

    def exchange(
        self, server: Server, chosen: Sequence[int], readouts: Sequence[Readout]
    ) -> list[tuple[Instructions, Update]]:  # fmt: skip
        """A round of the chosen clients, family by family; scores are asked for when it is over."""
        downs = [server.instructions(ids) for ids in self.families(chosen) if ids]
        return self._closed(server, [(down, self.run(down)) for down in downs])

    def _closed(self, server: Server, pairs: list[tuple[Instructions, Update]]) -> list[tuple[Instructions, Update]]:
        """What the server is given: under secure sums no copies."""
        return pairs if self.terms.secure is None else close(server, pairs, self.terms.secure, self.secret)

    @one_at_a_time
    def run(self, down: Instructions) -> Update:
        """A round of some clients of one family: receive, install, train, send."""
        family_state = self.family_states[self.home[down.ids[0]][0]]
        places = family_state.places(down.ids)
        in_place = family_state.everybody(places) and family_state.store.device.type == self.device.type
        if in_place:
            rows = family_state.store.all()
        else:
            rows = family_state.room(len(places), self.device)
            if not (self.steps[0] == Install() and covers(family_state.family, down)):
                rows.copy_(family_state.store.take(places))  # what is received does not replace all of a row
        reports: dict[str, Tensor] = {}
        send: Mapping[str, Tensor] = down.send
        installed = False

        def seen() -> ClientStack:
            view = self.view(family_state, down.ids, rows, down, installed=installed)
            return replace(view, graphs=family_state.graphs)

        for number, step in enumerate(self.steps):
            if isinstance(step, Install):
                self._install(family_state, rows, down)
                installed = True
            elif isinstance(step, Train):
                due = down.round >= step.from_round and step.when != "tuning"
                if due and (not step.told or step.told in down.told):
                    keys = self._sample_keys(family_state, places, down.round, number)
                    lr = self.terms.training.rate(down.round)
                    job = TrainingJob(rows, places, down.round, lr, None, keys, home=True)
                    with naming(family_state.clients, places, down.round):
                        family_state.loss = self.training.train(family_state, number, job, seen)
                        family_state.lost = (self.round, places)
            elif isinstance(step, Do):
                if step.due(down.told):
                    reports |= do(step, seen())
            else:
                chosen = each(seen(), step.function)
                send = {unit: who & chosen[unit].cpu() if unit in chosen else who for unit, who in send.items()}
        up = Update(down.round, down.ids, blocks_of(family_state.family, rows, send), reports)
        privacy, compress = self.terms.privacy, self.terms.compress
        if privacy is not None:
            up = protect(up, down, privacy, self._keys(family_state, places, down.round))
        if compress.codes:  # after noise, which then covers what waits too
            up = compressed(up, down, family_state.family.layout, compress, rows)
        if not in_place:
            family_state.store.put(places, rows)
        return up

    def _keys(self, family_state: FamilyState, places: Sequence[int], round_: int) -> list[int]:
        """What the noise of clients is drawn by in a round."""
        return [key_of("local", self.secret, family_state.clients[place].name, round_) for place in places]

    def _sample_keys(
        self, family_state: FamilyState, places: Sequence[int], round_: int, step: int
    ) -> dict[str, Tensor]:  # fmt: skip
        """What the noise of clients that hide their samples is drawn by in a step."""
        if self.terms.privacy is None or self.terms.privacy.level != "sample":
            return {}
        names = [family_state.clients[place].name for place in places]
        return {NOISE: torch.tensor([[key_of("samples", self.secret, name, round_, step)] for name in names])}

    def _install(self, family_state: FamilyState, rows: Tensor, down: Instructions) -> None:
        """Move rows, in place, towards what was received, as the method's clients do it."""
        function = next((step.function for step in self.steps if isinstance(step, Install)), None)
        if function is None:
            install_into(family_state.family, rows, down)
            return
        found = each(self.view(family_state, down.ids, rows, down, installed=False), function)
        kept = {unit: value.clone() for unit, value in found.items()}  # they may be what is now written over
        install_into(family_state.family, rows, down)
        write(family_state.family.layout, rows, kept)

    def check(self) -> None:
        """Refuse models that do not suit their clients' samples, before any work; stubs of clients have none."""
        for family_state in self.family_states:
            if family_state.clients[0].train.x.numel():
                self.training.check(family_state)

    @one_at_a_time
    def fine_tune(
        self, ids: Sequence[int], rows: Tensor, round_: int, epoch: int | None = None, units: str = "all"
    ) -> Tensor:  # fmt: skip
        """One more round of training from these rows, (k, width), on a copy; nothing is kept or sent.

        With `epoch`, from 1 on, only that epoch, with the batches of a round so much later; of all units or the head.
        """
        family_state = self.family_states[self.home[ids[0]][0]]
        view = self.view(family_state, tuple(ids), rows.clone(), None, round_)
        places = family_state.places(tuple(ids))
        keys = self._sample_keys(family_state, places, round_ + (epoch or 1) - 1, -1)
        job = TrainingJob(view.rows, places, round_ + (epoch or 1) - 1, view.lr, None, keys)
        for number, step in enumerate(self.steps):
            if isinstance(step, Train) and step.data == "train" and step.when != "round" and not step.told:
                which = number if epoch is None else self.training.tuning(family_state, number, units)
                if which is not None:
                    self.training.train(family_state, which, job, lambda: view)
        return view.rows

    # --- looking -----------------------------------------------------------------------------------------------------

    def view(
        self, family_state: FamilyState, ids: tuple[int, ...], rows: Tensor, down: Instructions | None,
        round_: int | None = None, installed: bool = True,
    ) -> ClientStack:  # fmt: skip
        """What a method's client half sees of some clients; `installed`: what was received is in the rows."""
        places = family_state.places(ids)
        now = down.round if down is not None else (self.round if round_ is None else round_)

        def tables(split: str) -> PaddedSplit:
            if split == EVERYONE:
                return self.of_everyone(family_state).for_each(len(ids))
            public = self.terms.public(family_state.clients[0])
            apart = split != "train" and not family_state.even(self.terms.classes)
            if apart or (family_state.much(split) and self.device.type == "cpu"):
                return family_state.table(split, places, public, self.device)
            whole = family_state.table(split, (), public, self.device)
            if family_state.everybody(places):
                return whole
            if places == tuple(range(places[0], places[0] + len(places))):  # neighbours need not be copied
                return whole.of(slice(places[0], places[0] + len(places)))
            return whole.of(torch.tensor(places, device=whole.y.device))

        return ClientStack(
            family=family_state.family,
            ids=ids,
            clients=[family_state.clients[at] for at in places],
            round=now,
            rounds=self.terms.training.rounds,
            epochs=self.terms.training.epochs,
            batch=self.terms.training.batch,
            passes=self.passes,
            lr=self.terms.training.rate(now),
            seed=self.terms.seed,
            classes=self.terms.classes,
            task=self.terms.task,
            rows=rows,
            tables=tables,
            down=down,
            public=self.terms.public(family_state.clients[0]),
            vectorised=self._stacks(family_state),
            installed=installed,
            samples_at_once=family_state.samples_at_once,
        )

    def of_everyone(self, family_state: FamilyState) -> PaddedSplit:
        """Those of everyone's test samples that models of a family take, as of one client."""
        if (EVERYONE, ()) not in family_state.tables:
            family_state.tables[EVERYONE, ()] = everyone_of(self).table(family_state, self.device)
        return family_state.tables[EVERYONE, ()]

    def _stacks(self, family_state: FamilyState) -> bool:
        """Whether what steps compute for clients of a family is computed for a stack of them."""
        return any(engine.stacks for engine in family_state.engines.values())

    def looks(self, down: Mapping[tuple[int, ...], Instructions]) -> list[tuple[ClientStack, ClientStack]]:
        """For each family, its clients as they would be after installing (received) and as they are (adapted)."""
        pairs = []
        for ids, message in down.items():
            family_state = self.family_states[self.home[ids[0]][0]]
            self.training.check(family_state)
            own = family_state.store.take(family_state.places(ids)).to(self.device)
            received = own.clone()
            self._install(family_state, received, message)
            now = self._seen(family_state, ids, own, message, installed=False)
            pairs.append((self._seen(family_state, ids, received, message), now))
        return pairs

    def as_they_are(self, ids: tuple[int, ...]) -> ClientStack:
        """Clients of one family with what they hold, nothing received."""
        family_state = self.family_states[self.home[ids[0]][0]]
        rows = family_state.store.take(family_state.places(ids)).to(self.device)
        return self._seen(family_state, ids, rows, None, installed=False)

    def _seen(
        self, family_state: FamilyState, ids: tuple[int, ...], rows: Tensor, down: Instructions | None,
        installed: bool = True,
    ) -> ClientStack:  # fmt: skip
        """Clients as they are looked at: after the steps that are done then."""
        for step in self.steps:
            if isinstance(step, Do) and step.when == "look":
                rows = rows.clone()
                do(step, self.view(family_state, ids, rows, down, installed=installed))
        return self.view(family_state, ids, rows, down, installed=installed)

    def groups(self) -> Iterator[tuple[int, ...]]:
        """The clients that are measured here: all of them."""
        return self.groups_of(lambda number: True)

    def groups_of(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, ...]]:
        """Clients, by their numbers, family by family and not more at once than is trained at once."""
        for family_state in self.family_states:
            ids = family_state.family.ids
            most = family_state.at_once or self.training.clients_at_once or len(family_state.clients)
            among = [place for place, number in enumerate(ids) if wanted(number)]
            for places in family_state.groups(among, most, self.terms.classes) if among else ():
                yield tuple(ids[place] for place in places)

    def in_order(self, said: list[tuple[int, str, Tensor]]) -> list[tuple[int, str, Tensor]]:
        """What groups of clients say, with the first of each, in the order in which it is added."""
        return said

    def scored(self, order: list[int], scored: Scored) -> tuple[list[int], Scored]:
        """What clients scored, by their numbers: those of this process are all."""
        return order, scored

    def collect(self, server: Server) -> None:
        """Bring together what clients keep: it is here already."""

    def evaluate(self, server: Server, readouts: Sequence[Readout], last: bool) -> list[Evaluation]:
        """What every client scores with every read-out on the validation and test splits, after the last round."""
        return evaluate(self, server, readouts, last)

    def sent_models(self, updates: Updates, samples: Common) -> list[SentModels]:
        """The whole models that were sent, to be run on the server's samples in their clients' form."""
        return sent_models(self, updates, samples)

    def model(self, number: int, down: Instructions | None = None) -> nn.Module:
        """A client's personal model: what it has, after installing what is sent to it."""
        index, at = self.home[number]
        family_state = self.family_states[index]
        row = family_state.store.take([at]).to(self.device)
        if down is not None:
            self._install(family_state, row, down)
        return family_state.family.model(self._seen(family_state, (number,), row, down).rows[0].cpu())

    @property
    def where(self) -> str:
        """The device that clients train on."""
        return str(self.device)

    @property
    def engines(self) -> list[str]:
        """The engine of each family, once chosen."""
        return self.training.found(self.family_states)

    def close(self) -> None:
        """Give back worker processes and captured graphs."""
        for family_state in self.family_states:
            for engine in family_state.engines.values():
                engine.close()
            family_state.engines.clear()
            family_state.graphs.clear()
