"""Clients that come when a run is going on: they are offered circles, and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from deploy_help import LocalPost, PowerCut, digits_with_public, lines, row_key

import fedquilt as fq
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.deploy.server.coordinator import lead
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import unpack
from fedquilt.report.read_runs import read_run
from fedquilt.runs.run import run
from fedquilt.scenario import Scenario

LATE, ROUNDS = "client-3", 5


class Later(LocalPost):
    """A post that does not reach one client until some rounds are over."""

    def __init__(self, project: Project, after: int) -> None:
        super().__init__(project)
        self.after = after

    def reachable(self) -> set[str]:
        letters = project_letters(self.project)
        done = max((line["round"] for line in letters if line["what"] == "round"), default=0)
        return {name for name in self.devices if name != LATE or done >= self.after}


def project_letters(project: Project) -> list[dict[str, Any]]:
    path = project.runs / "r" / "letters.jsonl"
    return lines(path) if path.is_file() else []


def project_of(folder: Path, **how: Any) -> Project:
    rules = Rounds(timeout=0.3, quorum=0.5, attempts=3)
    return create_from_scenario(folder, digits_with_public(**how), Address(), rules)


def spec_of(project: Project, method: str, **settings: Any) -> dict[str, Any]:
    told = {"run": "r", "project": str(project.folder), "folder": str(project.runs / "r"), "method": method}
    return told | {"rounds": ROUNDS, "settings": settings}


def three_of(scenario: Scenario) -> Scenario:
    first = scenario.clients[:3]
    return Scenario(
        scenario.name, first, scenario.training, scenario.common, scenario.public_test, scenario.label_names
    )


def values_of(content: bytes) -> dict[str, Any]:
    arrays, _ = unpack(content)
    return {name.removeprefix("value/"): array for name, array in arrays.items() if name.startswith("value/")}


def test_it_counts_from_the_next_round_on_and_those_before_are_as_if_it_were_not_there(tmp_path: Path) -> None:
    project = project_of(tmp_path / "fed")
    post = Later(project, 2)
    lead(project, spec_of(project, "fedavg"), post)
    folder = project.runs / "r"
    took = [sorted(line["up"]) for line in lines(folder / "traffic.jsonl")]
    everyone = [f"client-{i}" for i in range(4)]
    assert took == [everyone[:3]] * 2 + [everyone] * 3
    assert "client 'client-3' joined after round 2" in (folder / "leader.log").read_text()

    quiet = run(three_of(digits_with_public()), "fedavg", ROUNDS, device="cpu", engine="sequential", alone=False)
    theirs = {row_key(row): row["accuracy"] for row in quiet.rows if row["round"] <= 2}
    mine = {row_key(row): row["accuracy"] for row in lines(folder / "metrics.jsonl") if row["round"] <= 2}
    others = {key: score for key, score in mine.items() if key[1] != LATE}
    assert others.keys() == theirs.keys()
    assert all(abs(score - theirs[key]) < 1e-6 for key, score in others.items())

    # By hand: what everybody is sent in round 4 is the mean of what all four sent in round 3.
    samples = {name: post.devices[name].client.samples for name in everyone}
    sent = {name: values_of(answer_of(post, name, 3)) for name in everyone}
    mean = {
        unit: sum(samples[name] * sent[name][unit] for name in everyone) / sum(samples.values())
        for unit in sent[LATE]
    }  # fmt: skip
    arrays, text = letter_of(post, LATE, 4)
    row = np.concatenate([mean[unit] for unit in text["units"][0]])
    np.testing.assert_allclose(arrays["value/0"], row, atol=1e-5)
    assert read_run(folder).clients == tuple(everyone)
    assert (project.client_folder(LATE) / "models" / "r.safetensors").is_file()


def test_whoever_was_alone_in_a_circle_keeps_what_it_trained(tmp_path: Path) -> None:
    """What a soak found: of a circle of one the server has no value, and gave its client the first one again when
    somebody joined it. Here client-1 is alone in its cohort until client-3 comes."""
    project = project_of(tmp_path / "fed")
    lead(project, spec_of(project, "modfl", split=1), Later(project, 2))
    folder = project.runs / "r"
    circles = [units["circle"] for units in lines(folder / "plans.jsonl")[-1]["units"].values()]
    assert [0, 1, 0, 1] in circles
    alone = run(three_of(digits_with_public()), fq.methods.ModFL(split=1), ROUNDS, device="cpu", engine="sequential")
    theirs = {row_key(row): row["accuracy"] for row in alone.rows if row["round"] <= 2}
    mine = {row_key(row): row["accuracy"] for row in lines(folder / "metrics.jsonl") if row["round"] <= 2}
    others = {key: score for key, score in mine.items() if key[1] != LATE}
    assert others.keys() == theirs.keys()
    assert all(abs(score - theirs[key]) < 1e-6 for key, score in others.items())


def letter_of(post: LocalPost, name: str, round_: int) -> tuple[dict[str, Any], dict[str, Any]]:
    found = [unpack(letter) for letter in post.down[name]]
    return [(arrays, text) for arrays, text in found if text.get("round") == round_][-1]


def answer_of(post: LocalPost, name: str, round_: int) -> bytes:
    return [answer for answer in post.up[name] if unpack(answer)[1].get("round") == round_][-1]


@pytest.mark.parametrize(
    ("method", "settings", "peers"),
    [
        ("modfl", {"split": 2}, {"client-1"}),  # those with the same device
        ("feddl", {"interval": 1}, None),
        ("ifca", {}, None),
        ("fedamp", {}, None),
        ("score-sharing", {}, None),
    ],
)
def test_methods_of_every_kind_offer_it_circles(
    tmp_path: Path, method: str, settings: dict[str, Any], peers: Iterable[str] | None
) -> None:
    project = project_of(tmp_path / "fed", unlike=method in ("modfl", "score-sharing"))
    lead(project, spec_of(project, method, **settings), Later(project, 2))
    folder = project.runs / "r"
    assert [LATE in line["up"] for line in lines(folder / "traffic.jsonl")][2:] == [True, True, True]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["left_out"] == {}
    if peers is not None:
        plan = lines(folder / "plans.jsonl")[-1]["units"]
        shared = [units["circle"] for units in plan.values() if units["circle"][3] >= 0]
        assert any({f"client-{i}" for i in range(3) if c[i] == c[3]} == set(peers) for c in shared)


def test_a_run_that_it_joined_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole, broken = project_of(tmp_path / "whole"), project_of(tmp_path / "broken")
    lead(whole, spec_of(whole, "fedper"), Later(whole, 2))
    post = Later(broken, 2)

    def cut(name: str, round_: int, *_: object) -> Answer | None:
        if name == LATE and round_ == 4:
            raise PowerCut
        return None

    post.accident = cut
    with pytest.raises(PowerCut):
        lead(broken, spec_of(broken, "fedper"), post)
    lead(broken, spec_of(broken, "fedper"), Later(broken, 0))
    mine, theirs = (lines(project.runs / "r" / "metrics.jsonl") for project in (broken, whole))
    assert {row_key(row): row["accuracy"] for row in mine} == {row_key(row): row["accuracy"] for row in theirs}
    assert json.loads((broken.runs / "r" / "summary.json").read_text())["left_out"] == {}


def test_one_that_does_not_show_itself_holds_nobody_up_twice(tmp_path: Path) -> None:
    project = project_of(tmp_path / "fed")
    post = Later(project, 1)
    post.accident = lambda name, *_: Answer(name, code="no-answer") if name == LATE else None
    lead(project, spec_of(project, "fedavg"), post)
    assert len(post.down[LATE]) == 3  # asked before rounds 2, 3 and 5
    assert all(len(line["up"]) == 3 for line in lines(project.runs / "r" / "traffic.jsonl"))
