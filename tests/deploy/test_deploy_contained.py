"""Whatever comes from one client is that client's alone: what it declares, reports, sends, or does not send."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from deploy_help import LocalPost, PowerCut, cut_at, digits_with_public, federate, lines, same_rows

from fedquilt._util.lock import Held
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.ops import membership
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.deploy.server import silence
from fedquilt.deploy.server.agreement import make_terms
from fedquilt.deploy.server.bounds import outliers
from fedquilt.deploy.server.coordinator import lead, make_federation
from fedquilt.deploy.server.declarations import check_declaration, declare
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.server.run_folder import RemoteRunFolder
from fedquilt.deploy.transport.agreed import read_member
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import Refused, pack, unpack
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import Instructions, UnitValues
from fedquilt.runs.run import run

BAD = "client-2"
PLAIN = {"momentum": 0.0}


def project_of(folder: Path, rules: Rounds | None = None, **how: Any) -> tuple[Project, dict[str, Any]]:
    project = create_from_scenario(folder, digits_with_public(**how), Address(), rules or Rounds(timeout=5, attempts=3))
    spec = {"run": "r", "project": str(project.folder), "folder": str(project.runs / "r"), "rounds": 4}
    return project, {**spec, "method": "fedper"}


def liar(post: LocalPost, member: dict[str, Any] | None = None, changes: Any = None) -> None:
    """One client's declaration says something else."""

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if name != BAD or round_ != 0:
            return None
        arrays, text = unpack(device.handle(letter))
        text["member"] |= member or {}
        text["changes"] = text["changes"] if changes is None else changes
        return Answer(name, pack(arrays, text))

    post.accident = accident


@pytest.mark.parametrize(
    ("member", "changes", "reason"),
    [
        ({"samples": -1}, None, "its number of samples is not between 1 and most_samples = 1000000"),
        ({"samples": 300_000_000}, None, "its number of samples is not between 1 and most_samples = 1000000"),
        ({"labels": [0, 7, 99999]}, None, "label 99999, but labels go from 0 to 9"),
        ({}, {"abc": {}}, "could not be decoded"),
        ({}, {"2": {}}, "its changes"),
        ({}, {"2": {"samples": 3 * 10**9, "labels": [1], "constant": []}}, "its number of samples"),
        ({}, [], "could not be decoded"),
        ({"units": {"evil": [[3, 3]]}}, None, "make its model and [models.client-2] of federation.toml agree"),
        ({"traits": {"a" * 300: "b"}}, None, "more than 64 traits"),
        ({"name": "client-1"}, None, "no client of this run"),
        ({"samples": "many"}, None, "could not be decoded"),
    ],
)
def test_a_declaration_that_cannot_be_costs_its_client_alone(
    tmp_path: Path, member: dict[str, Any], changes: Any, reason: str
) -> None:
    project, spec = project_of(tmp_path / "fed", Rounds(timeout=0.5, attempts=3))
    post = LocalPost(project)
    liar(post, member, changes)
    lead(project, {**spec, "rounds": 2}, post)
    folder = Path(spec["folder"])
    hello = lines(folder / "letters.jsonl")[0]
    assert (hello["what"], list(hello["refused"])) == ("hello", [BAD])
    assert reason in hello["details"][BAD]
    assert f"client '{BAD}' is not in this run" in (folder / "leader.log").read_text()
    assert {row["client"] for row in lines(folder / "metrics.jsonl")} == {"client-0", "client-1", "client-3"}


CHANGE: dict[str, Any] = {"samples": 5, "labels": [1], "constant": []}


