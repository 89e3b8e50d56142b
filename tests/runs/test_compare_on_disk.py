"""Comparisons whose runs are on disk: reused, resumed after a kill, swept, and with their choice made honestly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli import main
from fedquilt.cli.comparison import best_setting
from fedquilt.cli.planned_runs import PlannedRun, sweep
from fedquilt.cli.request import Choices
from fedquilt.cli.workers import WorkerPool
from fedquilt.report.read_runs import run_folders

SMALL = ("--engine", "sequential", "--device", "cpu", "--set", "clients=4", "epochs=1", "fraction=0.3")
THREE = ("local", "fedavg", "fedprox")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def compare(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    code = main(("compare", "digits", *words, *SMALL, "--json"))
    told = capfd.readouterr()
    assert code == 0, told.err
    return json.loads(told.out)


def stamps(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}


def test_finished_runs_are_reused_and_new_ones_added(capfd: pytest.CaptureFixture[str]) -> None:
    first = compare(capfd, "fedavg", "fedprox", "--seeds", "2", "--rounds", "2", "--out", "c")
    before = stamps(Path("c"))
    assert sorted(name.split("-")[0] for name in before) == ["fedavg"] * 2 + ["fedprox"] * 2 + ["local"] * 2
    again = compare(capfd, "local", "fedavg", "fedprox", "--seeds", "2", "--rounds", "2", "--out", "c")
    assert stamps(Path("c")) == before  # local was there already, as the bar
    assert again["methods"][1]["accuracy"] == first["methods"][0]["accuracy"]
    assert again["methods"][2]["gain"] == pytest.approx(
        again["methods"][2]["accuracy"] - again["methods"][0]["accuracy"]
    )
    compare(capfd, "fedavg", "--seeds", "1", "--rounds", "3", "--out", "c")
    assert len(stamps(Path("c"))) == len(before) + 2  # another number of rounds is another run


def test_a_killed_comparison_goes_on_to_the_same_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("compare", "digits", *THREE, "--rounds", "6", "--out", "c", "--checkpoint-every", "1", *SMALL)
    command = [sys.executable, "-m", "fedquilt", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(list(Path("c").glob("*/checkpoint/state.json"))) > 0)
    process.kill()
    process.communicate()
    wait_for(lambda: not list(Path("c").glob("*/.lock")) or all(free(path) for path in Path("c").glob("*/.lock")))
    assert len(stamps(Path("c"))) < 3
    killed = compare(capfd, *THREE, "--rounds", "6", "--out", "c")
    whole = compare(capfd, *THREE, "--rounds", "6", "--out", "whole")
    assert killed["methods"] == whole["methods"]
    for folder in Path("whole").iterdir():
        if folder.is_dir():
            for name in ("metrics.jsonl", "plans.jsonl", "traffic.jsonl"):
                assert (folder / name).read_bytes() == (Path("c") / folder.name / name).read_bytes()


def test_ctrl_c_keeps_the_round_and_says_how_to_go_on() -> None:
    words = ("compare", "digits", *THREE, "--rounds", "500", "--out", "c", "--checkpoint-every", "1000", *SMALL)
    command = [sys.executable, "-m", "fedquilt", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(path.stat().st_size for path in Path("c").glob("*/traffic.jsonl")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; 0 of 3 runs are finished; the same command goes on from there" in err
    assert list(Path("c").glob("*/checkpoint/state.json"))
    assert "Traceback" not in err


@pytest.mark.parametrize("forked", [True, False])
def test_a_worker_that_is_only_starting_can_be_stopped(
    forked: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedquilt.cli.workers._Worker._can_be_forked", lambda worker: forked)
    pool = WorkerPool(1, Path("c"), checkpoint_every=5)
    told = []
    for news in pool.work(sweep("digits", ["fedavg"], Choices(rounds=3000, engine="sequential"), [])):
        if not pool.stopping:
            pool.stop()
        told.append(news.told if news else "")
    pool.close()
    assert told[0] == "started"
    assert told[-1] == "stopped"
    assert capfd.readouterr().err == ""


def test_runs_that_are_not_over_are_left_out_of_tables(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = sweep("digits", ["local", "fedavg"], Choices(seeds=(0, 1)), [])
    for job in jobs:
        write(tmp_path / "c", job, 0.5, 0.5)
    next((tmp_path / "c").glob("fedavg-*-seed1/summary.json")).unlink()
    assert main(("report", "c", "--format", "csv")) == 0
    told = capfd.readouterr()
    assert "not finished: 1 of 4 runs" in told.err
    assert told.out.splitlines()[1].endswith(",2,1")  # two clients, one seed that both methods have


def test_what_is_done_to_what_is_shared_is_not_done_to_clients_alone() -> None:
    """They are the bar of every merge, attack and promise alike: the same run, in the same directory."""
    (plain,) = sweep("digits", ["local"], Choices(seeds=(0,)), [])
    for merge, words in (
        ("median", ["compress.up=int8,topk"]),
        ("mean", ["dp.noise=1,2"]),
        ("mean", ["secure.bits=32,64"]),
    ):
        jobs = sweep("digits", ["local", "fedavg"], Choices(seeds=(0,), merge=merge), words)
        (alone,) = [job for job in jobs if job.name == "local"]
        assert (alone.folder, alone.label) == (plain.folder, "")
        assert [job.label for job in jobs if job.name == "fedavg"] == [
            f"{words[0].partition('=')[0]}={value}" for value in words[0].partition("=")[2].split(",")
        ]


def test_all_methods_that_apply_and_why_others_do_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three methods stand for all; one of them refuses the scenario, which has no public samples."""
    from fedquilt.methods import METHODS

    for name in METHODS.keys() - {"local", "fedavg", "score-sharing"}:
        monkeypatch.delitem(METHODS, name)
    words = ("compare", "digits", "--methods", "all", "--rounds", "1", "--out", "c", "--jobs", "1", *SMALL)
    assert main(words) == 0
    capfd.readouterr()
    before = stamps(Path("c"))
    assert main((*words, "--json")) == 0
    told = json.loads(capfd.readouterr().out)
    assert [line["method"] for line in told["methods"]] == ["local", "fedavg"]
    (why,) = [note for note in told["notes"] if note.startswith("left out is score-sharing: ")]
    assert "common" in why
    assert "\n" not in why
    assert stamps(Path("c")) == before, "what is finished is not run again"


