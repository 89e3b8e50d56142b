"""Accidents without a network: clients that die, dawdle or stay away, and a server that is killed at any moment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from deploy_help import LocalPost, PowerCut, cut_at, digits_with_public, federate, lines, same_rows

from fedquilt.deploy.device.device import Device
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.deploy.server.coordinator import lead
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.transport.transport import Answer, Patience
from fedquilt.deploy.transport.wire import unpack
from fedquilt.runs.run import run

ROUNDS = 4


def project_of(folder: Path, **how: Any) -> Project:
    return create_from_scenario(folder, digits_with_public(**how), Address(), Rounds(timeout=5, attempts=3))


def spec_of(project: Project, method: str) -> dict[str, Any]:
    return {
        "run": "r",
        "project": str(project.folder),
        "folder": str(project.runs / "r"),
        "method": method,
        "rounds": ROUNDS,
    }


@pytest.mark.parametrize(
    ("method", "moment"),
    # There are 4 letters in each of 6 exchanges: the first asks who is there, the last is the end.
    [
        ("fedper", 2),
        ("fedper", 9),
        ("fedper", 22),
        ("feddl", 12),
        ("feddl", 17),
        ("score-sharing", 11),
        ("score-sharing", 14),
    ],
)
def test_a_server_killed_at_any_moment_goes_on_to_the_same_end(tmp_path: Path, method: str, moment: int) -> None:
    how = {"unlike": True, "changes": True} if method == "score-sharing" else {}
    project = project_of(tmp_path / "fed", **how)
    spec = spec_of(project, method)
    post = LocalPost(project)
    post.accident = cut_at(moment)
    with pytest.raises(PowerCut):
        lead(project, spec, post)
    lead(project, spec, LocalPost(project))  # everything anew, devices too
    folder = Path(spec["folder"])
    expected = run(digits_with_public(**how), method, ROUNDS, device="cpu", engine="sequential", alone=False)
    same_rows(lines(folder / "metrics.jsonl"), expected.rows)
    assert [line["round"] for line in lines(folder / "traffic.jsonl")] == list(range(1, ROUNDS + 1))
    plans = lines(folder / "plans.jsonl")
    assert [line["round"] for line in plans] == [round_ for round_, _ in expected.plans]
    assert json.loads((folder / "summary.json").read_text())["left_out"] == {}


@pytest.mark.parametrize("moment", ["before it trains", "after it trained", "after it answered"])
def test_a_client_killed_in_a_round_comes_back_with_what_it_had(tmp_path: Path, moment: str) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedper", ROUNDS)
    victim = "client-1"

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if name != victim or round_ != 2:
            return None
        answer = b"" if moment == "before it trains" else device.handle(letter)
        post.devices[victim] = post.device(victim)  # dead, and started again
        return Answer(name, answer) if moment == "after it answered" else Answer(name, code="no-answer")

    post.accident = accident
    reports = [federation.step() for _ in range(ROUNDS)]
    federation.evaluate(last=True)
    lost = moment != "after it answered"
    assert (1 in reports[1].participants) is not lost
    assert all(1 in report.participants for report in reports[2:])
    assert remote(federation).left_out == ({victim: {"no-answer": 1}} if lost else {})
    # It went on from its last accepted round, not from the beginning.
    letters = [unpack(letter)[1] for letter in post.down[victim][1:]]
    expected = letters[1]["accepted"] if lost else letters[1]["token"]
    assert letters[2]["accepted"] == expected != ""
    assert "lost-state" not in json.dumps(remote(federation).left_out)


def test_a_client_that_was_gone_for_rounds_catches_up(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedper", 5)
    gone = "client-3"
    post.reachable = lambda: {n for n in post.devices if n != gone or federation.round in (0, 3, 4)}  # type: ignore[method-assign]
    took = [3 in federation.step().participants for _ in range(5)]
    assert took == [True, False, False, True, True]
    assert remote(federation).left_out == {}


def test_a_round_without_quorum_is_repeated_from_the_same_place(tmp_path: Path) -> None:
    clean, _ = federate(tmp_path / "clean", digits_with_public(), "fedper", 3)
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedper", 3)
    tries = 0

    def accident(name: str, round_: int, *_: object) -> Answer | None:
        nonlocal tries
        if round_ == 2 and name == "client-0":
            tries += 1
        if round_ == 2 and tries <= 2 and name != "client-0":
            return Answer(name, code="no-answer")
        return None

    post.accident = accident
    ours, theirs = [federation.step() for _ in range(3)], [clean.step() for _ in range(3)]
    assert tries == 3
    last = [row for e in federation.evaluate(last=True) for row in e.rows()]
    same_rows(last, [row for e in clean.evaluate(last=True) for row in e.rows()])
    assert ours[-1].participants == theirs[-1].participants


def test_a_device_that_lost_its_state_is_noticed_and_starts_afresh(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedper", 4)
    federation.step()
    federation.step()
    for file in (post.project.client_folder("client-2") / "state" / "test").glob("*.safetensors"):
        file.unlink()
    took = [2 in federation.step().participants for _ in range(2)]
    assert took == [False, True]
    assert remote(federation).left_out == {"client-2": {"lost-state": 1}}


def test_slow_clients_are_not_waited_for_longer_than_the_time_out(tmp_path: Path) -> None:
    """The post ends an exchange at its time-out; what comes later belongs to no round."""
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 2)
    late: list[bytes] = []

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if name == "client-0" and round_ == 1:
            late.append(device.handle(letter))
            return Answer(name, code="no-answer")
        if name == "client-0" and round_ == 2:
            return Answer(name, late[0])  # the answer of round 1, a round late
        return None

    post.accident = accident
    assert 0 not in federation.step().participants
    assert 0 not in federation.step().participants
    assert remote(federation).left_out == {"client-0": {"no-answer": 1, "wrong-round": 1}}


def test_too_few_clients_at_the_start_is_a_sentence(tmp_path: Path) -> None:
    project = create_from_scenario(tmp_path / "fed", digits_with_public(), Address(), Rounds(timeout=0.1, quorum=0.9))
    post = LocalPost(project)
    post.reachable = lambda: {"client-0"}  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="1 of 4 clients are there after 0 s, 4 are needed; missing are client-1"):
        lead(project, spec_of(project, "fedavg"), post)


class Patchy(LocalPost):
    """Every second round another client does not answer."""

    def exchange(self, letters: Mapping[str, bytes], round_: int, patience: Patience) -> Iterator[Answer]:
        for answer in super().exchange(letters, round_, patience):
            unlucky = f"client-{round_ // 2 % 4}"
            yield Answer(unlucky, code="no-answer") if round_ % 2 and answer.client == unlucky else answer


def test_circles_survive_patchy_attendance(tmp_path: Path) -> None:
    project = project_of(tmp_path / "fed")
    spec = spec_of(project, "modfl") | {"settings": {"split": 2}, "rounds": 8}
    summary = lead(project, spec, Patchy(project))
    plans = lines(Path(spec["folder"]) / "plans.jsonl")
    expected = run(
        digits_with_public(), "modfl", 8, settings={"split": 2}, device="cpu", engine="sequential", alone=False
    )
    assert len(plans) == 1
    assert plans[-1]["units"] == expected.plan.to_json()["units"]
    assert {code for codes in summary["left_out"].values() for code in codes} == {"no-answer"}
