"""A csv, an npz or a folder of them in the place of a scenario: run, repeated, extended, compared, refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.cli import main

SAID = ["--set", "label=outcome", "client=hospital", "standardise=true", "lr=0.1", "--engine", "sequential"]


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    lines = ["age,pulse,hospital,outcome"]
    for visit in range(120):
        age, pulse = draw.normal(size=2)
        lines.append(f"{50 + 10 * age:.1f},{60 + pulse:.1f},{visit % 3},{'ill' if age + pulse > 0 else 'well'}")
    Path("visits.csv").write_text("\n".join(lines) + "\n")
    return Path("visits.csv")


def test_a_run_of_a_table_is_that_of_its_scenario_and_can_be_repeated_and_extended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "visits.csv", "fedavg", *SAID, "--rounds", "2", "--no-alone", "--out", "r"]) == 0
    made = fq.scenario_from("visits.csv", label="outcome", client="hospital", standardise=True)
    run = fq.run(made, "fedavg", rounds=2, training={"lr": 0.1}, engine="sequential", alone=False)
    rows = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    assert rows == json.loads(json.dumps(run.rows))
    assert tomllib.loads(Path("r/run.toml").read_text())["scenario"]["title"] == "visits"
    Path("elsewhere").mkdir()
    assert main(["run", "r/run.toml", "--out", "again"]) == 0
    told = capfd.readouterr().err
    assert "not those that" not in told
    assert "visits: 3 clients with 24 training samples each, float32 of shape (2,); classification, labels ill" in told
    assert Path("again/metrics.jsonl").read_bytes() == Path("r/metrics.jsonl").read_bytes()
    assert main(["extend", "r", "--rounds", "3"]) == 0
    assert len(fq.load_model("r", "1").state_dict()) == 4


def test_a_table_that_changed_is_refused(table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "visits.csv", "fedavg", *SAID, "--rounds", "1", "--no-alone", "--out", "r"]) == 0
    table.write_text(table.read_text() + "50.0,60.0,1,ill\n")
    assert main(["extend", "r", "--rounds", "2"]) == 2
    assert "are not those that 'r' was run on" in capfd.readouterr().err
    assert main(["run", "r/run.toml", "--no-keep"]) == 0
    assert "the samples are not those that r/run.toml was run on" in capfd.readouterr().err


def test_it_is_compared_and_read_from_a_configuration_beside_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "visits.csv", "fedavg", *SAID, "--rounds", "1", "--jobs", "1", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["folder"] == "runs/compare-visits"
    assert told["methods"][0]["clients"] == 3
    Path("sub").mkdir()
    Path("visits.csv").rename("sub/visits.csv")
    Path("sub/mine.toml").write_text(
        'scenario = {name = "visits.csv", settings = {label = ["outcome"], client = "hospital"}}\nmethod = "fedavg"\n'
        'rounds = 1\nalone = false\nengine = "sequential"\nout = "kept"\n'
    )
    assert main(["run", "sub/mine.toml"]) == 0
    capfd.readouterr()
    assert main(["compare", "sub/mine.toml", "local"]) == 2
    assert "sub/mine.toml is of one run: fedquilt run sub/mine.toml" in capfd.readouterr().err


def test_clients_that_are_too_few_to_be_measured_are_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    Path("few.csv").write_text("a,who,label\n1,x,0\n2,y,1\n")
    assert main(["run", "few.csv", "fedavg", "--set", "client=who", "--rounds", "1", "--no-keep"]) == 0
    told = capfd.readouterr()
    assert "Nothing was measured on test data: no client has such samples" in " ".join(told.out.split())
    assert "2 clients have no test samples, and are not measured: x, y" in told.err


def test_what_was_compared_on_another_table_is_not_taken_for_this_one(
    table: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "visits.csv", "local", *SAID, "--rounds", "1", "--jobs", "1", "--no-alone", "--json"]

    def accuracy() -> float:
        assert main(words) == 0
        return float(json.loads(capfd.readouterr().out)["methods"][0]["accuracy"])

    first = accuracy()
    draw = np.random.default_rng(1)
    lines = [
        line.rpartition(",")[0] + f",{draw.choice(['ill', 'well'])}" for line in table.read_text().splitlines()[1:]
    ]
    before = table.read_text()
    table.write_text("\n".join(["age,pulse,hospital,outcome", *lines]))
    assert accuracy() != first
    table.write_text(before)
    assert accuracy() == first
    assert len(list(Path("runs/compare-visits").glob("local-*"))) == 2


def test_folders_and_several_targets() -> None:
    Path("towns").mkdir()
    for town in ("a", "b"):
        lines = "".join(f"{i},{i / 2},{-i}\n" for i in range(20))
        Path(f"towns/{town}.csv").write_text("size,left,right\n" + lines)
    said = ["--set", "label=left,right", "task=regression", "--rounds", "1", "--engine", "sequential", "--no-alone"]
    assert main(["run", "towns", "fedavg", *said, "--out", "r"]) == 0
    known = tomllib.loads(Path("r/run.toml").read_text())
    assert known["clients"] == ["a", "b"]
    assert known["task"]["kind"] == "regression"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing.csv", "fedavg"], "there is no file missing.csv"),
        (["visits.csv", "fedavg"], "no column 'label'; there are age, pulse, hospital, outcome; name it by label=..."),
        (["visits.csv", "fedavg", "--set", "label=outcom"], "did you mean 'outcome'"),
        (["visits.csv", "fedavg", "--set", "label=outcome", "client=hspital"], "did you mean 'hospital'"),
        (["visits.csv", "fedavg", "--set", "labels=outcome"], "did you mean 'label'"),
        (
            ["visits.csv", "fedavg", "--set", "label=outcome", "learning_rate=1"],
            "'learning_rate'; here it is called 'lr'",
        ),
        (["visits.csv", "fedavg", "--set", "label=outcome", "mu=1"], "no setting 'mu' here; it is one of fedprox"),
        (["visits.xlsx", "fedavg"], "visits.xlsx cannot be read: tables are csv files"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("visits.xlsx").write_bytes(b"PK")
    assert main(["run", *words, "--no-keep"]) == 2
    said = capfd.readouterr().err
    assert told in said
    assert "Traceback" not in said