@pytest.mark.parametrize(
    ("member", "changes", "code"),
    [
        ({"samples": 1}, {}, ""),
        ({"samples": 0}, {}, "bad-declaration"),
        ({"samples": 1_000_001}, {}, "bad-declaration"),
        ({"labels": (10,)}, {}, "bad-declaration"),
        ({"labels": (-1,)}, {}, "bad-declaration"),
        ({"constant": ("a" * 201,)}, {}, "bad-declaration"),
        ({"traits": {str(i): "b" for i in range(65)}}, {}, "bad-declaration"),
        ({}, {1: CHANGE}, ""),
        ({}, {0: CHANGE}, "bad-declaration"),
        ({}, {1: CHANGE | {"samples": 0}}, "bad-declaration"),
        ({}, {1: CHANGE | {"labels": [10]}}, "bad-declaration"),
        ({}, {1: CHANGE | {"constant": ["a"] * 64_001}}, "bad-declaration"),
        ({}, dict.fromkeys(range(1, 1002), CHANGE), "bad-declaration"),
        ({"units": "other shapes"}, {}, "other-model"),
    ],
)
def test_where_the_bounds_of_a_declaration_are(
    tmp_path: Path, member: dict[str, Any], changes: dict[int, Any], code: str
) -> None:
    """Before anything is allocated by its numbers, or a model is built for each change."""
    project, spec = project_of(tmp_path / "fed")
    post = LocalPost(project)
    honest = read_member(declare(project, spec, post)[BAD]["member"])
    if "units" in member:
        member = {"units": {unit: tuple((*shape, 1) for shape in shapes) for unit, shapes in honest.units.items()}}
    try:
        check_declaration(project, make_terms(project, spec), replace(honest, **member), changes)
        said = ""
    except Refused as refused:
        said = refused.code
    assert said == code


def test_training_that_the_method_cannot_have_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    project, spec = project_of(tmp_path / "fed")
    post = LocalPost(project)
    with pytest.raises(ValueError, match="train with optimiser=sgd and momentum=0"):
        lead(project, {**spec, "method": "fednova", "training": {"momentum": 0.9}}, post)
    assert not any(post.down.values())


def test_nobody_counts_for_ten_times_the_others_by_saying_so(tmp_path: Path) -> None:
    project, spec = project_of(tmp_path / "fed")
    post = LocalPost(project)
    liar(post, {"samples": 900_000}, {"2": CHANGE | {"samples": 800_000}})
    said: list[str] = []
    federation = make_federation(project, spec, post, declare(project, spec, post), say=said.append)
    counts = [member.samples for member in federation.server.roster.members]
    assert counts == [36, 36, 360, 36]
    later = remote(federation).stubs.clients[2].changes[2].train
    assert later is not None
    assert len(later) == 360
    assert said == [f"client '{BAD}' declares 900000 samples and counts as 360, 10 times the median"]


def test_a_run_has_one_leader(tmp_path: Path) -> None:
    project, spec = project_of(tmp_path / "fed")
    records = RemoteRunFolder(spec["folder"])
    with records.led():
        records.status(state="running", round=1, rounds=4)
        with pytest.raises(Held, match="is being led already; look at it with `fedquilt deploy follow r`"):
            lead(project, spec, LocalPost(project))
        assert json.loads((records.folder / "status.json").read_text())["state"] == "running"
    lead(project, spec, LocalPost(project))


def test_a_run_goes_on_from_an_earlier_round_with_what_its_clients_had_then(tmp_path: Path) -> None:
    project, spec = project_of(tmp_path / "fed")
    post = LocalPost(project)
    lead(project, spec, post)
    records = RemoteRunFolder(spec["folder"])
    assert records.earlier() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="can go on after the rounds 0, 1, 2, 3, 4, not after round 9"):
        records.go_back_to(9)
    records.go_back_to(2)
    summary = lead(project, spec, LocalPost(project))
    expected = run(digits_with_public(), "fedper", 4, device="cpu", engine="sequential", alone=False)
    same_rows(lines(records.folder / "metrics.jsonl"), expected.rows)
    assert summary["left_out"] == {}  # nobody had lost the state of round 2
    assert [line["round"] for line in lines(records.folder / "traffic.jsonl")] == [1, 2, 3, 4]


def constant(value: float) -> Any:
    """Every weight is the same number."""

    def change(arrays: dict[str, Any], text: dict[str, Any]) -> bytes:
        return pack({n: np.full_like(a, value) if n.startswith("value/") else a for n, a in arrays.items()}, text)

    return change


