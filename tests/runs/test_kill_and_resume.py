"""A run that is killed at any moment and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_help import SETTINGS, SUITED, build, contents, dies, kill_me

import fedquilt as fq
from fedquilt.core import local_training
from fedquilt.core.federation import RoundReport
from fedquilt.core.simulation import Simulation
from fedquilt.engines.select import ENGINES
from fedquilt.methods import METHODS
from fedquilt.runs.folder import RunFolder

READOUTS = ("received", "adapted", "best-of-last-2")


def run(method: str, folder: Path, engine: str = "sequential", changes: bool = False) -> fq.Run:
    options: dict[str, Any] = {"alone": False, "checkpoint_every": 2, "readouts": READOUTS, "out": folder}
    return fq.run(build(changes=changes), method, engine=engine, settings=SETTINGS.get(method), **options)


class Clock:
    """Counts the moments at which a kill could hurt: training, appending, syncing, renaming, removing."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int | None = None) -> None:
        self.moments, self.last = 0, last
        for owner, name in ((Simulation, "run"), (os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "open")):
            patch.setattr(owner, name, self.counted(getattr(owner, name)))
        patch.setattr(RunFolder, "_append", self.torn(RunFolder._append))

    def tick(self) -> None:
        if self.moments == self.last:
            kill_me()
        self.moments += 1

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return function(*args, **kwargs)

        return counting

    def torn(self, append: Callable[..., None]) -> Callable[..., None]:
        """An append that a kill may end in the middle of a line."""

        def tearing(folder: RunFolder, name: str, *lines: Any) -> None:
            if self.moments == self.last:
                append(folder, name, *lines[: len(lines) // 2])
                with (folder.folder / name).open("a") as file:
                    file.write('{"round": 1, "cli')
            self.tick()
            append(folder, name, *lines)

        return tearing


def check(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, **how: Any) -> None:
    with monkeypatch.context() as patch:
        clock = Clock(patch)
        run(method, tmp_path / "whole", **how)
    whole, total = contents(tmp_path / "whole"), clock.moments
    for number, last in enumerate(sorted(random.Random(method).sample(range(1, total), kills))):
        folder = tmp_path / f"killed-{number}"

        def until(moment: int, go: Callable[[], object]) -> Callable[[], None]:
            def begin() -> None:
                Clock(monkeypatch, moment)
                go()

            return begin

        assert dies(until(last, lambda folder=folder: run(method, folder, **how))) == -9  # type: ignore[misc]
        if not (folder / "run.toml").is_file():  # killed before it began: there is nothing to resume
            run(method, folder, **how)
        else:  # and killed again while it goes on
            dies(until(last // 2, lambda folder=folder: fq.resume(folder, build(changes=how.get("changes", False)))))  # type: ignore[misc]
            if not (folder / "summary.json").is_file():
                fq.resume(folder, build(changes=how.get("changes", False)))
        again = contents(folder)
        assert again.keys() == whole.keys(), f"killed at moment {last} of {total}"
        for name in whole:
            assert again[name] == whole[name], f"{name} differs when killed at moment {last} of {total}"


@pytest.mark.parametrize("method", SUITED)
def test_every_method_goes_on_to_the_same_bits(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(method, tmp_path, monkeypatch, kills=2)


def test_engines_that_were_found_out_are_not_found_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(federation: fq.Federation, report: RoundReport) -> None:
        if report.round == 3:
            raise RuntimeError("gone")

    options: dict[str, Any] = {"alone": False, "checkpoint_every": 1, "out": tmp_path, "engine": "auto"}
    with monkeypatch.context() as patch:
        patch.setattr(local_training, "select_engine", lambda name, spec, *_: ENGINES["sequential"](spec))
        with pytest.raises(RuntimeError, match="gone"):
            fq.run(build(), "fedavg", callbacks=[end], **options)
    monkeypatch.setattr(local_training, "select_engine", lambda *_: pytest.fail("the engines were known"))
    result = fq.resume(tmp_path, build())
    assert (result.summary["engine"], result.federation.simulation.training.names) == ("sequential", ["auto"])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_a_killed_run_leaves_no_workers_behind_and_is_free_to_go_on(tmp_path: Path) -> None:
    def end(federation: fq.Federation, report: RoundReport) -> None:
        if report.round == 3:
            (tmp_path / "workers").write_text(" ".join(str(p.pid) for p in multiprocessing.active_children()))
            kill_me()

    options: dict[str, Any] = {"alone": False, "checkpoint_every": 1, "engine": "parallel"}
    assert dies(lambda: fq.run(build(), "fedavg", callbacks=[end], out=tmp_path / "run", **options)) == -9
    fq.resume(tmp_path / "run", build())  # at once: the lock died with its owner
    workers = [int(number) for number in (tmp_path / "workers").read_text().split()]
    assert workers
    patience = time.monotonic() + 10
    while any(alive(number) for number in workers):
        assert time.monotonic() < patience, f"workers {workers} are still there"
        time.sleep(0.05)
    fq.run(build(), "fedavg", out=tmp_path / "whole", **options)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def alive(number: int) -> bool:
    """Whether there is such a process, other than one that is over and waits to be noticed."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("method", ["fedavg", "score-sharing"])
def test_clients_that_change_go_on_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(method, tmp_path, monkeypatch, kills=2, changes=True)


@pytest.mark.parametrize("method", [name for name in ("modfl", "fedmn") if name in METHODS])
def test_the_vectorised_engine_goes_on_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(random.randrange(1000))  # ambient randomness must not matter
    check(method, tmp_path, monkeypatch, kills=2, engine="vectorised")
