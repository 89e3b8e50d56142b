"""The client side of a federation: it receives, installs, trains and sends, for many clients at once or for one.

In a simulation a fleet holds all clients; on a device it holds one. The code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedquilt.alone import alone
from fedquilt.client import Client
from fedquilt.crew import Crew, blocks_of, covers, resting_of, scale_of, table_of, write
from fedquilt.me import each
from fedquilt.messages import Down, Member, Up
from fedquilt.muster import Muster
from fedquilt.names import unknown
from fedquilt.sharing import install
from fedquilt.stacks import Family, Signature
from fedquilt.steps import Do, Install, Train
from fedquilt.terms import Terms
from fedquilt.training.batches import key_of
from fedquilt.training.check import check_model, naming
from fedquilt.training.choose import ENGINES, choose, choose_again
from fedquilt.training.engine import Engine, Job, Recipe, Samples
from fedquilt.training.sizes import how_many_at_once
from fedquilt.view import StackView, Table


class Fleet:
    """Clients and their models. `numbers` are the clients' numbers in the federation (default: 0, 1, ...).

    `engine` is auto, vectorised, parallel or sequential, or one for each family with commas between; `clients_at_once`
    bounds how many are trained in one stack.
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
        for name in engine.split(","):
            if name not in (*ENGINES, "auto"):
                raise ValueError(unknown(name, ("auto", *ENGINES), "engine"))
        self.terms, self.device = terms, torch.device(device)
        if terms.method.needs_plain_sgd and (terms.training.optimiser != "sgd" or terms.training.momentum):
            raise ValueError(
                f"the method '{terms.method.name}' reads gradients off the way that clients go, which holds for plain "
                "SGD only; train with optimiser=sgd and momentum=0"
            )
        if terms.method.needs_no_decay and terms.training.weight_decay:
            raise ValueError(
                f"the method '{terms.method.name}' puts weights in place by its steps, and weight decay would move "
                "them on; train with weight_decay=0"
            )
        self.engine_name, self.clients_at_once = engine, clients_at_once
        self.clients = tuple(clients)
        self.numbers = tuple(numbers) if numbers is not None else tuple(range(len(clients)))
        self.round = 0
        self.steps = terms.method.local()  # asked for once: engines are built for its objectives
        train = [step for step in self.steps if isinstance(step, Train) and step.when != "tuning"]
        self.passes = sum(step.epochs or terms.training.epochs for step in train if step.data == "train")
        self._starts = {start for client in clients for start in client.changes}
        self.crews: list[Crew] = []
        self.home: dict[int, tuple[int, int]] = {}
        self.muster = Muster(terms, self.device)
        self._known: dict[int, tuple[str, int]] = {}  # the engine found for a template, and how many clients at once
        self._muster(set())

    # --- who is there ------------------------------------------------------------------------------------------------

    def members(self) -> dict[int, Member]:
        """What each client declares, by its number."""
        now = {}
        for crew in self.crews:
            layout = crew.family.layout
            for number, client in zip(crew.family.ids, crew.clients, strict=True):
                now[number] = self.muster.member(client, layout)
        return dict(sorted(now.items()))

    def first_values(self, draw: int = 0) -> dict[tuple[str, Signature], Tensor]:
        """The value of every unit, in every shape, on the first client that has it: what the server starts from.

        Another `draw` gives other first weights: those of the same models, built with another seed.
        """
        first: dict[tuple[str, Signature], Tensor] = {}
        for crew in sorted(self.crews, key=lambda crew: min(crew.family.ids)):
            layout = crew.family.layout
            rows = layout.row(self.muster.parts(crew.clients[0], draw).module())[None] if draw else crew.rest.take([0])
            for unit in layout.units:
                value = layout.take(rows, unit.name)[0].clone()
                first.setdefault((unit.name, layout.signatures[unit.name]), value)
        return first

    def changes(self, round_: int) -> dict[int, Member]:
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
        self._muster({n for n, changes in due.items() if any(change.model is not None for change in changes)})
        members = self.members()
        return {n: members[n] for n, changes in due.items() if changes}

    def families(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """The chosen clients, family by family."""
        if len(self.crews) == 1:
            return [tuple(sorted(chosen))]
        groups: dict[int, list[int]] = {}
        for i in sorted(chosen):
            groups.setdefault(self.home[i][0], []).append(i)
        return [tuple(ids) for _, ids in sorted(groups.items())]

    @alone
    def _muster(self, fresh: Set[int]) -> None:
        """Group the clients as they are now into families. They keep their numbers, except those with fresh models."""
        now = {n: client.at(self.round) for n, client in zip(self.numbers, self.clients, strict=True)}
        self.crews, self.home = self.muster.group(now, self.crews, self.home, fresh)

    # --- a round -----------------------------------------------------------------------------------------------------

    @alone
    def run(self, down: Down) -> Up:
        """A round of some clients of one family: receive, install, train, send."""
        crew = self.crews[self.home[down.ids[0]][0]]
        places = crew.places(down.ids)
        in_place = crew.everybody(places) and crew.rest.device.type == self.device.type
        if in_place:
            rows = crew.rest.all()
        else:
            rows = crew.room(len(places), self.device)
            if not (isinstance(self.steps[0], Install) and covers(crew.family, down)):
                rows.copy_(crew.rest.take(places))  # what is received does not replace all of a row
        reports: dict[str, Tensor] = {}
        send: Mapping[str, Tensor] = down.send
        installed = False

        def seen() -> StackView:
            return self.view(crew, down.ids, rows, down, installed=installed)

        for number, step in enumerate(self.steps):
            if isinstance(step, Install):
                self.install(crew.family, rows, down)
                installed = True
            elif isinstance(step, Train):
                if down.round >= step.from_round and step.when != "tuning":
                    job = Job(rows, places, down.round, self.terms.training.rate(down.round), home=True)
                    with naming(crew.clients, places, down.round):
                        crew.loss = self._train(crew, number, job, seen)
            elif isinstance(step, Do):
                view = seen()
                found = each(view, step.function, None if step.data is None else view.data(step.data))
                reports |= {name: found.pop(name) for name in step.reports if name in found}
                write(crew.family.layout, rows, found)
            else:
                chosen = each(seen(), step.function)
                send = {unit: who & chosen[unit].cpu() if unit in chosen else who for unit, who in send.items()}
        if not in_place:
            crew.rest.put(places, rows)
        return Up(down.round, down.ids, blocks_of(crew.family, rows, send), reports)

    def install(self, family: Family, rows: Tensor, down: Down) -> None:
        """Move rows (k, width), in place, towards what was received."""
        for block, pull in zip(down.blocks, down.pulls, strict=True):
            for own, received in family.layout.pieces(rows, block.value.to(rows.device), *block.units):
                own.copy_(received if pull is None else install(own, received, pull.to(rows.device)))

    def _train(self, crew: Crew, number: int, job: Job, seen: Callable[[], StackView]) -> Tensor:
        """Train the clients of a job, in place, by the step of a number; their mean losses, (k,).

        `seen` is what the step sees of them, where it wants to.
        """
        step = self.steps[number]
        assert isinstance(step, Train)
        given, rates = (each(seen(), wanted) if wanted is not None else {} for wanted in (step.given, step.rates))
        if given or rates or step.lr is not None:
            scale = scale_of(crew.family, rates, job.rows)
            job = replace(job, lr=step.lr or job.lr, scale=scale, extras=given)
        engine = crew.engines.get(number) or self._start(crew, number, job.rows, given)
        rest = resting_of(crew.family, crew.still[number], rates, job.rows)
        loss = self._work(engine, crew.at_once, job)
        for now, before, who in rest:
            now.copy_(before if who is None else torch.where(who[:, None], before, now))
        return loss

    def _start(self, crew: Crew, number: int, rows: Tensor, given: Mapping[str, Tensor]) -> Engine:
        """Try a crew's models, and find the engine that trains them; the first step of training decides for all."""
        self._try(crew)
        recipe, template = self._recipe(crew, number), id(crew.family.template)
        crew.at_once = crew.at_once or self.clients_at_once or how_many_at_once(recipe, given)
        if template in self._known:  # another step, or clients changed: how to train such models is known
            engine = choose_again(self._known[template][0], recipe, rows, given)
        else:
            names = self.engine_name.split(",")  # one for all families, or one each
            engine = choose(names[self.crews.index(crew) % len(names)], recipe, rows, given, crew.at_once)
        self._known[template] = (engine.name, crew.at_once)
        crew.engines[number] = engine
        return engine

    def _picks(self, crew: Crew, step: Train) -> frozenset[str]:
        """The units of a crew's models that a step trains."""
        units = [unit.name for unit in crew.family.layout.units if not unit.state]
        picked = step.picks(units)
        if not picked:
            raise ValueError(
                f"the method '{self.terms.method.name}' trains none of the units {', '.join(units)} of client "
                f"'{crew.clients[0].name}'; name some that are there"
            )
        return picked

    def _work(self, engine: Engine, step: int, job: Job) -> Tensor:
        """Train the clients of a job, in place, `step` at a time; their mean losses, (k,)."""
        if engine.name != "vectorised":  # the others never hold more than a client, or a small stack, a worker
            step = self.clients_at_once or len(job.rows)
        k = len(job.rows)
        step = -(-k // -(-k // step))  # stacks of about one size
        losses = [engine.train(job.part(at, at + step)) for at in range(0, k, step)]
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def _recipe(self, crew: Crew, number: int) -> Recipe:
        """What the engine of a step is built for."""
        step, training, layout = self.steps[number], self.terms.training, crew.family.layout
        assert isinstance(step, Train)
        samples = crew.samples if step.data == "train" else self._common(crew)
        if step.epochs is not None:
            training = replace(training, epochs=step.epochs)
        picked = self._picks(crew, step)
        crew.still[number] = tuple(unit.name for unit in layout.units if unit.name not in picked)
        trains = frozenset(name for unit in layout.units if unit.name in picked for name in unit.parameters)
        family, apart = crew.family, crew.family.habits.why if crew.family.habits.apart else ""
        return Recipe(
            family.template, layout, samples, training, step.objective, self.device, trains, apart=apart
        )  # fmt: skip

    def _common(self, crew: Crew) -> Samples:
        """The samples that all clients hold, as those of a crew."""
        common = self.terms.common
        if common is None:
            raise ValueError(
                f"the method '{self.terms.method.name}' trains on samples that all clients hold, and there are none; "
                "give the scenario common=(x, y)"
            )
        k = len(crew.clients)
        keys = tuple(key_of(self.terms.seed, client.name, "common") for client in crew.clients)
        return Samples(((common.x, common.y),), (0,) * k, (len(common),) * k, keys).to(self.device)

    def check(self) -> None:
        """Refuse models that do not suit their clients' samples, before any work; shadows of clients have none."""
        for crew in self.crews:
            if crew.clients[0].train.x.numel():
                self._try(crew)

    def _try(self, crew: Crew) -> None:
        if not crew.tried:
            check_model(crew.family, crew.clients, self.terms.classes, self.device)
        crew.tried = True

    @alone
    def fine_tune(self, ids: Sequence[int], rows: Tensor, round_: int) -> Tensor:
        """One more round of training from these rows, (k, width), on a copy; nothing is kept or sent."""
        crew = self.crews[self.home[ids[0]][0]]
        view = self.view(crew, tuple(ids), rows.clone(), None, round_)
        for number, step in enumerate(self.steps):
            if isinstance(step, Train) and step.data == "train" and step.when != "round":
                self._train(crew, number, Job(view.rows, crew.places(tuple(ids)), round_, view.lr), lambda: view)
        return view.rows

    # --- looking -----------------------------------------------------------------------------------------------------

    def view(
        self, crew: Crew, ids: tuple[int, ...], rows: Tensor, down: Down | None, round_: int | None = None,
        installed: bool = True,
    ) -> StackView:  # fmt: skip
        """What a method's client half sees of some clients; `installed`: what was received is in the rows."""
        places = crew.places(ids)
        now = down.round if down is not None else (self.round if round_ is None else round_)

        def tables(split: str) -> Table:
            if split != "train" and not crew.even(self.terms.classes):
                return self._table(crew, split, places)
            whole = self._table(crew, split)
            return whole if crew.everybody(places) else whole.of(torch.tensor(places, device=whole.y.device))

        return StackView(
            family=crew.family,
            ids=ids,
            clients=[crew.clients[at] for at in places],
            round=now,
            rounds=self.terms.training.rounds,
            epochs=self.terms.training.epochs,
            batch=self.terms.training.batch,
            passes=self.passes,
            lr=self.terms.training.rate(now),
            seed=self.terms.seed,
            classes=self.terms.classes,
            rows=rows,
            tables=tables,
            down=down,
            common=self.terms.common,
            public_test=self.terms.public_test,
            vectorised=any(engine.stacks for engine in crew.engines.values()),
            installed=installed,
        )

    def _table(self, crew: Crew, split: str, places: tuple[int, ...] = ()) -> Table:
        """A split of the clients at some places, or of all; the same clients are looked at in every round."""
        if (split, places) not in crew.tables:
            clients = [crew.clients[at] for at in places] or crew.clients
            crew.tables[split, places] = table_of(clients, split, self.terms.public).to(self.device)
        return crew.tables[split, places]

    def looks(self, down: Mapping[tuple[int, ...], Down]) -> list[tuple[StackView, StackView]]:
        """For each family, its clients as they would be after installing (received) and as they are (adapted)."""
        pairs = []
        for ids, message in down.items():
            crew = self.crews[self.home[ids[0]][0]]
            self._try(crew)
            own = crew.rest.take(crew.places(ids)).to(self.device)
            received = own.clone()
            self.install(crew.family, received, message)
            pairs.append((self.view(crew, ids, received, message), self.view(crew, ids, own, message, installed=False)))
        return pairs

    def model(self, number: int, down: Down | None = None) -> nn.Module:
        """A client's personal model: what it has, after installing what is sent to it."""
        index, at = self.home[number]
        crew = self.crews[index]
        row = crew.rest.take([at]).to(self.device)
        if down is not None:
            self.install(crew.family, row, down)
        return crew.family.model(row[0].cpu())

    @property
    def engines(self) -> list[str]:
        """The engine of each family, once chosen."""
        templates = [id(crew.family.template) for crew in self.crews]
        return [self._known[template][0] for template in templates if template in self._known]

    def close(self) -> None:
        """Give back worker processes and captured graphs."""
        for crew in self.crews:
            for engine in crew.engines.values():
                engine.close()
            crew.engines.clear()
