"""A client that was not there joins a finished run: it gets its circles and a personal model, nobody else trains.

What happens, step by step: the newcomer declares itself; the method says what it may have before it was heard; it
trains with that (with nothing, where nothing is shared with strangers) and shows what came of it; the method gives it
its circles (`Method.welcome`: by trait, by affinity, by routing, by labels); it visits a few times, that is, it takes
part in rounds whose uploads the others never see; and where asked for it fine-tunes. Beside all this the same client is
trained alone, at least as long: the bar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedquilt._util.files import write_text
from fedquilt._util.metric import ACCURACY, Metric
from fedquilt._util.plain_values import whole
from fedquilt.client import Client
from fedquilt.core.evaluation import look_at, measure
from fedquilt.core.federation import Federation
from fedquilt.core.server import Server
from fedquilt.core.simulation import Simulation
from fedquilt.core.terms import Terms
from fedquilt.interface.messages import Instructions, Update, Updates
from fedquilt.methods import Local
from fedquilt.readouts import Adapted, EvaluationContext, FineTuned, Readout, Received
from fedquilt.results import Evaluation
from fedquilt.runs.checkpoint import restore_federation, write_tensors
from fedquilt.runs.folder import RunFolder
from fedquilt.runs.newcomers import check, hold_out, read_client
from fedquilt.runs.rebuilding import rebuild, scenario_of
from fedquilt.scenario import Scenario
from fedquilt.sharing import MixedUnit, Plan


@dataclass(frozen=True)
class Onboarded:
    """What a newcomer has: the plan with it as the last client, its personal model, and its scores.

    `scores[name][split]` is the accuracy (or what else leads, see `metric`) of "received" (its circles' values and its
    own private units), "adapted" (after its last training), "fine-tuned" (where asked for) and "alone". `personal`
    names the one that `model` is.
    """

    name: str
    plan: Plan
    circles: Mapping[str, tuple[str, ...]]  # by unit, with whom it is shared; nobody: private
    model: nn.Module
    personal: str
    scores: Mapping[str, Mapping[str, float]]
    rounds: int  # of local training it took
    rounds_alone: int
    metric: Metric = ACCURACY

    @property
    def gain(self) -> float:
        """How much better its personal model is on its test data than the same client alone: above 0 is better."""
        return self.metric.gain(self.scores[self.personal]["test"], self.scores["alone"]["test"])

    @property
    def better(self) -> bool:
        """Whether joining was better than staying alone."""
        return self.gain > 0

    def save(self, folder: str | Path) -> Path:
        """Keep its model and what is known of it in a directory."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        write_tensors(place / "model.safetensors", self.model.state_dict())
        told = {
            "client": self.name, "personal": self.personal, "scores": self.scores, "gain": self.gain,
            "rounds": self.rounds, "rounds_alone": self.rounds_alone,
            "circles": {unit: list(peers) for unit, peers in self.circles.items()},
        }  # fmt: skip
        write_text(place / "onboarded.json", json.dumps(told, indent=1) + "\n")
        return place


