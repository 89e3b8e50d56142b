"""Who takes part in a run: what clients declare about themselves, and whether it can be.

A declaration is checked as an update is: what one client says is its own affair, so a client that says what cannot be
is left out by name, and the run begins without it.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedquilt.client import Client
from fedquilt.core.simulation import Simulation
from fedquilt.core.terms import Terms
from fedquilt.deploy.project import Project
from fedquilt.deploy.server.agreement import architecture, make_terms
from fedquilt.deploy.server.answers import FROM_DEVICES, Exchange
from fedquilt.deploy.server.stubs import stub_client
from fedquilt.deploy.transport.agreed import read_member, write_terms
from fedquilt.deploy.transport.transport import Answer, Patience, Transport
from fedquilt.deploy.transport.wire import Refused, pack, unpack
from fedquilt.interface.messages import ClientInfo

Declarations = dict[str, dict[str, Any]]
# Until its owner changes something and starts the device again, there is no use in asking such a client once more.
_FOR_GOOD = ("unknown-method", "other-code", "bad-declaration", "other-model")
_LARGEST = 8 << 20  # bytes of a declaration
_MOST_WORDS, _LONGEST_WORD, _MOST_CHANGES = 64, 200, 1000


@dataclass
class Asked:
    """What came of asking who is there."""

    declared: Declarations = field(default_factory=dict)
    refusing: dict[str, str] = field(default_factory=dict)  # who will not take part, however often it is asked, and why


def declare(
    project: Project,
    spec: Mapping[str, Any],
    post: Transport,
    log: Callable[[Exchange], None] = lambda _: None,
    waiting_for: Callable[[str], None] = lambda _: None,
) -> Declarations:
    """What the clients say about themselves, once all are there or the time is up."""
    end = time.monotonic() + project.rounds.timeout
    waiting, asked = set(project.clients), Asked()
    terms = make_terms(project, spec)
    while waiting:
        there = post.reachable() & waiting
        if there:
            hello(project, terms, post, sorted(there), asked, log, project.rounds.timeout)
            waiting -= {*asked.declared, *asked.refusing}
        waiting_for(", ".join(sorted(waiting)))
        if time.monotonic() > end:
            break
        if waiting:
            time.sleep(0.5)
    waiting_for("")
    _enough(project, asked, waiting)
    return {name: asked.declared[name] for name in project.clients if name in asked.declared}


def _enough(project: Project, asked: Asked, waiting: set[str]) -> None:
    declared, needed = len(asked.declared), max(1, round(project.rounds.quorum * len(project.clients)))
    if declared < needed and asked.refusing and not waiting:
        name, reason = next(iter(asked.refusing.items()))
        raise ValueError(
            f"{len(asked.refusing)} of {len(project.clients)} clients do not take part in this run, as client "
            f"'{name}': {reason}"
        )
    if declared < needed:
        raise TimeoutError(
            f"{declared} of {len(project.clients)} clients are there after {project.rounds.timeout:.0f} s, "
            f"{needed} are needed; missing are {', '.join(sorted(waiting)[:8])}"
        )


def hello(
    project: Project,
    terms: Terms,
    post: Transport,
    names: list[str],
    asked: Asked,
    log: Callable[[Exchange], None],
    seconds: float,
) -> None:
    """Asks clients to declare themselves, and waits some seconds for them."""
    told, record, start = write_terms(terms), Exchange(0, "hello", 1, names), time.perf_counter()
    tokens = {name: secrets.token_hex(16) for name in names}
    letters = {name: pack({}, {"kind": "hello", "token": tokens[name], "terms": told}) for name in names}
    patience = Patience(min(seconds, project.rounds.timeout), largest=dict.fromkeys(names, _LARGEST))
    for answer in post.exchange(letters, 0, patience):
        try:
            asked.declared[answer.client] = read_declaration(project, terms, answer, tokens[answer.client])
            record.answered.append(answer.client)
        except Refused as refusal:
            record.refused[answer.client] = refusal.code
            record.details[answer.client] = str(refusal)
            if refusal.code in _FOR_GOOD:
                asked.refusing[answer.client] = str(refusal)
    record.seconds = time.perf_counter() - start
    if record.refused:
        log(record)


def read_declaration(project: Project, terms: Terms, answer: Answer, token: str) -> dict[str, Any]:
    """A client's declaration as a checkpoint keeps it; `Refused` where it cannot be."""
    if answer.code or not answer.content:
        raise Refused(answer.code or "failed")
    _, text = unpack(answer.content)
    if text.get("token") != token:
        raise Refused("failed")
    if text.get("code"):
        raise Refused(text["code"] if text["code"] in FROM_DEVICES else "failed")
    try:
        member = read_member(text["member"])
        changes = {int(start): dict(change) for start, change in text["changes"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Refused("unreadable") from None
    if member.name != answer.client:
        raise Refused("unknown-client")
    check_declaration(project, terms, member, changes)
    return {"member": text["member"], "changes": dict(text["changes"])}


def check_declaration(
    project: Project, terms: Terms, member: ClientInfo, changes: Mapping[int, Mapping[str, Any]]
) -> None:
    """Refuses what a client cannot be: before anything is allocated by its numbers."""
    most = project.transfer.most_samples
    words = [*member.traits, *member.traits.values(), *member.constant]
    if len(member.traits) > _MOST_WORDS or any(len(word) > _LONGEST_WORD for word in words):
        raise Refused("bad-declaration", f"more than {_MOST_WORDS} traits, or longer than {_LONGEST_WORD} letters")
    if len(changes) > _MOST_CHANGES or any(start < 1 for start in changes):
        raise Refused("bad-declaration", "it changes in rounds that are none")
    try:
        counts = [member.samples, *(int(change["samples"]) for change in changes.values())]
        labels = [*member.labels, *(int(label) for change in changes.values() for label in change["labels"])]
        constants = [str(name) for change in changes.values() for name in change["constant"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Refused("bad-declaration", "its changes") from None
    if not all(0 < count <= most for count in counts) or len(constants) > _MOST_CHANGES * _MOST_WORDS:
        raise Refused("bad-declaration", f"its number of samples is not between 1 and most_samples = {most}")
    strange = [label for label in labels if not 0 <= label < terms.classes]
    if strange:
        raise Refused("bad-declaration", f"label {strange[0]}, but labels go from 0 to {terms.classes - 1}")
    _check_model(project, terms, member, changes)


def _check_model(project: Project, terms: Terms, member: ClientInfo, changes: Mapping[int, Mapping[str, Any]]) -> None:
    build = architecture(project, member.name)
    build(0)  # where the operator's own files are at fault, that is said, and no client is blamed
    try:
        units = Simulation([stub_client(member, build, changes)], terms, "cpu", "sequential").members()[0].units
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise Refused("bad-declaration", ascii(str(error))[1:_LONGEST_WORD]) from None
    if dict(units) != dict(member.units):
        raise Refused("other-model", f"make its model and [models.{member.name}] of federation.toml agree")


def stubs(project: Project, declared: Declarations, say: Callable[[str], None] = lambda _: None) -> list[Client]:
    """Clients as the server knows them. A count of samples is a weight that its owner gave itself, so none counts for
    more than some times the median."""
    members = {name: read_member(said["member"]) for name, said in declared.items()}
    times = project.transfer.most_times_median
    most = max(1, int(times * statistics.median(member.samples for member in members.values())))
    found = []
    for name, member in members.items():
        if member.samples > most:
            say(f"client '{name}' declares {member.samples} samples and counts as {most}, {times:g} times the median")
        changes = {
            int(start): {**change, "samples": min(int(change["samples"]), most)}
            for start, change in declared[name]["changes"].items()
        }
        bounded = replace(member, samples=min(member.samples, most))
        found.append(stub_client(bounded, architecture(project, name), changes))
    return found
