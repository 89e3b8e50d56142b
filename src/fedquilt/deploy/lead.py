"""Leading a run: ask who is there, then round after round, each saved before the next begins."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import nn

from fedquilt.client import Split, as_split
from fedquilt.deploy.letters import read_member, write_terms
from fedquilt.deploy.node_client import builder
from fedquilt.deploy.post import Post
from fedquilt.deploy.project import Project
from fedquilt.deploy.records import Records
from fedquilt.deploy.remote import FROM_DEVICES, Exchange, RemoteFederation, shadow
from fedquilt.deploy.wire import REASONS, Refused, pack, unpack
from fedquilt.disk import METRICS, TRAFFIC
from fedquilt.methods.find import source_of
from fedquilt.run import Run, make_method, make_readouts
from fedquilt.scenario import Scenario
from fedquilt.sharing import pick
from fedquilt.terms import Terms
from fedquilt.toml import values_of
from fedquilt.training.settings import Training

Declarations = dict[str, dict[str, Any]]
DEFAULT_READOUTS = ("received", "adapted")
_FOR_GOOD = ("unknown-method", "other-code")  # until its owner changes something and starts the device again


def lead(project: Project, spec: Mapping[str, Any], post: Post) -> dict[str, Any]:
    """The whole run that `spec` describes, from its start or from where its checkpoint is; gives its summary."""
    records = Records(spec["folder"])
    start, more = time.monotonic(), records.kept()
    before = more["seconds"] if more else 0.0
    declared = more["declared"] if more else declare(project, spec, post)
    federation = make_federation(project, spec, post, declared, records.letters)
    result = Run(federation, folder=records.folder)

    def keep() -> None:
        result.seconds = before + time.monotonic() - start
        records.keep(federation, {"declared": declared, "seconds": result.seconds})

    if more:
        records.go_back(federation)
        result.earlier = records.lines(METRICS)
        for line in records.lines(TRAFFIC):
            result.bytes_up.append(sum(line["up"].values()))
            result.bytes_down.append(sum(line["down"].values()))
    else:
        transfer = {"transfer": asdict(project.transfer), "rounds": asdict(project.rounds)}
        records.settings(federation, {"evaluate_every": federation.evaluate_every, "deploy": transfer})
        keep()
    rounds = federation.training.rounds
    while federation.round < rounds:
        records.status(state="running", round=federation.round, rounds=rounds)
        report = federation.step()
        result.take(federation, report)
        records.round(federation, report)
        keep()
    last = federation.finish()
    records.evaluated(last)
    result.evaluations += last
    summary = {**result.summary, "seconds": before + time.monotonic() - start, "engine": "flower", "device": "devices",
               "left_out": federation.left_out}  # fmt: skip
    records.finish(federation, summary, list(last))
    records.status(state="finished", round=federation.round, rounds=rounds)
    return summary


def declare(project: Project, spec: Mapping[str, Any], post: Post) -> Declarations:
    """What the clients say about themselves, once all are there or the time is up."""
    end = time.monotonic() + project.rounds.timeout
    waiting = set(project.clients)
    declared: Declarations = {}
    refusing: dict[str, str] = {}
    while waiting:
        there = post.reachable() & waiting
        if there:
            declared |= _hello(project, spec, post, sorted(there), refusing)
            waiting -= {*declared, *refusing}
        if time.monotonic() > end:
            break
        if waiting:
            time.sleep(0.5)
    needed = max(1, round(project.rounds.quorum * len(project.clients)))
    if len(declared) < needed and refusing and not waiting:
        name, reason = next(iter(refusing.items()))
        raise ValueError(
            f"{len(refusing)} of {len(project.clients)} clients do not take part in this run, as client '{name}': "
            f"{reason}"
        )
    if len(declared) < needed:
        raise TimeoutError(
            f"{len(declared)} of {len(project.clients)} clients are there after {project.rounds.timeout:.0f} s, "
            f"{needed} are needed; missing are {', '.join(sorted(waiting)[:8])}"
        )
    return {name: declared[name] for name in project.clients if name in declared}


def _hello(
    project: Project, spec: Mapping[str, Any], post: Post, names: list[str], refusing: dict[str, str]
) -> Declarations:
    """What clients declare; in `refusing` goes who will not take part, however often it is asked, and why."""
    terms = write_terms(make_terms(project, spec))
    tokens = {name: secrets.token_hex(16) for name in names}
    letters = {name: pack({}, {"kind": "hello", "token": tokens[name], "terms": terms}) for name in names}
    found: Declarations = {}
    for answer in post.exchange(letters, 0, project.rounds.timeout):
        try:
            if answer.code or not answer.content:
                raise Refused(answer.code or "failed")
            _, text = unpack(answer.content)
            if text.get("token") != tokens[answer.client]:
                raise Refused("failed")
            if text.get("code"):
                raise Refused(text["code"] if text["code"] in FROM_DEVICES else "failed")
            member = read_member(text["member"])
            if member.name != answer.client:
                raise Refused("unknown-client")
            found[answer.client] = {"member": text["member"], "changes": dict(text["changes"])}
        except (Refused, KeyError, TypeError, ValueError, AttributeError) as problem:
            reason = str(problem) if isinstance(problem, Refused) else REASONS["unreadable"]
            if isinstance(problem, Refused) and problem.code in _FOR_GOOD:
                refusing[answer.client] = reason
            print(f"client '{answer.client}' is not in this run: {reason}", flush=True)
    return found


def make_terms(project: Project, spec: Mapping[str, Any]) -> Terms:
    """What a run's clients agree on, from the project and what was asked for."""
    training = Training(**values_of({**project.terms.training, **spec.get("training", {})}))
    if spec.get("rounds"):
        training = training.but({"rounds": spec["rounds"]})
    method = make_method(spec["method"], values_of(spec.get("settings", {})))
    if "source" in spec and source_of(type(method)) != spec["source"]:
        raise ValueError(
            f"the code of the method '{method.name}' is not that which the run {spec['run']} was begun with; put it "
            "back, or start a new run"
        )
    common, public_test = (_held(project, file) for file in (project.terms.common, project.terms.public_test))
    return Terms(method, training, project.terms.classes, spec.get("seed", 0), common, public_test)


