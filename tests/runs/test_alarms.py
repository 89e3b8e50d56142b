"""Clients that somebody should look at: who fell, who is worse off than alone, and nobody by chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedquilt as fq
from fedquilt._util.metric import ACCURACY, Metric
from fedquilt.report.page_content import page_data
from fedquilt.runs.alarms import alarms, in_short


def row(client: str, at: int, score: float, split: str = "test", name: str = "accuracy", **more: Any) -> dict[str, Any]:
    told = {"round": at, "client": client, "readout": "received", "split": split, name: score, "samples": 100}
    return told | more


def test_who_fell_by_more_than_chance_is_named_by_validation_samples() -> None:
    rows = [
        row("fell", 1, 0.5, "validation"), row("fell", 2, 0.9, "validation"), row("fell", 3, 0.6, "validation"),
        row("fell", 2, 0.2), row("fell", 3, 0.9),  # on test samples nothing is looked for
        row("chance", 2, 0.84, "validation"), row("chance", 3, 0.76, "validation"),
        row("rose", 1, 0.1, "validation"), row("rose", 3, 0.9, "validation"),
        row("tested", 1, 1.0), row("tested", 3, 0.7),  # who has no validation samples
        row("few", 1, 1.0, samples=5), row("few", 3, 0.6, samples=5),  # two of five samples say nothing
        row("liar", 1, 1.0, liar=True), row("liar", 3, 0.0, liar=True),
        row("none", 1, 0.9) | {"accuracy": None},
    ]  # fmt: skip
    assert alarms(rows, [], "received", ACCURACY) == [
        "fell fell from accuracy 90.0 % in round 2 to 60.0 %",
        "tested fell from accuracy 100.0 % in round 1 to 70.0 %",
    ]
    assert alarms(rows, [], "adapted", ACCURACY) == []


def test_who_is_worse_off_than_alone_is_named() -> None:
    rows, alone = [row("a", 3, 0.6), row("b", 3, 0.78), row("c", 3, 0.9)], [row(c, 3, 0.8) for c in "abc"]
    assert alarms(rows, alone, "received", ACCURACY) == ["a has accuracy 60.0 %, alone it would have 80.0 %"]
    rmse = Metric("rmse", higher=False)
    rows = [row("a", 3, 1.2, name="rmse"), row("b", 3, 1.05, name="rmse"), row("c", 3, 0.5, name="rmse")]
    alone = [row(c, 3, 1.0, name="rmse") for c in "abc"]
    assert alarms(rows, alone, "received", rmse) == ["a has rmse 1.2, alone it would have 1"]
    assert alarms([row("a", 1, 1.0, name="rmse"), row("a", 3, 1.2, name="rmse")], [], "received", rmse) == [
        "a rose from rmse 1 in round 1 to 1.2"
    ]


def test_many_are_counted() -> None:
    assert in_short([f"{i}" for i in range(7)]) == "Look at: 0; 1; 2; 3; 4; and 2 more."
    assert in_short([]) == ""


def test_a_run_names_them_and_so_do_its_page_and_the_status(tmp_path: Path) -> None:
    """FedAvg among clients with opposite labels: who are few lose what they have alone."""
    x = [[float(i % 2), 1.0] for i in range(60)]
    y = [i % 2 for i in range(60)]
    turned = [1 - label for label in y]

    def client(name: str, labels: list[int]) -> fq.Client:
        from torch import nn

        return fq.Client(name, lambda: nn.Linear(2, 2), (x, labels), (x, labels), (x, labels))

    scenario = fq.Scenario("turned", [client(c, y) for c in "abcd"] + [client("e", turned)], fq.Training(20, lr=0.5))
    run = fq.run(scenario, "fedavg", engine="sequential", out=tmp_path / "run")
    told = run.summary["alarms"]
    assert told == [
        "e fell from accuracy 50.0 % in round 1 to 0.0 %", "e has accuracy 0.0 %, alone it would have 100.0 %"
    ]  # fmt: skip
    assert "Look at: e fell from accuracy 50.0 %" in str(run)
    assert json.loads((tmp_path / "run/summary.json").read_text())["alarms"] == told
    (page,) = page_data([tmp_path / "run"])["scenarios"]
    assert page["alarms"] == [f"fedavg, seed 0: {sentence}" for sentence in told]
    pytest.importorskip("flwr")
    from fedquilt.deploy.ops.run_facts import to_look_at

    assert to_look_at(tmp_path / "run") == told[:1]  # a federation on devices knows nobody alone
    assert to_look_at(tmp_path) == []


def test_of_many_clients_nobody_is_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedquilt.runs import result

    monkeypatch.setattr(result, "_ONE_BY_ONE", 3)
    run = fq.run(fq.scenarios.build("digits", clients=4), "fedavg", rounds=1, engine="sequential", alone=False)
    assert run.alarms([row("a", 1, 1.0)]) == []