def onboard(
    folder: str | Path,
    newcomer: Client | str | Path,
    *,
    traits: Mapping[str, str] | None = None,
    visits: int = 5,
    fine_tune: int = 0,
    scenario: Scenario | None = None,
    trust: bool = False,
) -> Onboarded:
    """Let a client join a finished run. The run's directory and its other clients stay as they are.

    `newcomer` is a client, or a file of its data: `x_train, y_train` and, where there are, `x_validation, y_validation,
    x_test, y_test`; or `x, y`, which are split. A file's client has the model of the run's client that is most like it.
    `visits` rounds it takes part without being merged, `fine_tune` further ones it trains by itself. `scenario` is
    needed where the run's was made by code of your own, `trust=True` where the run directory names code that you did
    not run on this machine before.

    >>> import tempfile
    >>> import fedquilt as fq
    >>> everyone = fq.scenarios.build("digits", clients=9)
    >>> others = fq.Scenario("others", everyone.clients[:-1], everyone.training, label_names=everyone.label_names)
    >>> out = tempfile.mkdtemp()
    >>> _ = fq.run(others, "modfl", rounds=2, alone=False, engine="sequential", out=out)
    >>> joined = fq.onboard(out, everyone.clients[-1], visits=1, scenario=others)
    >>> joined.circles["configuration"]                                # those with the same sensor
    ('gen1-north-1', 'gen1-east-1', 'gen1-south-1', 'gen1-west-1')
    """
    visits, fine_tune = whole(visits, "visits"), whole(fine_tune, "fine_tune")
    if visits < 0 or fine_tune < 0:
        raise ValueError(f"visits={visits}, fine_tune={fine_tune}: give numbers of rounds, 0 or more")
    federation, settled = finished(folder, scenario, trust)
    client = newcomer if isinstance(newcomer, Client) else read_client(newcomer, federation, traits)
    if isinstance(newcomer, Client) and traits is not None:
        raise ValueError(f"client '{client.name}' has traits of its own; give traits only with a file")
    return join(client, federation, settled, visits, fine_tune)


def join(client: Client, federation: Federation, settled: int, visits: int = 5, fine_tune: int = 0) -> Onboarded:
    """Let a client join a federation whose rounds are over; its plan last changed in the round `settled`."""
    client = federation.scenario.task.take(client)
    check(client, federation)
    guest = _Guest(client, federation)
    guest.introduce(settled)
    for _ in range(visits):
        guest.visit()
    rows = guest.fine_tuned(fine_tune) if fine_tune else None
    scores, model = guest.measured(rows)
    rounds_alone = max(federation.training.rounds, guest.rounds + fine_tune)
    scores["alone"] = alone(client, federation, rounds_alone)
    personal = "fine-tuned" if fine_tune else "received"
    rounds, metric = guest.rounds + fine_tune, federation.scenario.task.metric
    return Onboarded(
        client.name, guest.server.plan, guest.circles(), model, personal, scores, rounds, rounds_alone, metric
    )


def finished(folder: str | Path, scenario: Scenario | None, trust: bool = False) -> tuple[Federation, int]:
    """The federation of a finished run as it was after its last round, and the round in which its plan last changed."""
    place = RunFolder(folder)
    known = place.read_settings()
    if not place.finished:
        raise ValueError(f"the run in '{folder}' is not finished; go on with it first: fedquilt resume {folder}")
    made, _ = hold_out(scenario or scenario_of(known, trust), known.get("unseen"))
    federation = rebuild({**known, "engine": "sequential"}, made, trust)
    kept = place.look(federation)
    if kept.checkpoint is None:
        raise ValueError(f"the run in '{folder}' has no checkpoint, so nobody can join it; run it again")
    restore_federation(federation, *kept.checkpoint)
    return federation, kept.plans[-1][0]


