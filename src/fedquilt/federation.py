"""The round loop: choose, receive, install, train, send, merge; and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fedquilt.alone import alone
from fedquilt.evaluation import counts_of, look_at
from fedquilt.fleet import Fleet
from fedquilt.messages import Down, Passed, Roster, Updates, counted
from fedquilt.methods.base import Method
from fedquilt.names import unknown
from fedquilt.readouts import READOUTS, Readout, named
from fedquilt.results import Evaluation
from fedquilt.scenario import Scenario
from fedquilt.server import Server
from fedquilt.sharing import Plan, Rule, Traffic, mean
from fedquilt.terms import Terms
from fedquilt.training.batches import key_of, some_of
from fedquilt.training.settings import Training
from fedquilt.values import whole, with_python_settings
from fedquilt.view import map_rows


@dataclass(frozen=True)
class RoundReport:
    """What a finished round was: handed to callbacks."""

    round: int
    rounds: int
    plan: Plan
    moved: Callable[[], Traffic]
    evaluations: tuple[Evaluation, ...]
    participants: tuple[int, ...]
    seconds: float
    refused: int | None  # updates left out so far; None where nobody looked: it would make a GPU wait

    @cached_property
    def traffic(self) -> Traffic:
        """What the round moved, from its plan: counted when somebody asks."""
        return self.moved()


Callback = Callable[["Federation", RoundReport], None]


class Federation:
    """A scenario under a method: `step()` runs one round, `run()` all of them.

    >>> import fedquilt as fq
    >>> federation = Federation(fq.scenarios.build("digits", clients=8), fq.methods.FedAvg(), engine="sequential")
    >>> federation.step().round
    1
    """

    def __init__(
        self,
        scenario: Scenario,
        method: Method,
        training: Training | None = None,
        seed: int = 0,
        device: str = "auto",
        engine: str = "auto",
        clients_at_once: int | None = None,
        readouts: Sequence[Readout] = (),
        rule: Rule = mean,
        evaluate_every: int = 1,
    ) -> None:
        if not isinstance(method, Method):
            raise TypeError(f"a Federation takes a method made ready, such as methods.FedAvg(), not {method!r}")
        seed, evaluate_every = whole(seed, "seed"), whole(evaluate_every, "evaluate_every")
        clients_at_once = None if clients_at_once is None else whole(clients_at_once, "clients_at_once")
        method, rule = with_python_settings(method), with_python_settings(rule)
        readouts = [with_python_settings(readout) for readout in readouts]
        if evaluate_every < 1:
            raise ValueError(f"evaluate_every={evaluate_every} never looks; give at least 1, or as many as rounds")
        self.scenario, self.method, self.seed = scenario, method, seed
        self.training = training or scenario.training
        self.device = pick_device(device)
        self.readouts = _with_own(method, tuple(readouts) or (READOUTS["received"](), READOUTS["adapted"]()))
        self.evaluate_every = evaluate_every
        terms = Terms(method, self.training, scenario.classes, seed, scenario.common, scenario.public_test)
        self.fleet = Fleet(scenario.clients, terms, self.device, engine, clients_at_once)
        self.fleet.check()
        members = tuple(self.fleet.members().values())
        roster = Roster(
            members, scenario.classes, self.training.rounds, seed, scenario.common, tuple(scenario.label_names),
            scenario.public_test,
        )  # fmt: skip
        first = self.fleet.first_values
        self.server = Server(method, roster, first, rule, self.device, self.look_at_models)
        self.memory: dict[tuple[int, ...], dict[str, Tensor]] = {}

    @property
    def round(self) -> int:
        """How many rounds are over."""
        return self.server.round

    def choose(self, round_: int) -> tuple[int, ...]:
        """Who takes part in a round: a function of the seed and the round alone."""
        clients = len(self.scenario.clients)
        if self.training.share == 1:
            return tuple(range(clients))
        number = max(1, round(self.training.share * clients))
        return some_of(clients, number, key_of("participants", self.seed, round_))

    def step(self, evaluate: bool = True) -> RoundReport:
        """One round; what the clients scored after it, where `evaluate_every` says so."""
        start = time.perf_counter()
        round_ = self.round + 1
        # training on a CPU seeds the generator that everybody uses there: it is put back
        with alone, torch.random.fork_rng(devices=[]) if self.device.type == "cpu" else nullcontext():
            changed = self.fleet.changes(round_)
            if changed:
                self.server.declare(changed)
            chosen = self.choose(round_)
            downs = [self.server.down(ids) for ids in self.fleet.families(chosen)]
            ups = [self.fleet.run(down) for down in downs]
            passed = [Passed.of(*pair) for pair in zip(downs, ups, strict=True)]
            moved = partial(counted, self.server.plan, self.server.sizes, passed)
            self.server.merge(ups)
            last = round_ == self.training.rounds
            due = evaluate and (last or round_ % self.evaluate_every == 0)
            evaluations = tuple(self.evaluate(last)) if due else ()
        return RoundReport(
            round_,
            self.training.rounds,
            self.server.plan,
            moved,
            evaluations,
            chosen,
            time.perf_counter() - start,
            int(self.server.refused.sum()) if due or self.device.type == "cpu" else None,
        )

    def run(self, callbacks: Sequence[Callback] = ()) -> None:
        """All rounds that are left, telling each to the callbacks."""
        while self.round < self.training.rounds:
            report = self.step()
            for callback in callbacks:
                callback(self, report)

    # --- looking -----------------------------------------------------------------------------------------------------

    def downs(self) -> dict[tuple[int, ...], Down]:
        """What every client would receive now, family by family and not more at once than is trained at once."""
        groups = {}
        for crew in self.fleet.crews:
            step = crew.at_once or self.fleet.clients_at_once or len(crew.family.ids)
            for places in crew.groups(step, self.scenario.classes):
                ids = tuple(crew.family.ids[place] for place in places)
                groups[ids] = self.server.down(ids)
        return groups

    def evaluate(self, last: bool = False) -> list[Evaluation]:
        """Every client's counts with every read-out on the validation and test splits."""
        names = tuple(client.name for client in self.scenario.clients)
        counts: dict[tuple[str, str], list[Tensor]] = {}
        order: list[int] = []
        for ids, down in self.downs().items():
            look = look_at(self.fleet, down, self.memory.setdefault(ids, {}), last)
            for which, found in counts_of(look, self.readouts).items():
                counts.setdefault(which, []).append(found.cpu())
            order += ids
        place = torch.tensor(order).argsort()  # clients came family by family
        return [
            Evaluation(self.round, readout, split, names, torch.cat(parts).index_select(0, place).coalesce())
            for (readout, split), parts in counts.items()
        ]

    def model(self, client: str) -> nn.Module:
        """A client's personal model as an ordinary module."""
        number = self._numbers.get(str(client))
        if number is None:
            some = ", ".join(list(self._numbers)[:8]) + ", ..." * (len(self._numbers) > 8)
            raise KeyError(f"there is no client '{client}'; there are {some}")
        return self.fleet.model(number, self.server.down([number]))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The clients' numbers by their names: listed once, since every client's model is asked for at the end."""
        return {client.name: number for number, client in enumerate(self.scenario.clients)}

    def look_at_models(self, sent: Updates, x: Tensor) -> tuple[Tensor, Tensor]:
        """Class probabilities of the whole models that were sent, on samples of the server's."""
        ids, found, here = [], [], x.to(self.device)
        for up in sent.ups:
            crew = next(crew for crew in self.fleet.crews if up.ids[0] in crew.family.ids)
            family = crew.family
            parts = {unit.name: up.part([unit.name]) for unit in family.layout.units}
            senders = [set() if part is None else set(part[0].tolist()) for part in parts.values()]
            whole = [i for i in up.ids if all(i in some for some in senders)]
            if not whole:
                continue
            rows = crew.rest.started(crew.places(tuple(whole))).to(self.device)  # what stays home is as it was built
            for unit, part in parts.items():
                assert part is not None
                place = {i: at for at, i in enumerate(part[0].tolist())}
                index = torch.tensor([place[i] for i in whole], device=part[1].device)
                for own, value in family.layout.pieces(rows, part[1][index], unit):
                    own.copy_(value)
            ids.append(torch.tensor(whole))
            try:
                outputs = map_rows(family, lambda call: call(here).softmax(1), rows, stacked=rows.is_cuda)
            except RuntimeError as error:
                name = self.server.roster.names[whole[0]]
                raise ValueError(
                    f"the model of client '{name}' cannot be run on the server's samples of "
                    f"shape {tuple(x.shape[1:])} ({error}); give the scenario common samples that fit all models"
                ) from error
            # a class that a model does not know has the probability 0 there
            found.append(nn.functional.pad(outputs, (0, self.scenario.classes - outputs.shape[2])))
        if not ids:
            raise ValueError(f"in round {sent.round} nobody sent a whole model; ask for all units in the plan before")
        return torch.cat(ids), torch.cat(found)

    def close(self) -> None:
        """Give back worker processes and captured graphs."""
        self.fleet.close()


def pick_device(name: str) -> torch.device:
    """The device of a name; auto is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(unknown(name, ("auto", "cpu", "cuda"), "device")) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU here; take device='cpu' or 'auto'")
    return device


def _with_own(method: Method, readouts: tuple[Readout, ...]) -> tuple[Readout, ...]:
    """Read-outs, and the one that results of a method are reported with, where that is not what all methods have."""
    if method.readout == Method.readout or method.readout in {readout.name for readout in readouts}:
        return readouts
    own = named(method.readout)
    if own is None:
        raise ValueError(f"the method '{method.name}': {unknown(method.readout, READOUTS, 'read-out')}")
    return (*readouts, own)
