"""A run: a scenario under a method with a seed, and everything that came of it."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from fedquilt.federation import Callback, Federation, RoundReport
from fedquilt.methods import METHODS, Method
from fedquilt.readouts import READOUTS, Readout, named
from fedquilt.results import Evaluation, Row, summarise
from fedquilt.scenario import Scenario
from fedquilt.sharing import Plan, Rule, mean
from fedquilt.training.settings import Training


def suggest(word: str, known: Iterable[str], what: str) -> str:
    """A sentence for a name that is not known, with the nearest one.

    >>> suggest("fedavgg", ["fedavg", "local"], "method")
    "the method 'fedavgg' is not known; did you mean 'fedavg'?"
    """
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"the {what} '{word}' is not known; " + (f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}")


def make_method(method: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name and settings, or as it is."""
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(suggest(method, METHODS, "method"))
    kind = METHODS[method]
    known = [f.name for f in fields(kind)]
    for key in settings or {}:
        if key not in known:
            raise ValueError(suggest(key, known, f"setting of '{method}'") if known else f"'{method}' has no settings")
    return kind(**(settings or {}))


def make_readouts(readouts: Sequence[str | Readout]) -> tuple[Readout, ...]:
    """Read-outs from their names."""
    made = []
    for readout in readouts:
        found = named(readout) if isinstance(readout, str) else readout
        if found is None:
            raise ValueError(suggest(str(readout), READOUTS, "read-out"))
        made.append(found)
    return tuple(made)


@dataclass
class Run:
    """What a run gave: rows, plans, a summary, and each client's personal model."""

    federation: Federation
    evaluations: list[Evaluation] = field(default_factory=list)
    plans: list[tuple[int, Plan]] = field(default_factory=list)
    bytes_up: list[int] = field(default_factory=list)
    bytes_down: list[int] = field(default_factory=list)
    seconds: float = 0.0
    alone: Run | None = None

    def take(self, federation: Federation, report: RoundReport) -> None:
        """A callback: remember a round."""
        self.evaluations += report.evaluations
        if not self.plans or self.plans[-1][1] != report.plan:
            self.plans.append((report.round, report.plan))
        self.bytes_up.append(report.traffic.total_up)
        self.bytes_down.append(report.traffic.total_down)
        self.seconds += report.seconds

    @property
    def rows(self) -> list[Row]:
        """One row per client, round, read-out and split."""
        return [row for evaluation in self.evaluations for row in evaluation.rows()]

    @property
    def plan(self) -> Plan:
        """The last plan; it prints itself."""
        return self.federation.server.plan

    def model(self, client: str) -> nn.Module:
        """A client's personal model: an ordinary module, ready to use."""
        return self.federation.model(client)

    @property
    def summary(self) -> dict[str, Any]:
        """Mean, spread, worst decile, gain over alone, megabytes and seconds, of the last round on test data."""
        federation = self.federation
        readout = federation.method.readout
        if readout not in {evaluation.readout for evaluation in self.evaluations}:
            readout = federation.readouts[0].name
        alone = self if federation.method.name == "local" else self.alone
        return {
            "scenario": federation.scenario.name,
            "method": federation.method.name,
            "seed": federation.seed,
            "clients": len(federation.scenario.clients),
            "rounds": federation.round,
            **summarise(self.rows, None if alone is None else alone.rows, readout),
            "megabytes_up": sum(self.bytes_up) / 1e6,
            "megabytes_down": sum(self.bytes_down) / 1e6,
            "seconds": self.seconds,
            "engine": "+".join(sorted(set(federation.fleet.engines))),
            "device": str(federation.device),
            "refused_updates": int(federation.server.refused.sum()),
            **federation.method.describe(federation.server.state, federation.server.plan, federation.server.roster),
        }


def run(
    scenario: Scenario,
    method: str | Method,
    rounds: int | None = None,
    seed: int = 0,
    *,
    training: Mapping[str, Any] | Training | None = None,
    settings: Mapping[str, Any] | None = None,
    readouts: Sequence[str | Readout] = ("received", "adapted"),
    device: str = "auto",
    engine: str = "auto",
    clients_at_once: int | None = None,
    merge: Rule = mean,
    evaluate_every: int = 1,
    alone: bool | Run = True,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Run a method on a scenario and give back what came of it.

    `training` overrides the scenario's settings, `settings` are the method's own. With `alone=True` the same clients
    are also trained by themselves, as long and with the same settings, for the gain over alone; a finished run of
    `local` may be given instead.

    >>> import fedquilt as fq
    >>> result = fq.run(fq.scenarios.build("digits", clients=8), "fedavg", rounds=2, engine="sequential", alone=False)
    >>> len(result.rows)                            # 8 clients, 2 rounds, 2 read-outs, 2 splits
    64
    """
    made = make_method(method, settings)
    chosen = make_readouts(readouts)
    how = training if isinstance(training, Training) else scenario.training.but(training or {})
    if rounds is not None:
        how = how.but({"rounds": rounds})
    start = time.perf_counter()
    federation = Federation(
        scenario, made, how, seed, device, engine, clients_at_once, chosen, merge, evaluate_every
    )
    result = Run(federation)
    federation.run([result.take, *callbacks])
    result.seconds = time.perf_counter() - start
    if isinstance(alone, Run):
        result.alone = alone
    elif alone and made.name != "local":
        result.alone = run(
            scenario, "local", seed=seed, training=how, device=device, engine=engine, readouts=("received",),
            clients_at_once=clients_at_once, evaluate_every=how.rounds, alone=False,
        )  # fmt: skip
    return result
