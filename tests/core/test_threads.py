"""How many threads a run has: what was said, what was found, what it began with; and they are given back."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.engines import threads

CPU = torch.device("cpu")


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine of eight cores on which nobody has said anything; nothing is computed there."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setattr(threads, "_found", {})
    torch.set_num_threads(8)
    yield monkeypatch
    torch.set_num_threads(before)


def timed(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> list[int]:
    """Trials take these times; which were made."""
    made: list[int] = []

    def trial(number: int) -> float:
        made.append(number)
        return seconds[number]

    monkeypatch.setattr(threads, "_seconds", trial)
    return made


@pytest.mark.parametrize(
    ("seconds", "good"),
    [
        ({1: 1.0, 8: 1.5}, 8),  # small operations gain nothing by threads, big ones do
        ({1: 1.0, 8: 40.0, 4: 0.7}, 4),
        ({1: 1.0, 8: 40.0, 4: 30.0, 2: 20.0}, 1),
    ],
)
def test_the_most_that_are_not_slower_by_far(eight: pytest.MonkeyPatch, seconds: dict[int, float], good: int) -> None:
    made = timed(eight, seconds)
    assert threads.choose_threads(None, CPU) == good
    assert threads.choose_threads(None, CPU) == good
    assert list(dict.fromkeys(made)) == list(seconds)
    assert made.count(1) == 1  # once for runs that follow one another
    assert made.count(good) == (1 if good == 1 else threads._TIMES)
    assert torch.get_num_threads() == 8


def test_one_slow_look_is_enough(eight: pytest.MonkeyPatch) -> None:
    """A busy machine may have its cores free for a moment."""
    found = {1: iter([1.0]), 8: iter([0.5, 0.5, 0.5, 90.0]), 4: iter([0.5] * threads._TIMES)}
    eight.setattr(threads, "_seconds", lambda number: next(found[number]))
    assert threads.choose_threads(None, CPU) == 4


def test_what_was_said_holds(eight: pytest.MonkeyPatch) -> None:
    made = timed(eight, {})
    assert threads.choose_threads(5, CPU) == 5
    assert threads.choose_threads(None, torch.device("cuda")) == 8
    torch.set_num_threads(3)  # fewer than half of the cores
    assert threads.choose_threads(None, CPU) == 3
    torch.set_num_threads(8)
    eight.setenv("OMP_NUM_THREADS", "8")
    assert threads.choose_threads(None, CPU) == 8
    assert not made
    with pytest.raises(ValueError, match="threads=0: give at least 1"):
        threads.choose_threads(0, CPU)


def test_a_forked_process_starts_no_threads(eight: pytest.MonkeyPatch) -> None:
    """They would wait for ever where the other process had some."""
    timed(eight, {1: 1.0, 8: 99.0, 4: 99.0, 2: 99.0})
    child = os.fork()
    if child == 0:
        os._exit(threads.choose_threads(None, CPU))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8


def test_a_trial_ends_soon_and_compares_what_it_says() -> None:
    """On one thread, which tests have: a number of threads is not slower than itself."""
    first, second = threads._seconds(1), threads._seconds(1)
    assert 0 < first < 0.1
    assert max(first, second) < 20 * min(first, second)


def test_a_run_has_what_was_found_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = fq.scenarios.build("digits", clients=4)
    seen: list[int] = []

    def look(_: object, report: object) -> None:
        seen.append(torch.get_num_threads())

    def stop(federation: fq.Federation, report: object) -> None:
        if federation.round == 1:
            raise RuntimeError("stopped")

    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "cores", lambda: 2)
    how: dict[str, Any] = {"rounds": 2, "engine": "sequential", "alone": False, "checkpoint_every": 1}
    with pytest.raises(RuntimeError, match="stopped"):
        fq.run(scenario, "fedavg", **how, threads=2, out=tmp_path / "a", callbacks=[look, stop])
    assert torch.get_num_threads() == before
    assert tomllib.loads((tmp_path / "a/run.toml").read_text())["threads"] == 2
    fq.resume(tmp_path / "a", scenario, callbacks=[look])
    assert seen == [2, 2]
    monkeypatch.chdir(tmp_path)
    assert main(["run", "a/run.toml", "--out", "again"]) == 0
    assert tomllib.loads(Path("again/run.toml").read_text())["threads"] == 2
    monkeypatch.setattr(threads, "cores", lambda: 1)  # as on a smaller machine
    assert main(["run", "a/run.toml", "--out", "smaller"]) == 0
    assert tomllib.loads(Path("smaller/run.toml").read_text())["threads"] == 1
    assert torch.get_num_threads() == before


def test_alone_has_the_threads_of_its_run(tmp_path: Path) -> None:
    fq.run(fq.scenarios.build("digits", clients=4), "fedavg", rounds=1, engine="sequential", threads=2, out=tmp_path)
    for folder in (tmp_path, tmp_path / "alone"):
        assert tomllib.loads((folder / "run.toml").read_text())["threads"] == 2


def test_the_command_takes_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = ["run", "digits", "fedavg", "--rounds", "1", "--set", "clients=4", "--engine", "sequential", "--no-alone"]
    assert main([*said, "--threads", "2", "--out", "r"]) == 0
    assert tomllib.loads(Path("r/run.toml").read_text())["threads"] == 2
    assert main([*said, "--threads", "0"]) == 2
    assert "--threads 0: give at least 1" in capfd.readouterr().err