def make_federation(
    project: Project,
    spec: Mapping[str, Any],
    post: Post,
    declared: Declarations,
    log: Callable[[Exchange], None] = lambda _: None,
) -> RemoteFederation:
    """The federation of those who declared themselves; a client whose model is not what was agreed is an error."""
    terms = make_terms(project, spec)
    clients = []
    for name, said in declared.items():
        changes = {int(start): change for start, change in said["changes"].items()}
        clients.append(shadow(read_member(said["member"]), _architecture(project, name), changes))
    names = project.terms.label_names or tuple(str(label) for label in range(project.terms.classes))
    scenario = Scenario(
        project.terms.scenario, clients, terms.training, terms.common, terms.public_test, names, project.terms.origin
    )
    rule = dict(spec.get("merge") or {"name": "mean"})
    federation = RemoteFederation(
        spec["run"],
        scenario,
        terms,
        post,
        project.rounds,
        project.transfer,
        make_readouts(spec.get("readouts") or DEFAULT_READOUTS),
        pick(rule.pop("name"), **rule),
        spec.get("evaluate_every", 1),
        log,
    )
    for member in federation.server.roster.members:
        units = read_member(declared[member.name]["member"]).units
        if dict(units) != dict(member.units):
            raise ValueError(
                f"client '{member.name}' has a model with the units {', '.join(units)} in other shapes or number than "
                f"[models.{member.name}] of federation.toml gives; make the two agree"
            )
    return federation


def _architecture(project: Project, name: str) -> Callable[[int], Callable[[], nn.Module] | None]:
    model = project.models.get(name)
    if model is None:
        raise ValueError(f"client '{name}' has no model in federation.toml; give it a table [models.{name}]")

    def build(start: int) -> Callable[[], nn.Module] | None:
        reference = model.get("changes", {}).get(str(start)) if start else model
        return None if reference is None else builder(project.server_folder, reference, name)

    return build


def _held(project: Project, file: str) -> Split | None:
    if not file:
        return None
    with np.load(project.folder / file, allow_pickle=False) as arrays:
        return as_split((arrays["x"], arrays["y"]), f"the samples in {file}")