def test_a_comparison_needs_methods(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(("compare", "digits")) == 2
    assert "name the methods to compare, or all of them" in capfd.readouterr().err


def wait_for(holds: Any, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def free(lock: Path) -> bool:
    """Whether the process that holds a lock is gone."""
    try:
        os.kill(int(lock.read_text() or "0"), 0)
    except (ProcessLookupError, FileNotFoundError, ValueError):
        return True
    return False


# --- sweeps ---------------------------------------------------------------------------------------------------------


def test_a_sweep_runs_each_setting_once_where_it_is_known() -> None:
    jobs = sweep("digits", ["local", "fedprox"], Choices(seeds=(0, 1)), ["mu=0.1,0.5"])
    assert sorted({(job.name, job.label, job.seed) for job in jobs}) == [
        ("fedprox", "mu=0.1", 0), ("fedprox", "mu=0.1", 1), ("fedprox", "mu=0.5", 0), ("fedprox", "mu=0.5", 1),
        ("local", "", 0), ("local", "", 1),
    ]  # fmt: skip
    assert len({job.folder for job in jobs}) == 6
    grid = sweep("digits", ["fedprox"], Choices(), ["mu=0.1,0.5", "lr=0.1,0.2,0.3"])
    assert sorted(job.label for job in grid)[0] == "mu=0.1 lr=0.1"
    assert len(grid) == 6


@pytest.mark.parametrize(
    ("word", "sentence"),
    [("mu", "key=a,b,c"), ("clients=4,8", "changes the task"), ("moo=1,2", "there is no setting 'moo'")],
)
def test_a_sweep_of_nonsense_is_refused(word: str, sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(("compare", "digits", "fedprox", "--sweep", word)) == 2
    assert sentence in capfd.readouterr().err
    assert not Path("runs").exists()


def write(folder: Path, job: PlannedRun, validation: float, test: float) -> None:
    """A finished run with two clients, made up."""
    place = folder / job.folder
    place.mkdir(parents=True)
    rows = [
        {"round": 1, "client": client, "readout": "received", "split": split, "accuracy": accuracy + more}
        for split, accuracy in (("validation", validation), ("test", test))
        for client, more in (("a", -0.1), ("b", 0.1))
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {"scenario": "digits", "method": job.name, "readout": "received", "split": "test", "seed": job.seed}
    (place / "summary.json").write_text(json.dumps(told))


def test_the_choice_is_made_on_validation_data_alone(tmp_path: Path) -> None:
    jobs = sweep("digits", ["local", "fedprox"], Choices(seeds=(0, 1)), ["mu=0.1,0.5"])
    scores = {"mu=0.1": (0.7, 0.5), "mu=0.5": (0.6, 0.9), "": (0.5, 0.5)}  # the second is better on test data
    for job in jobs:
        write(tmp_path / "c", job, *scores[job.label])
    chosen = best_setting(jobs, tmp_path / "c")
    assert (chosen["fedprox"].label, chosen["fedprox"].among) == ("mu=0.1", 2)
    assert chosen["fedprox"].score == pytest.approx(0.7)
    assert chosen["local"].among == 1


def test_a_swept_comparison_reports_and_lists_what_it_chose(capfd: pytest.CaptureFixture[str]) -> None:
    told = compare(capfd, "fedprox", "--sweep", "mu=0.1,5", "--rounds", "1", "--out", "c")
    assert len(stamps(Path("c"))) == 3
    assert told["chosen"]["fedprox"] in ("mu=0.1", "mu=5")
    assert "is the best of 2 settings" in told["notes"][-1]
    listed = [path.name.split("-")[0] for path in run_folders("c")]
    assert sorted(listed) == ["fedprox", "local"]  # the page is about the chosen ones
    assert main(("report", "c", "--format", "markdown")) == 0
    assert "| fedprox |" in capfd.readouterr().out.replace("**", "")
