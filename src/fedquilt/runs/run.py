"""Running: a scenario under a method with a seed, from the first round or on from where it ended."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedquilt import attacks
from fedquilt._util.addresses import check_no_file_is_loading
from fedquilt._util.plain_values import python, whole, with_python_settings
from fedquilt.attacks import Attack
from fedquilt.client import Client
from fedquilt.core.federation import Callback, Federation, RoundReport, pick_device
from fedquilt.core.ranks import anywhere, as_first
from fedquilt.engines.settings import Training
from fedquilt.engines.threads import as_begun, choose_threads, threads_of_a_run
from fedquilt.methods import Local, Method
from fedquilt.privacy import Privacy
from fedquilt.readouts import Readout
from fedquilt.runs.ctrl_c import first_ctrl_c
from fedquilt.runs.folder import METRICS, RunFolder
from fedquilt.runs.newcomers import hold_out
from fedquilt.runs.other_ranks import folder_of, shards_of
from fedquilt.runs.rebuilding import make_method, make_readouts, options_of, rebuild, scenario_of
from fedquilt.runs.result import Run
from fedquilt.runs.rule_texts import rule_to
from fedquilt.runs.unseen import let_join
from fedquilt.scenario import Scenario
from fedquilt.secure import SecureSums
from fedquilt.sharing import Compression, Rule, mean, pick

OPTIONS = ("engine", "clients_at_once", "merge", "evaluate_every", "checkpoint_every", "alone", "unseen")


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
    threads: int | None = None,
    merge: str | Rule = mean,
    attack: str | Attack | None = None,
    privacy: Privacy | None = None,
    secure: bool | SecureSums = False,
    compress: str | Compression | None = None,
    evaluate_every: int = 1,
    everyone: bool = False,
    unseen: int = 0,
    alone: bool | Run = True,
    callbacks: Sequence[Callback] = (),
    out: str | Path | None = None,
    checkpoint_every: int = 5,
) -> Run:
    """Run a method on a scenario and give back what came of it.

    `method` is a name, an address such as `path/to/file.py:Class`, or a method made ready. `training` overrides the
    scenario's settings, `settings` are the method's own; `merge` is a name or a rule, `attack` a name or an attack, by
    which some clients lie; `privacy` is a promise such as `fedquilt.Privacy(epsilon=8)`. With `secure=True`, or
    settings of `SecureSums`, the server gets circles' sums and nobody's copy; `compress` (float16, int8, topk, or a
    `fedquilt.Compression`) has clients send codes of their changes. With `alone=True` the same clients are
    also trained by themselves, as long and with the same settings, for the gain over alone; a finished run of `local`
    may be given instead. With `everyone=True` every client's model is, at the end, also tried on all clients' test
    samples (rows of the split "everyone"); `unseen` clients are held out and join when it is over. `threads` is how
    many PyTorch has; otherwise it is found what is good on this machine now.
    With `out` the run is kept in a directory as it goes, and can be resumed from it.

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
    scenario, strangers = hold_out(scenario, unseen)
    with threads_of_a_run(choose_threads(threads, pick_device(device))):
        federation = Federation(
            scenario,
            made,
            how,
            seed,
            device,
            engine,
            clients_at_once,
            chosen,
            rule,
            evaluate_every,
            attack=attacks.pick(attack) if isinstance(attack, str) else attack,
            privacy=privacy,
            secure=SecureSums.of(secure),
            compress=Compression.of(compress),
            everyone=everyone,
        )
        result = Run(federation)
        result.alone = alone if isinstance(alone, Run) else None
        clients_at_once, evaluate_every = federation.simulation.training.clients_at_once, federation.evaluate_every
        kept = rule_to(rule) if out is not None else {}
        given = (engine, clients_at_once, kept, evaluate_every, checkpoint_every, alone is True, len(strangers))
        options = dict(zip(OPTIONS, given, strict=True))
        folder = None
        if out is not None:
            folder = folder_of(out)
            folder.start(federation, options)
            result.folder = folder.folder
        return _finish(result, folder, options, callbacks, strangers)


def resume(
    folder: str | Path, scenario: Scenario | None = None, callbacks: Sequence[Callback] = (), *, trust: bool = False
) -> Run:  # fmt: skip
    """Go on with a run on disk that was interrupted, to the same bits as if it had not been.

    The scenario is built again as `run.toml` says; give it where it was made by code of your own. Code outside of the
    library that a run directory names is run only if you ran it on this machine before, or say `trust=True`.
    """
    place = folder_of(folder)
    known = place.read_settings()
    if place.finished:
        raise ValueError(f"the run in '{folder}' is finished; look at it with: fedquilt report {folder}")
    with threads_of_a_run(as_begun(known.get("threads"))), shards_of(known):
        made, strangers = hold_out(scenario or scenario_of(known, trust), known.get("unseen"))
        federation = rebuild(known, made, trust)
        place.lock.take()
        try:
            return _go_on(place, federation, known, callbacks, strangers)
        finally:
            place.lock.release()