@pytest.mark.parametrize("value", [900.0, 10.0])
def test_poison_is_left_out_and_the_honest_are_not_blamed(tmp_path: Path, value: float) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 3)

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        bad = name == BAD and round_ > 0
        return Answer(name, constant(value)(*unpack(device.handle(letter)))) if bad else None

    post.accident = accident
    for _ in range(3):
        assert federation.step().participants == (0, 1, 3)
    assert remote(federation).left_out == {BAD: {"far-from-others": 3}}
    assert all(float(values.value.abs().max()) < 3 for values in federation.server.all_values)


@pytest.mark.parametrize(("clients", "out"), [(2, {}), (3, {0: "u"})])
def test_three_can_say_which_unit_is_odd_and_two_cannot(clients: int, out: dict[int, str]) -> None:
    down = Instructions(1, (0,), (UnitValues(("u",), (4,), None, torch.ones(1, 4)),), (None,), {})
    answers = {i: ({"u": torch.ones(4) * (1.1 + 100 * (i == 0))}, dict[str, torch.Tensor]()) for i in range(clients)}
    assert outliers(answers, dict.fromkeys(answers, down), most=30) == out


@pytest.mark.parametrize(("report", "out"), [(900.0, {}), (1100.0, {0: "loss"})])
def test_a_report_of_a_thousand_times_what_is_usual_is_left_out(report: float, out: dict[int, str]) -> None:
    down = Instructions(1, (0,), (), (), {})
    reports = {i: torch.tensor([report if i == 0 else 0.5]) for i in range(3)}
    answers = {i: (dict[str, torch.Tensor](), {"loss": value}) for i, value in reports.items()}
    assert outliers(answers, dict.fromkeys(answers, down), most=30) == out


def test_of_two_the_one_with_the_odd_report_is_left_out(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(clients=2), "feddl", 3, settings={"interval": 1})

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if name != "client-0" or round_ != 2:
            return None
        arrays, text = unpack(device.handle(letter))
        return Answer(name, pack({**arrays, "report/odd": np.ones(9, np.float32)}, text))

    post.accident = accident
    taken = [federation.step().participants for _ in range(3)]
    assert taken == [(0, 1), (1,), (0, 1)]


@pytest.mark.parametrize(("method", "report"), [("fednova", "steps"), ("fedmn", "active")])
def test_of_two_the_one_that_omits_its_reports_is_left_out_from_the_first_round_on(
    tmp_path: Path, method: str, report: str
) -> None:
    """What clients report is known from the method: whoever says less does not make the other one look odd."""
    federation, post = federate(tmp_path / "fed", digits_with_public(clients=2), method, 3, training=PLAIN)

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if name != "client-1" or round_ == 0:
            return None
        arrays, text = unpack(device.handle(letter))
        assert any(key.startswith(f"report/{report}") for key in arrays)
        return Answer(name, pack({key: a for key, a in arrays.items() if not key.startswith("report/")}, text))

    post.accident = accident
    assert [federation.step().participants for _ in range(3)] == [(0,)] * 3
    assert remote(federation).left_out == {"client-1": {"wrong-shape": 3}}


def test_a_run_that_goes_on_knows_what_its_reports_looked_like(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(clients=2), "fednova", 3, training=PLAIN)
    federation.step()
    kept = json.loads(json.dumps(remote(federation).kept()))
    remote(federation).remember({**kept, "form": None})
    assert remote(federation).kept()["form"] is None
    remote(federation).remember(kept)

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        arrays, text = unpack(device.handle(letter))
        shorter = {key: a.reshape(-1)[:0] if key.startswith("report/") else a for key, a in arrays.items()}
        return Answer(name, pack(shorter, text)) if name == "client-0" else None

    post.accident = accident
    assert federation.step().participants == (1,)  # not the one with fewer numbers


def test_who_is_silent_again_and_again_is_put_aside_for_growing_times(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 12)
    post.accident = lambda name, round_, *_: Answer(name, code="no-answer") if name == BAD and round_ < 11 else None
    for _ in range(12):
        federation.step()
    rounds = [unpack(letter)[1]["round"] for letter in post.down[BAD][1:]]
    assert rounds == [1, 2, 4, 7, 12]


