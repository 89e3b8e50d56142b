"""The round loop: choose, receive, install, train, send, merge; and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt._util.plain_values import whole, with_python_settings
from fedquilt._util.randomness import each_of, key_of, some_of
from fedquilt._util.suggest import did_you_mean
from fedquilt._util.turns import one_at_a_time
from fedquilt.attacks import Attack
from fedquilt.core.attacked import AttackedSimulation
from fedquilt.core.backend import Backend
from fedquilt.core.compressed import check as check_compression
from fedquilt.core.evaluation import predict, with_own
from fedquilt.core.guard import guard_of
from fedquilt.core.idle_settings import check_idle
from fedquilt.core.merge_rules import trusted_names, with_server_client
from fedquilt.core.privacy_rules import check_method, check_models, uses
from fedquilt.core.ranked_clients import RankedSimulation
from fedquilt.core.ranked_server import RankedServer
from fedquilt.core.ranks import ranks
from fedquilt.core.secure_round import check, check_time
from fedquilt.core.server import Server
from fedquilt.core.simulation import Simulation
from fedquilt.core.terms import Terms
from fedquilt.core.virtual_time import Answers, make_clock
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import Roster
from fedquilt.interface.method import Method
from fedquilt.interface.passed import Passed, counted
from fedquilt.privacy import Budget, Privacy, found
from fedquilt.readouts import READOUTS, Readout
from fedquilt.results import Evaluation
from fedquilt.scenario import Scenario
from fedquilt.secure import SecureSums
from fedquilt.sharing import Compression, Plan, Rule, Traffic, mean


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
    clock: float | None = None  # virtual seconds since the start, where clients declare what they are made of
    late: tuple[int, ...] = ()  # who took part and was too late
    spent: Callable[[], float] | None = None

    @cached_property
    def traffic(self) -> Traffic:
        """What the round moved, from its plan: counted when somebody asks."""
        return self.moved()

    @cached_property
    def epsilon(self) -> float | None:
        """What privacy has cost up to this round; None where none was asked for."""
        return None if self.spent is None else self.spent()


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
        clients: Backend | None = None,
        attack: Attack | None = None,
        privacy: Privacy | None = None,
        secret: int | None = None,
        secure: SecureSums | None = None,
        everyone: bool = False,
        compress: Compression | None = None,
    ) -> None:
        if not isinstance(method, Method):
            raise TypeError(f"a Federation takes a method made ready, such as methods.FedAvg(), not {method!r}")
        seed, evaluate_every = whole(seed, "seed"), whole(evaluate_every, "evaluate_every")
        clients_at_once = None if clients_at_once is None else whole(clients_at_once, "clients_at_once")
        method, rule = with_python_settings(method), with_python_settings(rule)
        readouts = [with_python_settings(readout) for readout in readouts]
        if evaluate_every < 1:
            raise ValueError(f"evaluate_every={evaluate_every} never looks; give at least 1, or as many as rounds")
        if everyone and clients is not None:
            raise ValueError("clients on devices show their test samples to nobody; try 'everyone' in a simulation")
        scenario = with_server_client(scenario, rule) if clients is None else scenario
        self.scenario, self.method, self.seed, self.evaluate_every = scenario, method, seed, evaluate_every
        self.training = training or scenario.training
        self.device = pick_device(device)
        if (together := ranks()) is not None and self.device.type == "cuda":  # a GPU each
            self.device = torch.device("cuda", together.local % torch.cuda.device_count())
        if together is not None:
            together.on(self.device)
        self.readouts = with_own(method, tuple(readouts) or (READOUTS["received"](), READOUTS["adapted"]()))
        method.check_task(scenario.task)
        for readout in self.readouts:
            readout.check_task(scenario.task)
        check(secure, method, rule, privacy, ranks() is not None, attack is not None)
        check_compression(compress := compress or Compression(), method, privacy, secure)
        privacy, held = self._accounted(privacy, rule), (scenario.common, scenario.public_test)
        self.terms = Terms(
            method, self.training, scenario.classes, seed, *held, privacy, scenario.task, secure, compress, everyone
        )
        self.secret = seed if secret is None else secret  # what participants and noise of privacy are drawn by
        self.attack = None if attack is None else with_python_settings(attack)
        trusted = trusted_names(rule)
        suspects = [number for number, client in enumerate(scenario.clients) if client.name not in trusted]
        self.liars = () if self.attack is None else self.attack.drawn(suspects, seed)
        self.backend: Backend = clients or self._simulated(engine, clients_at_once)
        if privacy is not None:
            check_models(privacy, self.backend.architectures())
        roster = Roster(
            tuple(self.backend.members().values()), scenario.classes, self.training.rounds, seed, scenario.common,
            tuple(scenario.label_names), scenario.public_test,
        )  # fmt: skip
        guard = guard_of(privacy, self.training.share, len(roster), self.secret)
        first, look = self.backend.first_values, self.backend.sent_models
        make: Callable[..., Server] = Server if together is None else partial(RankedServer, together)
        self.server = make(method, roster, first, rule, self.device, look, privacy, guard, secure, compress)
        check_idle(self.server, attack, simulated=clients is None)
        changing = any(client.changes for client in scenario.clients)
        passes = self.backend.passes if isinstance(self.backend, Simulation) else 0
        self.clock = make_clock(self.training, method, self.server, passes, changing) if passes else None
        check_time(secure, self.clock)

    def _accounted(self, privacy: Privacy | None, rule: Rule) -> Privacy | None:
        """The privacy that was asked for, with its noise; what it does not go with is refused."""
        self.budget: Budget | None = None
        if privacy is None:
            return None
        check_method(privacy, self.method, rule, self.training, self.scenario.clients)
        used = uses(privacy, self.training, self.method.local())
        privacy = found(privacy, used, self.training.rounds)
        self.budget = Budget(privacy, used)
        return privacy

    def _simulated(self, engine: str, clients_at_once: int | None) -> Simulation:
        together, who = ranks(), (self.scenario.clients, self.terms, self.device, engine, clients_at_once)
        if together is not None and self.attack is not None:
            raise ValueError("an attack looks at all that liars send, so it is tried in one process; leave --ranks out")
        attacked = None if self.attack is None else partial(AttackedSimulation, self.attack, self.liars)
        make: Callable[..., Simulation] = attacked or Simulation
        simulation = make(*who) if together is None else RankedSimulation(together, *who)
        simulation.check()
        return simulation

    @property
    def simulation(self) -> Simulation:
        """The clients, where they are simulated in this process."""
        if not isinstance(self.backend, Simulation):
            raise ValueError("the clients of this federation are on machines of their own, and so is what they hold")
        return self.backend

    @property
    def round(self) -> int:
        """How many rounds are over."""
        return self.server.round

    def sample_clients(self, round_: int, busy: Set[int] = frozenset()) -> tuple[int, ...]:
        """Who takes part in a round, beside those who are at work still: a function of the seed and the round."""
        clients = len(self.scenario.clients)
        if self.training.sampling == "poisson" and self.training.share < 1:
            chosen = each_of(clients, self.training.share, key_of("participants", self.secret, round_))
        else:
            number = max(1, round(self.training.share * clients)) - len(busy)
            chosen = some_of(clients - len(busy), max(0, number), key_of("participants", self.seed, round_))
        if busy:
            free = [i for i in range(clients) if i not in busy]
            chosen = tuple(free[i] for i in chosen)
        trusted = self.server.merging.trusted  # they are the measure of all others, so they are always there
        return chosen if trusted is None else tuple(sorted({*chosen, *trusted.nonzero()[:, 0].tolist()}))

    def step(self, evaluate: bool = True) -> RoundReport:
        """One round; what the clients scored after it, where `evaluate_every` says so."""
        start = time.perf_counter()
        round_ = self.round + 1
        # training on a CPU seeds the generator that everybody uses there: it is put back
        with one_at_a_time, torch.random.fork_rng(devices=[]) if self.device.type == "cpu" else nullcontext():
            self.backend.turn(self.server, round_)
            scored = round_ - self.backend.late  # the round whose scores come in this one
            due = evaluate and self._due(scored)
            answers = self._exchange(round_, self.readouts if due else ())
            moved = partial(counted, self.server.plan, self.server.sizes, answers.passed, self.server.bytes)
            self.server.merge(answers.ups)
            evaluations = tuple(self.evaluate(last=scored == self.training.rounds)) if due else ()
        return RoundReport(
            round_,
            self.training.rounds,
            self.server.plan,
            moved,
            evaluations,
            tuple(sorted(sum((up.ids for up in answers.ups), ()))),
            time.perf_counter() - start,
            int(self.server.refused.sum()) if due or self.device.type == "cpu" else None,
            None if self.clock is None else self.clock.now,
            answers.late,
            None if self.budget is None else partial(self.budget.epsilon, round_, round_ == self.training.rounds),
        )

    def _exchange(self, round_: int, readouts: Sequence[Readout]) -> Answers:
        """What the clients of a round send, all of it or what is there in time."""
        chosen = self.sample_clients(round_, frozenset() if self.clock is None else self.clock.busy())
        if not chosen and self.training.sampling == "poisson":
            return Answers([], [])
        if self.clock is not None:
            return self.clock.exchange(self.server, self.backend, chosen)
        pairs = self.backend.exchange(self.server, chosen, readouts)
        return Answers([up for _, up in pairs], [Passed.of(down, up) for down, up in pairs])

    def _due(self, round_: int) -> bool:
        """Whether clients are looked at after a round."""
        return round_ == self.training.rounds or (round_ > 0 and round_ % self.evaluate_every == 0)

    def run(self, callbacks: Sequence[Callback] = ()) -> None:
        """All rounds that are left, telling each to the callbacks."""
        while self.round < self.training.rounds:
            report = self.step()
            for callback in callbacks:
                callback(self, report)

    # --- looking -----------------------------------------------------------------------------------------------------

    def evaluate(self, last: bool = False) -> list[Evaluation]:
        """What every client scores with every read-out on the validation and test splits; liars are marked."""
        found = self.backend.evaluate(self.server, self.readouts, last)
        return [replace(evaluation, liars=self.liars) for evaluation in found] if self.liars else found

    def model(self, client: str) -> nn.Module:
        """A client's personal model as an ordinary module."""
        number = self._number(client)
        return self.backend.model(number, self.server.instructions([number]))

    def predict(self, client: str, x: Any, readout: str) -> Tensor:
        """(n,) the classes that a client takes samples (n, ...) for, by one of the read-outs."""
        number = self._number(client)
        chosen = next((made for made in self.readouts if made.name == readout), None)
        if chosen is None:
            raise ValueError(did_you_mean(readout, [made.name for made in self.readouts], "read-out of this run"))
        return predict(self.simulation, self.server, chosen, number, x)

    def _number(self, client: str) -> int:
        """A client's number by its name."""
        number = self._numbers.get(str(client))
        if number is None:
            some = ", ".join(list(self._numbers)[:8]) + ", ..." * (len(self._numbers) > 8)
            raise KeyError(f"there is no client '{client}'; there are {some}")
        return number

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The clients' numbers by their names: listed once, since every client's model is asked for at the end."""
        return {client.name: number for number, client in enumerate(self.scenario.clients)}

    def close(self) -> None:
        """Give back worker processes and captured graphs."""
        self.backend.close()


def pick_device(name: str) -> torch.device:
    """The device of a name; auto is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(did_you_mean(name, ("auto", "cpu", "cuda"), "device")) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU here; take device='cpu' or 'auto'")
    return device
