"""A run: a scenario under a method with a seed, and everything that came of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from fedquilt import scenarios
from fedquilt.addresses import check_no_file_is_loading
from fedquilt.checkpoint import Damaged
from fedquilt.disk import METRICS, RunFolder
from fedquilt.federation import Callback, Federation, RoundReport
from fedquilt.methods import Local, Method
from fedquilt.methods.find import find
from fedquilt.names import unknown
from fedquilt.readouts import READOUTS, Readout, named
from fedquilt.results import Evaluation, Row, final, summarise
from fedquilt.runfile import method_from, rule_from, rule_to, training_from
from fedquilt.scenario import Scenario
from fedquilt.scenarios.own import from_file, split_address
from fedquilt.sharing import Plan, Rule, mean, pick
from fedquilt.toml import values_of
from fedquilt.training.parallel import cores
from fedquilt.training.settings import Training
from fedquilt.trust import check_file
from fedquilt.values import python, whole, with_python_settings

OPTIONS = ("engine", "clients_at_once", "merge", "evaluate_every", "checkpoint_every", "alone")


def make_method(method: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name, or its address such as `path/to/file.py:Class`, and settings; or as it is."""
    if isinstance(method, Method):
        if settings:
            given = f"{type(method).__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"
            raise ValueError(f"settings go with the name of a method; with a method of your own, say {given}")
        return method
    other: object = method
    if not isinstance(other, str):
        hint = f"as in {other.__name__}()" if isinstance(other, type) else f"not a {type(other).__name__}"
        raise TypeError(f"a method is a name such as 'fedavg' or a method made ready, {hint}")
    kind = find(method)
    known = {f.name: f for f in fields(kind) if f.init}
    chosen = dict(settings or {})
    for key in chosen:
        if key not in known:
            told = unknown(key, known, f"setting of {kind.name}") if known else f"'{kind.name}' has no settings"
            raise ValueError(told)
    for key, setting in known.items():
        if key not in chosen and setting.default is MISSING and setting.default_factory is MISSING:
            raise ValueError(f"the method '{kind.name}' needs its setting '{key}'; give it: --set {key}=...")
    return kind(**chosen)


def make_readouts(readouts: str | Readout | Sequence[str | Readout]) -> tuple[Readout, ...]:
    """Read-outs from their names."""
    made = []
    for readout in [readouts] if isinstance(readouts, str | Readout) else readouts:
        found = named(readout) if isinstance(readout, str) else readout
        if found is None:
            raise ValueError(unknown(str(readout), READOUTS, "read-out"))
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
    folder: Path | None = None
    earlier: list[Row] = field(default_factory=list)  # rows of the rounds before the run was resumed
    _last: dict[tuple[str, str], tuple[int, list[Row]]] = field(default_factory=dict, init=False, repr=False)

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
        return self.earlier + [row for evaluation in self.evaluations for row in evaluation.rows()]

    def last_rows(self, readout: str, split: str = "test") -> list[Row]:
        """Each client's last row with a read-out on a split, in the order of the clients.

        It looks back only as far as it has to, and remembers what it found until there is a new evaluation.
        """
        known = self._last.get((readout, split))
        if known is None or known[0] != len(self.evaluations):
            clients = self.federation.scenario.clients
            # of clients on devices of their own it is not known here who has samples
            missing = {c.name for c in clients if len(getattr(c, split))} or {c.name for c in clients}
            found: dict[str, Row] = {}
            for evaluation in reversed(self.evaluations):
                if missing and (evaluation.readout, evaluation.split) == (readout, split):
                    found |= {row["client"]: row for row in evaluation.rows() if row["client"] in missing}
                    missing -= found.keys()
            if missing:
                found = final(self.earlier, readout, split) | found
            known = (len(self.evaluations), [found[client.name] for client in clients if client.name in found])
            self._last[readout, split] = known
        return known[1]

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
        federation, server = self.federation, self.federation.server
        readout = federation.method.readout
        if readout not in {made.name for made in federation.readouts}:
            readout = federation.readouts[0].name
        alone = self if federation.method.name == "local" else self.alone
        bar = None if alone is None else alone.last_rows("received") + alone.last_rows("adapted")
        return {
            "scenario": federation.scenario.name,
            "method": federation.method.name,
            "seed": federation.seed,
            "clients": len(federation.scenario.clients),
            "rounds": federation.round,
            **summarise(self.last_rows(readout), bar, readout),
            "megabytes_up": sum(self.bytes_up) / 1e6,
            "megabytes_down": sum(self.bytes_down) / 1e6,
            "seconds": self.seconds,
            "engine": "+".join(sorted(set(federation.fleet.engines))),
            "device": str(federation.device),
            "refused_updates": int(server.refused.sum()),
            **python(dict(federation.method.describe(server.state, server.plan, server.roster))),
        }


