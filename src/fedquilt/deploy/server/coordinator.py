"""Leading a run: ask who is there, then round after round, each saved before the next begins."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fedquilt.core.federation import Federation
from fedquilt.deploy.noise_key import noise_key
from fedquilt.deploy.project import Project
from fedquilt.deploy.server.agreement import make_terms
from fedquilt.deploy.server.answers import Exchange
from fedquilt.deploy.server.declarations import Declarations, declare, stubs
from fedquilt.deploy.server.newcomers import Newcomers
from fedquilt.deploy.server.remote_clients import RemoteClients, remote
from fedquilt.deploy.server.run_folder import RemoteRunFolder
from fedquilt.deploy.transport.transport import Transport
from fedquilt.runs.folder import METRICS, SUMMARY, TRAFFIC
from fedquilt.runs.rebuilding import make_readouts
from fedquilt.runs.result import Run
from fedquilt.runs.rule_texts import rule_from
from fedquilt.scenario import Scenario

DEFAULT_READOUTS = ("received", "adapted")


def lead(project: Project, spec: Mapping[str, Any], post: Transport) -> dict[str, Any]:
    """The whole run that `spec` describes, from its start or from where its checkpoint is; gives its summary."""
    records = RemoteRunFolder(spec["folder"])
    with records.led(patience=1.0):
        return _lead(project, spec, post, records)


def _lead(project: Project, spec: Mapping[str, Any], post: Transport, records: RemoteRunFolder) -> dict[str, Any]:
    if records.finished:  # its leader was ended after the summary, before it could say so
        summary: dict[str, Any] = json.loads((records.folder / SUMMARY).read_text(encoding="utf-8"))
        records.status(state="finished", round=summary["rounds"], rounds=summary["rounds"])
        return summary
    start, more = time.monotonic(), records.kept()
    before = more["seconds"] if more else 0.0
    declared = more["declared"] if more else _declared(project, spec, post, records)
    secret = noise_key(project.server_folder / "noise.key", spec["run"])

    def make(now: Project, all_declared: Declarations) -> Federation:
        return make_federation(now, spec, post, all_declared, records.letters, records.say, secret)

    federation = make(project, declared)
    newcomers = Newcomers(project, post, make, records.letters, records.say)
    result = Run(federation, folder=records.folder)

    def keep() -> None:
        result.seconds = before + time.monotonic() - start
        records.keep(federation, {"declared": declared, "seconds": result.seconds})

    def settings() -> None:
        transfer = {"transfer": asdict(project.transfer), "rounds": asdict(project.rounds)}
        records.settings(federation, {"evaluate_every": federation.evaluate_every, "deploy": transfer})

    if more:
        records.go_back(federation)
        result.earlier = records.lines(METRICS)
        for line in records.lines(TRAFFIC):
            result.bytes_up.append(sum(line["up"].values()))
            result.bytes_down.append(sum(line["down"].values()))
    else:
        settings()
        keep()
    rounds = federation.training.rounds

    def status(waiting: str = "") -> None:
        records.status(state="running", round=federation.round, rounds=rounds, waiting=waiting)

    while federation.round < rounds:
        status()
        grown = newcomers.join(federation, declared)
        if grown is not federation:
            federation = result.federation = grown
            settings()
            keep()
        remote(federation).waits_for = status
        report = federation.step()
        result.take(federation, report)
        records.round(federation, report)
        keep()
    last = federation.evaluate(last=True)
    records.evaluated(last)
    result.evaluations += last
    left_out = remote(federation).left_out
    summary = {**result.summary, "seconds": before + time.monotonic() - start, "left_out": left_out}
    records.finish(federation, summary, last)
    records.status(state="finished", round=federation.round, rounds=rounds)
    return summary


def make_federation(
    project: Project,
    spec: Mapping[str, Any],
    post: Transport,
    declared: Declarations,
    log: Callable[[Exchange], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    secret: int | None = None,
) -> Federation:
    """The federation of those who declared themselves."""
    terms = make_terms(project, spec)
    clients = stubs(project, declared, say)
    names = project.spec.label_names or tuple(str(label) for label in range(project.spec.classes))
    scenario = Scenario(
        project.spec.scenario,
        clients,
        terms.training,
        terms.common,
        terms.public_test,
        names,
        project.spec.origin,
        terms.task,
    )
    return Federation(
        scenario, terms.method, terms.training, terms.seed, "cpu",
        readouts=make_readouts(spec.get("readouts") or DEFAULT_READOUTS),
        rule=rule_from(spec.get("merge") or {"name": "mean"}),
        evaluate_every=spec.get("evaluate_every", 1),
        clients=RemoteClients(spec["run"], clients, terms, post, project.rounds, project.transfer, log),
        privacy=terms.privacy, secret=secret,
        secure=project.secure, compress=terms.compress,
    )  # fmt: skip


def _declared(project: Project, spec: Mapping[str, Any], post: Transport, records: RemoteRunFolder) -> Declarations:
    """Asks who is there, and says whom it waits for and whom it leaves out."""

    def log(exchange: Exchange) -> None:
        records.letters(exchange)
        for name, reason in exchange.details.items():
            records.say(f"client '{name}' is not in this run: {reason}")

    return declare(project, spec, post, log, lambda names: records.status(state="starting", waiting=names))