class _Guest:
    """A newcomer at its own place, and the server that it talks to."""

    def __init__(self, client: Client, federation: Federation) -> None:
        scenario, self.federation = federation.scenario, federation
        self.number = len(scenario.clients)
        terms = Terms(
            federation.method, federation.training, scenario.classes, federation.seed, scenario.common,
            scenario.public_test, task=scenario.task,
        )  # fmt: skip
        self.simulation = Simulation([client], terms, federation.device, "sequential", numbers=[self.number])
        self.server = self._welcomed(Updates(federation.round, ()))
        self.rounds = 0

    def introduce(self, settled: int) -> None:
        """Train with what strangers get, then be given circles.

        Where that is nothing, a newcomer is judged by its model, and that has to be of the age that the others' were
        when they were judged: until their plan had `settled`.
        """
        stranger = not self.server.instructions([self.number]).blocks
        rounds = settled if stranger else 1
        first = 0 if stranger else self.federation.round  # from scratch, or where the others are
        for at in range(1, rounds + 1):
            up = self._round(first + at, everything=at == rounds)
        known = self.federation.server
        shown = Updates(self.federation.round, (up,), self.simulation.sent_models, known.held, known.copies)
        self.server = self._welcomed(shown)

    def visit(self) -> None:
        """A round of the federation as it would be now, of which the others hear nothing."""
        self._round(self.federation.round + 1 + self.rounds)

    def fine_tuned(self, rounds: int) -> Tensor:
        """(1, width) trained on from what it has after installing what it receives."""
        (pair,) = self.simulation.looks({(self.number,): self._down()})
        rows = pair[0].rows
        for at in range(1, rounds + 1):
            rows = self.simulation.fine_tune((self.number,), rows, self.federation.round + self.rounds + at)
        return rows

    def measured(self, rows: Tensor | None) -> tuple[dict[str, dict[str, float]], nn.Module]:
        """Its scores, and its personal model: of the rows given, else what it has after installing what it receives."""
        look = look_at(self.simulation, self._down(), last=True)
        readouts: list[Readout] = [Received(), Adapted()]
        if rows is not None:
            readouts.append(FineTuned())
            look.rows(FineTuned.kind, lambda: rows)
        personal = look.received.rows if rows is None else rows
        return _scores(look, readouts), self.simulation.family_states[0].family.model(personal[0].cpu())

    def circles(self) -> dict[str, tuple[str, ...]]:
        """With whom it shares each of its units."""
        names, plan = self.server.roster.names, self.server.plan
        found = {}
        for unit in self.server.roster.members[-1].units:
            shared = plan[unit]
            if isinstance(shared, MixedUnit):
                peers = shared.matrix[-1] > 0
            else:
                peers = (shared.circle == shared.circle[-1]) & (shared.circle >= 0)
            found[unit] = tuple(names[i] for i in peers.nonzero()[:, 0].tolist() if i != self.number)
        return found

    def _welcomed(self, sent: Updates) -> Server:
        """A copy of the run's server with the newcomer on it; `sent` is what it has to show."""
        run = self.federation.server
        server = copy(run)
        server.all_values = [
            replace(circle_values, value=circle_values.value.clone(), known=circle_values.known.clone())
            for circle_values in run.all_values
        ]
        server.welcome(self.simulation.members()[self.number], sent)
        return server

    def _round(self, round_: int, everything: bool = False) -> Update:
        down = replace(self._down(), round=round_)
        if everything:  # its whole model is looked at, as that of a client asked for everything is
            units = self.simulation.family_states[0].family.layout.units
            down = replace(down, send={unit.name: torch.ones(1, dtype=torch.bool) for unit in units})
        self.rounds += 1
        return self.simulation.run(down)

    def _down(self) -> Instructions:
        return self.server.instructions([self.number])


def alone(client: Client, federation: Federation, rounds: int) -> dict[str, float]:
    """The same client, trained by itself for so many rounds: its scores on its validation and test data."""
    scenario = federation.scenario
    terms = Terms(Local(), federation.training, scenario.classes, federation.seed, task=scenario.task)
    simulation = Simulation([client], terms, federation.device, "sequential")
    for at in range(1, rounds + 1):
        simulation.run(Instructions(at, (0,), (), (), {}))
    look = look_at(simulation, Instructions(rounds + 1, (0,), (), (), {}))
    return _scores(look, [Adapted()])[Adapted.kind]


def _scores(look: EvaluationContext, readouts: Sequence[Readout]) -> dict[str, dict[str, float]]:
    """The leading metric, accuracy say, of a single client by read-out and split."""
    scores: dict[str, dict[str, float]] = {}
    for (name, split), found in measure(look, readouts).items():
        losses, own = (None if part is None else part.cpu() for part in (found.losses, found.own))
        seen = Evaluation(0, name, split, ("newcomer",), found.counts.cpu(), losses, None, look.task, own)
        scores.setdefault(name, {})[split] = seen.score
    return scores