def run(
    scenario: Scenario,
    method: str | Method,
    rounds: int | None = None,
    seed: int = 0,
    *,
    training: Mapping[str, Any] | Training | None = None,
    settings: Mapping[str, Any] | None = None,
    readouts: str | Readout | Sequence[str | Readout] = ("received", "adapted"),
    device: str = "auto",
    engine: str = "auto",
    clients_at_once: int | None = None,
    merge: str | Rule = mean,
    evaluate_every: int = 1,
    alone: bool | Run = True,
    callbacks: Sequence[Callback] = (),
    out: str | Path | None = None,
    checkpoint_every: int = 5,
) -> Run:
    """Run a method on a scenario and give back what came of it.

    `method` is a name, an address such as `path/to/file.py:Class`, or a method made ready. `training` overrides the
    scenario's settings, `settings` are the method's own; `merge` is a name or a rule. With `alone=True` the same
    clients are also trained by themselves, as long and with the same settings, for the gain over alone; a finished run
    of `local` may be given instead. With `out` the run is kept in a directory as it goes, and can be resumed from it.

    >>> import fedquilt as fq
    >>> result = fq.run(fq.scenarios.build("digits", clients=8), "fedavg", rounds=2, engine="sequential", alone=False)
    >>> len(result.rows)                            # 8 clients, 2 rounds, 2 read-outs, 2 splits
    64
    """
    check_no_file_is_loading()
    if not isinstance(scenario, Scenario):
        raise TypeError(f"a run is of a Scenario, not of a {type(scenario).__name__}; see fedquilt.scenarios.build")
    made = make_method(method, settings)
    chosen = make_readouts(readouts)
    rule = pick(merge) if isinstance(merge, str) else with_python_settings(merge)
    alone = python(alone)
    if not isinstance(alone, bool | Run):
        raise TypeError(f"alone={alone!r}: give True, False or a finished run of 'local'")
    if isinstance(alone, Run) and alone.federation.method.name != "local":
        raise ValueError(f"alone is a run of '{alone.federation.method.name}'; give one of 'local', or True")
    how = training if isinstance(training, Training) else scenario.training.but(training or {})
    if rounds is not None:
        how = how.but({"rounds": rounds})
    checkpoint_every = whole(checkpoint_every, "checkpoint_every")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} keeps nothing; give at least 1")
    federation = Federation(scenario, made, how, seed, device, engine, clients_at_once, chosen, rule, evaluate_every)
    result = Run(federation)
    result.alone = alone if isinstance(alone, Run) else None
    clients_at_once, evaluate_every = federation.fleet.clients_at_once, federation.evaluate_every
    kept = rule_to(rule) if out is not None else {}
    options = dict(
        zip(OPTIONS, (engine, clients_at_once, kept, evaluate_every, checkpoint_every, alone is True), strict=True)
    )
    folder = None
    if out is not None:
        folder = RunFolder(out)
        folder.start(federation, options)
        result.folder = folder.folder
    return _finish(result, folder, options, callbacks)


def resume(
    folder: str | Path, scenario: Scenario | None = None, callbacks: Sequence[Callback] = (), *, trust: bool = False
) -> Run:  # fmt: skip
    """Go on with a run on disk that was interrupted, to the same bits as if it had not been.

    The scenario is built again as `run.toml` says; give it where it was made by code of your own. Code outside of the
    library that a run directory names is run only if you ran it on this machine before, or say `trust=True`.
    """
    place = RunFolder(folder)
    known = place.read_settings()
    if place.finished:
        raise ValueError(f"the run in '{folder}' is finished; look at it with: fedquilt report {folder}")
    with _threads(known.get("threads")):
        federation = rebuild(known, scenario or scenario_of(known, trust), trust)
        place.lock.take()
        try:
            kept = place.restore(federation)
            result = Run(federation, plans=kept.plans, folder=place.folder, earlier=kept.rows)
            result.seconds = kept.more.get("seconds", 0.0)
            result.bytes_up, result.bytes_down = [up for up, _ in kept.moved], [down for _, down in kept.moved]
            return _finish(result, place, {key: known.get(key) for key in OPTIONS}, callbacks)
        finally:
            place.lock.release()