def extend(
    folder: str | Path, rounds: int, scenario: Scenario | None = None, callbacks: Sequence[Callback] = (), *,
    trust: bool = False,
) -> Run:  # fmt: skip
    """Go on with a finished run until it has so many rounds in all, to the same bits as if it had been so long at once.

    Where the method, the learning rate or the scenario depends on how many rounds there are, it goes on by the new
    number, and a warning says that the result is not that of a run of that length.
    """
    place = folder_of(folder)
    known = place.read_settings()
    before, rounds = known["training"]["rounds"], whole(rounds, "rounds")
    if not place.finished:
        raise ValueError(f"the run in '{folder}' is not finished; go on with it first: fedquilt resume {folder}")
    if rounds <= before:
        raise ValueError(f"the run in '{folder}' has {before} rounds already; say how many in all, so more than that")
    place.check_by_itself()
    with threads_of_a_run(as_begun(known.get("threads"))), shards_of(known):
        made, strangers = hold_out(scenario or scenario_of(known, trust), known.get("unseen"))
        longer = {**known, "training": {**known["training"], "rounds": rounds}}
        federation = rebuild(longer, made, trust)
        reasons = _depends_on_rounds(federation)
        if reasons:
            told = f"{' and '.join(reasons)} on how many rounds there are"
            warnings.warn(
                f"this is not the same as a run of {rounds} rounds from the start: {told}, and that was {before}",
                stacklevel=2,
            )
        place.lock.take()
        try:
            place.look(federation)  # all that could be wrong is, before the first byte is changed
            place.reopen(longer, before)
            return _go_on(place, federation, longer, callbacks, strangers)
        finally:
            place.lock.release()


def _depends_on_rounds(federation: Federation) -> list[str]:
    """What in a federation would have been different before, had there been more rounds to come."""
    found = [f"the method '{federation.method.name}' depends"] if federation.method.depends_on_rounds else []
    found += ["the learning rate depends"] if federation.training.decay_at and federation.training.decay != 1 else []
    return found + (["the scenario depends"] if "rounds" in federation.scenario.origin.get("settings", {}) else [])


def _go_on(
    place: RunFolder, federation: Federation, known: Mapping[str, Any], callbacks: Sequence[Callback],
    strangers: Sequence[Client],
) -> Run:  # fmt: skip
    """The rounds that are left after the last checkpoint of a run on disk."""
    options = options_of(known, OPTIONS)
    kept = place.restore(federation)
    result = Run(federation, plans=kept.plans, folder=place.folder, earlier=kept.rows)
    result.seconds = kept.more.get("seconds", 0.0)
    result.bytes_up, result.bytes_down = [up for up, _ in kept.moved], [down for _, down in kept.moved]
    return _finish(result, place, options, callbacks, strangers)


def _finish(
    result: Run, folder: RunFolder | None, options: Mapping[str, Any], callbacks: Sequence[Callback],
    strangers: Sequence[Client],
) -> Run:  # fmt: skip
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
        if anywhere(bool(stop)):
            if folder is not None:  # here, not in `keep`: a Ctrl-C may come during any callback
                folder.checkpoint(federation, {"seconds": result.seconds})
            raise KeyboardInterrupt

    wanted = options["alone"] and federation.method.name != "local"
    try:
        if wanted and result.alone is None and any(readout.asks_alone for readout in federation.readouts):
            result.alone, start = _alone(federation, folder, options), time.perf_counter()
        _with_twins(federation, result.alone)
        with first_ctrl_c(folder is not None) as stop:
            federation.run([result.take, keep, *callbacks, end])
        last = [e for e in result.evaluations if e.round == federation.round] or federation.evaluate(last=True)
        result.note_chance(last)
        if anywhere(bool(stop)):
            raise KeyboardInterrupt
        if wanted and result.alone is None:
            result.alone = _alone(federation, folder, options)
        result.joined = let_join(strangers, federation, result.plans[-1][0])
        if folder is not None:
            folder.finish(federation, result.summary, last)
    finally:
        federation.close()
        if folder is not None:
            folder.lock.release()
    return result


def _with_twins(federation: Federation, alone: Run | None) -> None:
    """Let read-outs ask the models of clients that were trained alone, where they are at hand."""
    if alone is None or alone.federation.round < federation.training.rounds:
        return
    names = [[client.name for client in each.scenario.clients] for each in (alone.federation, federation)]
    if names[0] == names[1]:
        federation.simulation.twins = alone.federation.simulation


def _alone(federation: Federation, folder: RunFolder | None, options: Mapping[str, Any]) -> Run:
    """The same clients, trained by themselves as long and in the same way."""
    out = None if folder is None else folder.folder / "alone"
    begun, done = as_first(
        [out is not None and (out / "run.toml").is_file(), out is not None and RunFolder(out).finished]
    )
    if out is not None and begun and not done:
        return resume(out, federation.scenario)
    if out is not None and done:
        kept = RunFolder(out)
        if kept.read_settings()["training"]["rounds"] < federation.training.rounds:  # the run was extended
            return extend(out, federation.training.rounds, federation.scenario)
        empty = Federation(federation.scenario, Local(), federation.training, federation.seed, str(federation.device))
        earlier = kept.lines(METRICS)
        if any(readout.asks_alone for readout in federation.readouts):
            kept.restore(empty)  # their models too, not only what they scored
        return Run(empty, earlier=earlier, folder=kept.folder)
    return run(
        federation.scenario, "local", seed=federation.seed, training=federation.training, alone=False, out=out,
        device=str(federation.device), engine=options["engine"], readouts=("received",),
        threads=torch.get_num_threads(), clients_at_once=options["clients_at_once"],
        evaluate_every=federation.training.rounds, everyone=federation.terms.everyone,
        checkpoint_every=options["checkpoint_every"],
    )  # fmt: skip
