"""Leading a run: ask who is there, then round after round, each saved before the next begins."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedquilt.client import Split, as_split
from fedquilt.deploy.checkpoint import load_more, load_server, save_server
from fedquilt.deploy.letters import plain, read_member, write_terms
from fedquilt.deploy.node_client import builder
from fedquilt.deploy.post import Post
from fedquilt.deploy.project import Project
from fedquilt.deploy.records import Records
from fedquilt.deploy.remote import Exchange, RemoteFederation, shadow
from fedquilt.deploy.wire import REASONS, Refused, pack, unpack
from fedquilt.fleet import Terms
from fedquilt.run import make_method
from fedquilt.scenario import Scenario
from fedquilt.training.settings import Training

Declarations = dict[str, dict[str, Any]]
CHECKPOINT = "checkpoint.safetensors"


def lead(project: Project, spec: Mapping[str, Any], post: Post) -> dict[str, Any]:
    """The whole run that `spec` describes, from its start or from where its checkpoint is; gives its summary."""
    records = Records(Path(spec["folder"]))
    saved = records.folder / CHECKPOINT
    start, before = time.monotonic(), 0.0
    more = load_more(saved) if saved.is_file() else {}
    declared = more.get("declared") or declare(project, spec, post)
    federation = make_federation(project, spec, post, declared, records.letters)
    if more:
        restore(federation, saved, more)
        before = more["seconds"]
        records.go_back_to(federation.round)
    else:
        records.start(run_settings(project, spec, federation, declared))

    def save() -> None:
        passed = before + time.monotonic() - start
        save_server(saved, federation.server, {"declared": declared, "seconds": passed, **federation.kept()})

    if not more:
        save()
    while federation.round < federation.training.rounds:
        records.status(state="running", round=federation.round, rounds=federation.training.rounds)
        records.round(federation, federation.step())
        save()
    last = federation.finish()
    summary = records.finish(federation, last, before + time.monotonic() - start)
    records.status(state="finished", round=federation.round, rounds=federation.training.rounds)
    return summary


def declare(project: Project, spec: Mapping[str, Any], post: Post) -> Declarations:
    """What the clients say about themselves, once all are there or the time is up."""
    end = time.monotonic() + project.rounds.timeout
    waiting = set(project.clients)
    declared: Declarations = {}
    while waiting:
        there = post.reachable() & waiting
        if there:
            declared |= _hello(project, spec, post, sorted(there))
            waiting -= set(declared)
        if time.monotonic() > end:
            break
        if waiting:
            time.sleep(0.5)
    needed = max(1, round(project.rounds.quorum * len(project.clients)))
    if len(declared) < needed:
        raise TimeoutError(
            f"{len(declared)} of {len(project.clients)} clients are there after {project.rounds.timeout:.0f} s, "
            f"{needed} are needed; missing are {', '.join(sorted(waiting)[:8])}"
        )
    return {name: declared[name] for name in project.clients if name in declared}


def _hello(project: Project, spec: Mapping[str, Any], post: Post, names: list[str]) -> Declarations:
    terms = write_terms(make_terms(project, spec))
    tokens = {name: secrets.token_hex(16) for name in names}
    letters = {name: pack({}, {"kind": "hello", "token": tokens[name], "terms": terms}) for name in names}
    found: Declarations = {}
    for answer in post.exchange(letters, 0, project.rounds.timeout):
        try:
            if answer.code or not answer.content:
                raise Refused(answer.code or "failed")
            _, text = unpack(answer.content)
            if text.get("token") != tokens[answer.client] or text.get("code"):
                raise Refused("failed")
            member = read_member(text["member"])
            if member.name != answer.client:
                raise Refused("unknown-client")
            found[answer.client] = {"member": text["member"], "changes": dict(text["changes"])}
        except (Refused, KeyError, TypeError, ValueError, AttributeError) as problem:
            reason = str(problem) if isinstance(problem, Refused) else REASONS["unreadable"]
            print(f"client '{answer.client}' is not in this run: {reason}", flush=True)
    return found


def make_terms(project: Project, spec: Mapping[str, Any]) -> Terms:
    """What a run's clients agree on, from the project and what was asked for."""
    training = Training(**plain({**project.terms.training, **spec.get("training", {})}))
    if spec.get("rounds"):
        training = training.but({"rounds": spec["rounds"]})
    method = make_method(spec["method"], plain(spec.get("settings", {})))
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
    scenario = Scenario(project.terms.scenario, clients, terms.training, terms.common, terms.public_test, names)
    federation = RemoteFederation(
        spec["run"],
        scenario,
        terms,
        post,
        project.rounds,
        project.transfer,
        spec.get("readouts", ("received", "adapted")),
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


def restore(federation: RemoteFederation, saved: Path, more: Mapping[str, Any]) -> None:
    """Puts a federation where its checkpoint is."""
    at = int(unpack(saved.read_bytes())[1]["round"])
    for round_ in range(1, at + 1):
        changed = federation.fleet.changes(round_)
        if changed:
            federation.server.declare(changed)
    load_server(saved, federation.server)
    federation.remember(more)


def run_settings(
    project: Project, spec: Mapping[str, Any], federation: RemoteFederation, declared: Declarations
) -> dict[str, Any]:
    """What `run.toml` says."""
    return {
        "scenario": project.terms.scenario,
        "method": spec["method"],
        "settings": dict(spec.get("settings", {})),
        "seed": federation.seed,
        "rounds": federation.training.rounds,
        "clients": list(declared),
        "label_names": list(federation.scenario.label_names),
        "readouts": list(federation.readout_names),
        "training": asdict(federation.training),
        "deploy": {"transfer": asdict(project.transfer), "rounds": asdict(project.rounds)},
    }


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