def scenario_of(known: Mapping[str, Any], trust: bool = False) -> Scenario:
    """The scenario of a run, built again as its `run.toml` says; by a file as far as `fedquilt.trust` allows it."""
    origin = known["scenario"]
    settings = values_of(origin.get("settings", {}))
    if "name" in origin:
        return scenarios.build(origin["name"], seed=origin["seed"], **settings)
    if "file" in origin:
        place = split_address(origin["file"])
        if place is not None:
            check_file(place[0], trust)
        return from_file(origin["file"], origin["seed"], settings)
    raise ValueError(
        f"the run of '{origin.get('title', 'a scenario')}' does not say how its clients were made; give them: "
        "resume(folder, scenario=...)"
    )


def rebuild(known: Mapping[str, Any], scenario: Scenario, trust: bool = False) -> Federation:
    """The federation of a run before its first round, as its `run.toml` says."""
    try:
        return Federation(
            scenario,
            method_from(known["method"], trust),
            training_from(known["training"]),
            known["seed"],
            known["device"],
            known["engine"],
            known.get("clients_at_once"),
            make_readouts(known["readouts"]),
            rule_from(known["merge"]),
            known["evaluate_every"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"run.toml does not say what it should ({error!r}); it was left as it is") from error


def _finish(result: Run, folder: RunFolder | None, options: Mapping[str, Any], callbacks: Sequence[Callback]) -> Run:
    """Run the rounds that are left, and the clients alone where that is wanted; write down what there is to write."""
    federation = result.federation
    start, before = time.perf_counter(), result.seconds

    def keep(federation: Federation, report: RoundReport) -> None:
        result.seconds = before + time.perf_counter() - start
        if folder is not None:
            folder.round(federation, report)
            if report.round == 1:
                folder.settings(federation, options)  # now with the engines that were chosen
            if report.round % options["checkpoint_every"] == 0 or report.round == report.rounds:
                folder.checkpoint(federation, {"seconds": result.seconds})

    def end(federation: Federation, report: RoundReport) -> None:
        if stop:
            if folder is not None:  # here, not in `keep`: a Ctrl-C may come during any callback
                folder.checkpoint(federation, {"seconds": result.seconds})
            raise KeyboardInterrupt

    try:
        with first_ctrl_c(folder is not None) as stop:
            federation.run([result.take, keep, *callbacks, end])
        last = [e for e in result.evaluations if e.round == federation.round] or federation.evaluate(last=True)
        if stop:
            raise KeyboardInterrupt
        if options["alone"] and federation.method.name != "local" and result.alone is None:
            result.alone = _alone(federation, folder, options)
        if folder is not None:
            folder.finish(federation, result.summary, last)
    finally:
        federation.close()
        if folder is not None:
            folder.lock.release()
    return result


def _alone(federation: Federation, folder: RunFolder | None, options: Mapping[str, Any]) -> Run:
    """The same clients, trained by themselves as long and in the same way."""
    out = None if folder is None else folder.folder / "alone"
    if out is not None and (out / "run.toml").is_file() and not RunFolder(out).finished:
        return resume(out, federation.scenario)
    if out is not None and RunFolder(out).finished:
        done = RunFolder(out)
        empty = Federation(federation.scenario, Local(), federation.training, federation.seed, str(federation.device))
        return Run(empty, earlier=done.lines(METRICS), folder=done.folder)
    return run(
        federation.scenario, "local", seed=federation.seed, training=federation.training, alone=False, out=out,
        device=str(federation.device), engine=options["engine"], readouts=("received",),
        clients_at_once=options["clients_at_once"], evaluate_every=federation.training.rounds,
        checkpoint_every=options["checkpoint_every"],
    )  # fmt: skip


@contextmanager
def first_ctrl_c(wanted: bool) -> Iterator[list[int]]:
    """While this holds, the first Ctrl-C is only noted, so that a round can end and be kept; a second ends at once."""
    stop: list[int] = []
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: FrameType | None) -> None:
        stop.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """As many threads as the run began with, where there are so many cores: sums may depend on it in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(number or before, max(cores(), before)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
