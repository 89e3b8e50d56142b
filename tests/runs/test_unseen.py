"""Clients that are held out of a run join when it is over, as if somebody had let them join by hand."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.runs import unseen
from fedquilt.runs.newcomers import hold_out

QUICK: dict[str, Any] = {"engine": "sequential", "alone": False, "rounds": 2}


@pytest.fixture(scope="module")
def digits() -> fq.Scenario:
    return fq.scenarios.build("digits", clients=9)


@pytest.mark.parametrize("method", ["modfl", "ifca", "local"])
def test_they_join_as_by_hand(method: str, digits: fq.Scenario, tmp_path: Path) -> None:
    run = fq.run(digits, method, **QUICK, unseen=2, out=tmp_path / "run")
    rest, strangers = hold_out(digits, 2)
    assert [c.name for c in run.federation.scenario.clients] == [c.name for c in rest.clients]
    fq.run(rest, method, **QUICK, out=tmp_path / "rest")
    told = run.summary["unseen"]
    for client in strangers:
        joined = fq.onboard(tmp_path / "rest", client, scenario=rest)
        expected = joined.scores["received"]["test"], joined.scores["alone"]["test"]
        assert (told[client.name]["score"], told[client.name]["alone"]) == expected
    assert run.summary["unseen_mean"] == sum(one["score"] for one in told.values()) / 2
    assert "on 2 unseen clients after they joined" in str(run)
    with pytest.raises(ValueError, match="already has a client"):  # a run directory knows who takes part in it
        fq.onboard(tmp_path / "run", rest.clients[0], scenario=digits)


def test_a_run_that_was_stopped_lets_the_same_clients_join(digits: fq.Scenario, tmp_path: Path) -> None:
    def stop(federation: fq.Federation, report: object) -> None:
        if federation.round == 1:
            raise RuntimeError("stopped")

    whole = fq.run(digits, "fedavg", **QUICK, unseen=3, seed=5)
    with pytest.raises(RuntimeError, match="stopped"):
        fq.run(
            digits, "fedavg", **QUICK, unseen=3, seed=5, out=tmp_path / "r", callbacks=[stop], checkpoint_every=1
        )  # fmt: skip
    assert tomllib.loads((tmp_path / "r/run.toml").read_text())["unseen"] == 3
    assert fq.resume(tmp_path / "r").summary["unseen"] == whole.summary["unseen"]


def test_who_is_held_out_has_tests_and_leaves_enough(digits: fq.Scenario) -> None:
    clients = [
        fq.Client(c.name, c.model, c.train, test=None if i < 7 else c.test) for i, c in enumerate(digits.clients)
    ]
    some = fq.Scenario("some", clients, label_names=digits.label_names)
    _, held = hold_out(some, 2)
    assert {c.name for c in held} == {c.name for c in clients[7:]}
    assert hold_out(some, 0) == (some, ())
    for wrong in (3, 8, -1):
        with pytest.raises(ValueError, match="cannot be held out: there are 9 clients, 2 of them"):
            hold_out(some, wrong)
    rare = fq.Client("rare", digits.clients[0].model, ([[0.0] * 2] * 4, [0, 1, 1, 9]), test=([[0.0] * 2], [1]))
    others = [fq.Client(f"o{i}", rare.model, ([[0.0] * 2] * 2, [0, 1])) for i in range(3)]
    with pytest.raises(ValueError, match="nobody of those who train has the label 9"):
        hold_out(fq.Scenario("rare", [rare, *others]), 1)


def test_a_method_that_takes_nobody_says_so(digits: fq.Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(unseen, "join", refuse)
    run = fq.run(digits, "fedavg", **QUICK, unseen=1)
    assert run.summary["unseen_refused"] == "clients that were held out could not join: no room"
    assert "no room" in str(run)


def test_both_are_columns_of_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = ["compare", "digits", "fedavg", "modfl", "--rounds", "1", "--seeds", "2", "--set", "clients=8"]
    said += ["--jobs", "1", "--engine", "sequential", "--everyone", "--unseen", "2", "--out", "c"]
    assert main([*said, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    runs = [json.loads(path.read_text()) for path in Path("c").glob("modfl-*/summary.json")]
    modfl = told["methods"][1]
    assert modfl["method"] == "modfl"
    for name in ("everyone", "unseen"):
        assert modfl[name] == pytest.approx(sum(run[f"{name}_mean"] for run in runs) / 2)
        assert modfl[f"{name}_deviation_over_seeds"] is not None
    assert modfl["clients"] == 6  # the same in both seeds
    assert main([*said, "--format", "markdown"]) == 0
    head = capfd.readouterr().out.splitlines()[0]
    assert "on everyone's data %" in head
    assert "unseen clients %" in head
    assert main([*said, "--unseen=-1"]) == 2
    assert "--unseen -1: give how many" in capfd.readouterr().err
