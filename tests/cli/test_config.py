"""Runs from files: a configuration, and the `run.toml` of a run that is repeated."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli import main
from fedquilt.report.page_content import page_data

SMALL = ("--engine", "sequential", "--device", "cpu", "--no-alone")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(folder: str) -> list[Any]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_repeated_from_its_toml(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "clients=4", "noise=0.2", "mu=0.3", "lr=0.05", "epochs=1", "--rounds", "2", "--seed", "3"]
    more = ["--merge", "trimmed-mean", "--set", "merge.share=0.25", "--readouts", "received,knn-3", "--out", "first"]
    assert main(["run", "digits", "fedprox", *words, *more, *SMALL]) == 0
    assert main(["run", "first/run.toml", "--out", "again"]) == 0
    assert lines("first") == lines("again")
    assert main(["run", "first/run.toml", "--out", "other", "--set", "mu=0.9", "--rounds", "1", "--seed", "4"]) == 0
    told = Path("other/run.toml").read_text()
    assert "mu = 0.9" in told
    assert "rounds = 1\n" in told
    assert "seed = 4" in told
    assert "noise = 0.2" in told
    assert 'name = "trimmed-mean"' in told
    assert "alone = false" in told


def test_scenario_and_run_may_have_seeds_of_their_own() -> None:
    import fedquilt as fq

    made = fq.scenarios.build("digits", seed=5, clients=4)
    fq.run(made, "fedavg", rounds=1, seed=2, engine="sequential", alone=False, out="first")
    assert main(["run", "first/run.toml", "--out", "again"]) == 0
    assert lines("first") == lines("again")


def test_a_configuration_of_ones_own(capfd: pytest.CaptureFixture[str]) -> None:
    Path("sub").mkdir()
    Path("sub/own.py").write_text(
        "import fedquilt as fq\n\n\ndef build(seed: int = 0, clients: int = 4) -> fq.Scenario:\n"
        "    return fq.scenarios.build('digits', seed=seed, clients=clients)\n"
    )
    Path("sub/mine.toml").write_text(
        'scenario = {name = "own.py:build", settings = {clients = 5}}\nmethod = "fedper"\nrounds = 1\nalone = false\n'
        'engine = "sequential"\nreadouts = ["received"]\nout = "kept"\n[training]\nepochs = 1\n'
    )
    assert main(["run", "sub/mine.toml", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["summary"]["method"] == "fedper"
    assert told["summary"]["clients"] == 5
    assert told["summary"]["rounds"] == 1
    assert told["folder"] == "kept"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('method = "fedavg"', "does not say which scenario"),
        ('scenario = "digits"', "does not say which method"),
        ('scenario = "digits"\nmethod = "fedavg"\nrouns = 3', "did you mean 'rounds'"),
        ('scenario = "digits"\nmethod = "fedavg"\nrounds = "3"', "rounds = '3' must be a whole number"),
        ('scenario = "digits"\nmethod = "fedavg"\nalone = 1', "alone = 1 must be true or false"),
        ('scenario = "digits"\nmethod = {name = "fedprox", mu = 1}', "settings stand in [method.settings]"),
        ('scenario = {title = "mine"}\nmethod = "fedavg"', "was made by code and has no name"),
        ('scenario = "digits"\nmethod = "fedavg"\nmerge = "meen"', "did you mean 'mean'"),
        ("scenario = digits", "is not TOML"),
    ],
)
def test_what_is_wrong_is_said(text: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("c.toml").write_text(text)
    assert main(["run", "c.toml"]) == 2
    said = capfd.readouterr().err
    assert told in said
    assert "Traceback" not in said


def test_code_that_a_strangers_run_names_is_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDQUILT_STATE", str(tmp_path / "state"))
    Path("evil.py").write_text("raise SystemExit('ran')\n")
    Path("run.toml").write_text('format = 2\nmethod = "fedavg"\nscenario = {file = "evil.py:build"}\n')
    assert main(["run", "run.toml"]) == 2
    assert "none of it was run" in capfd.readouterr().err


def test_a_method_or_a_file_but_not_both(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "c.toml", "fedavg"]) == 2
    assert "says which method it runs" in capfd.readouterr().err
    assert main(["run", "digits"]) == 2
    assert "name the method to run on 'digits'" in capfd.readouterr().err


def test_yaml_says_the_same(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.toml").write_text(
        'scenario = {name = "digits", settings = {clients = 4}}\nmethod = {name = "fedprox", settings = {mu = 0.3}}\n'
        'rounds = 1\nalone = false\nengine = "sequential"\n[training]\nepochs = 1\n'
    )
    Path("a.yaml").write_text(
        "scenario:\n  name: digits\n  settings: {clients: 4}\nmethod: {name: fedprox, settings: {mu: 0.3}}\n"
        "rounds: 1\nalone: false\nengine: sequential\ntraining:\n  epochs: 1\n"
    )
    for kind in ("toml", "yaml"):
        assert main(["run", f"a.{kind}", "--out", kind]) == 0
    assert lines("toml") == lines("yaml")
    Path("bad.yml").write_text("scenario: [digits\n")
    assert main(["run", "bad.yml"]) == 2
    assert "bad.yml is not YAML" in capfd.readouterr().err
    Path("bad.yml").write_text("digits\n")
    assert main(["run", "bad.yml"]) == 2
    assert "says nothing of a run" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["run", "a.yaml"]) == 2
    assert "pip install pyyaml" in capfd.readouterr().err


def test_an_attacked_run_is_repeated_from_its_toml(capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        "--attack",
        "ipm",
        "--merge",
        "nnm+krum",
        "--set",
        "liars=0.3",
        "tau=3",
        "byzantine=0.2",
        "clients=6",
        "epochs=1",
    ]
    assert main(["run", "digits", "fedavg", "--rounds", "2", *words, *SMALL, "--out", "first"]) == 0
    assert "The 2 who lie (ipm) are not counted." in " ".join(capfd.readouterr().out.split())
    assert main(["run", "first/run.toml", "--out", "again"]) == 0
    assert lines("first") == lines("again")
    assert sum(row.get("liar", False) for row in lines("again")) == 2 * len(lines("again")) // 6
    assert main(["run", "first/run.toml", "--out", "other", "--attack", "mimic", "--rounds", "1"]) == 0
    assert 'name = "mimic"' in Path("other/run.toml").read_text()


def test_a_comparison_under_attack_is_of_the_same_honest_clients_in_all_seeds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["compare", "digits", "fedavg", "ditto", "--attack", "sign-flip", "--merge", "median", "--rounds", "1"]
    small = ["--set", "clients=8", "epochs=1", "--engine", "sequential", "--jobs", "1", "--out", "lied"]
    assert main([*words, "--liars", "0.25", "--seeds", "2", *small, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [(row["method"], row["attack"], row["clients"]) for row in told["methods"]] == [
        ("fedavg", "sign-flip, 2 of 8 lie", 6), ("ditto", "sign-flip, 2 of 8 lie", 6),
    ]  # fmt: skip
    runs = sorted(Path("lied").glob("*-seed?"))
    assert len(runs) == 6
    liars = {path.name.partition("-")[0]: set[str]() for path in runs}
    for path in runs:
        name = path.name.partition("-")[0]
        liars[name] |= {row["client"] for row in lines(str(path)) if row.get("liar")}
        assert ("[attack]" in (path / "run.toml").read_text()) is (name != "local")
    assert liars["fedavg"] == liars["ditto"]
    assert [len(liars[name]) for name in ("fedavg", "local")] == [2, 0]  # in both seeds the same
    headings = page_data([Path("lied")])["scenarios"][0]["views"][0]["table"]["headings"]
    assert headings[:2] == ["method", "attack"]
    assert main([*words, "--liars", "0.25", "--seeds", "2", *small, "--format", "csv"]) == 0  # nothing is run again
    assert capfd.readouterr().out.splitlines()[0].startswith("method,attack,")


def test_a_share_of_liars_is_said_once_and_with_an_attack(capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "compare"):
        assert main([command, "digits", "fedavg", "--liars", "0.2"]) == 2
        assert "say how they lie, as in --attack sign-flip" in capfd.readouterr().err
        assert main([command, "digits", "fedavg", "--attack", "mimic", "--liars", "0.2", "--set", "liars=0.3"]) == 2
        assert "are both given" in capfd.readouterr().err
    small = ["--rounds", "1", "--set", "clients=6", "epochs=1", *SMALL]
    assert main(["run", "digits", "fedavg", "--attack", "mimic", "--liars", "0.34", *small, "--out", "x"]) == 0
    assert "liars = 0.34" in Path("x/run.toml").read_text()


def test_all_settings_that_a_sweep_tried_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "digits", "fedprox", "--sweep", "mu=0.01,1", "--rounds", "1", "--seeds", "2", "--out", "swept"]
    assert main([*words, "--set", "clients=4", "epochs=1", "--no-alone", "--engine", "sequential", "--jobs", "1"]) == 0
    told = capfd.readouterr().out
    assert "settings tried" in told
    assert re.search(r"fedprox +mu=0\.01 +\d+\.\d ± \d+\.\d", told)
    tried = page_data([Path("swept")])["tried"]
    assert [(one["method"], one["settings"]) for one in tried] == [("fedprox", "mu=0.01"), ("fedprox", "mu=1")]
    assert [one["chosen"] for one in tried].count(True) == 1
    by_hand = []
    for seed in (0, 1):  # the first setting's mean over clients on validation data, from the rows
        (folder,) = (
            job for job in sorted(Path("swept").glob(f"*seed{seed}")) if "mu = 0.01" in (job / "run.toml").read_text()
        )
        mine = [
            row["accuracy"]
            for row in lines(str(folder))
            if (row["readout"], row["split"]) == ("received", "validation")
        ]
        by_hand.append(sum(mine) / len(mine))
    assert tried[0]["score"] == pytest.approx(sum(by_hand) / 2)
    assert tried[0]["deviation"] == pytest.approx(abs(by_hand[0] - by_hand[1]) / 2**0.5)