def test_the_silent_are_asked_where_there_is_no_quorum_without_them(tmp_path: Path) -> None:
    federation, post = federate(
        tmp_path / "fed", digits_with_public(clients=2), "fedavg", 5, rules=Rounds(quorum=1.0, attempts=9, timeout=5)
    )
    tries = 0

    def accident(name: str, round_: int, *_: object) -> Answer | None:
        nonlocal tries
        tries += name == "client-0"
        return Answer(name, code="no-answer") if name == "client-0" and tries < 5 else None

    post.accident = accident
    assert federation.step().participants == (0, 1)


def test_who_was_removed_is_neither_asked_nor_counted(tmp_path: Path) -> None:
    """Else nobody could be taken out of a run in which all must answer."""
    rules = Rounds(quorum=1.0, attempts=1, timeout=5)
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 3, rules=rules)
    federation.step()
    post.members = lambda: set(post.devices) - {BAD}  # type: ignore[method-assign]
    post.reachable = post.members  # type: ignore[method-assign]
    asked = len(post.down[BAD])
    taken = federation.step().participants
    assert {federation.scenario.clients[number].name for number in taken} == set(post.devices) - {BAD}
    assert len(post.down[BAD]) == asked


def test_a_run_goes_on_without_a_client_that_was_removed(tmp_path: Path) -> None:
    """It was in the run, the leader is lost, and meanwhile the operator takes its key away."""
    project, spec = project_of(tmp_path / "fed", Rounds(timeout=5, attempts=1, quorum=1.0))
    post = LocalPost(project)
    post.accident = cut_at(4 + 4 + 1)  # four declarations, a round, and in the next
    with pytest.raises(PowerCut):
        lead(project, spec, post)
    changed = membership.remove(project, BAD)
    lead(changed, spec, LocalPost(changed))
    took = {line["round"]: set(line["up"]) for line in lines(Path(spec["folder"]) / "traffic.jsonl")}
    assert [BAD in took[round_] for round_ in (1, 2, 3, 4)] == [True, False, False, False]
    assert all(len(names) == 3 for round_, names in took.items() if round_ > 1)


def test_whom_a_round_waits_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rounds(quorum=1.0, attempts=1, timeout=30)
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 1, rules=rules)
    now, told = 0.0, list[str]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    post.reachable = lambda: set(post.devices) - ({BAD} if now < 20 else set())  # type: ignore[method-assign]
    remote(federation).waits_for = told.append
    assert len(federation.step().participants) == 4
    assert told == [BAD, ""]
    assert now == 20


def test_some_more_are_asked_and_those_who_answer_first_count(tmp_path: Path) -> None:
    scenario = digits_with_public()
    object.__setattr__(scenario, "training", Training(rounds=3, epochs=1, batch=16, lr=0.1, share=0.5))
    federation, post = federate(tmp_path / "fed", scenario, "fedavg", 3, rules=Rounds(timeout=5, spare=0.5))
    for _ in range(3):
        chosen = set(federation.sample_clients(federation.round + 1))
        before = {name: len(letters) for name, letters in post.down.items()}
        post.accident = lambda name, *_: Answer(name, code="no-answer") if name == f"client-{min(chosen)}" else None  # noqa: B023
        took = federation.step().participants
        asked = {name for name, letters in post.down.items() if len(letters) > before[name]}
        assert len(took) == 2
        assert min(chosen) not in took
        assert len(asked) == 3
    assert torch.isfinite(federation.server.all_values[0].value).all()


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_leader_that_ended_after_the_summary_left_a_finished_run(tmp_path: Path, state: str) -> None:
    """Between the summary and the word that the run is over; going on would cut what the summary's seal is of."""
    project, spec = project_of(tmp_path / "fed")
    summary = lead(project, spec, LocalPost(project))
    records = RemoteRunFolder(spec["folder"])
    before = {path.name: path.read_bytes() for path in records.folder.iterdir() if path.is_file()}
    records.status(state=state, round=4, rounds=4)
    again = lead(project, spec, LocalPost(project))
    assert again == json.loads(before["summary.json"])
    assert again["accuracy_mean"] == summary["accuracy_mean"]
    assert json.loads((records.folder / "status.json").read_text())["state"] == "finished"
    after = {path.name: path.read_bytes() for path in records.folder.iterdir() if path.is_file()}
    assert after.pop("status.json") == before.pop("status.json")
    assert after == before
