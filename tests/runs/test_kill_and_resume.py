"""A run that is killed at any moment and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_help import SETTINGS, SUITED, build, contents, dies, kill_me
from safetensors.torch import load_file

import fedquilt as fq
from fedquilt.core import local_training
from fedquilt.core.federation import RoundReport
from fedquilt.core.simulation import Simulation
from fedquilt.engines.select import ENGINES
from fedquilt.methods import METHODS
from fedquilt.runs.checkpoint import Damaged
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


@pytest.mark.parametrize("method", ["fedper", "scaffold"])
def test_rows_in_a_file_and_models_in_stacks_go_on_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedquilt.core.row_store._IN_MEMORY", 0)
    monkeypatch.setattr("fedquilt.runs.saved_models._FILES", 2)
    check(method, tmp_path, monkeypatch, kills=2)
    mapped, plain = tmp_path / "whole", tmp_path / "plain"
    assert [path.name for path in (mapped / "models").glob("*.safetensors")] == ["stack-00000.safetensors"]
    monkeypatch.undo()
    run(method, plain)
    for client in ("c0", "c4"):
        state = fq.load_model(plain, client).state_dict()
        for name, tensor in fq.load_model(mapped, client).state_dict().items():
            assert torch.equal(tensor, state[name])


def test_a_checkpoint_writes_the_rows_that_changed(tmp_path: Path) -> None:
    """Of twelve clients three take part in a round: later checkpoints hold those, and lean on earlier ones."""
    scenario = build(clients=12)
    training = scenario.training.but({"share": 0.25, "rounds": 6})
    sizes: list[int] = []

    def look(federation: fq.Federation, report: RoundReport) -> None:
        state = json.loads(json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())["state"])
        files = [entry["tensors"] for entry in state["earlier"]] + [state["tensors"]]
        assert {path.name for path in (tmp_path / "run" / "checkpoint").glob("*.safetensors")} == set(files)
        rows = [len(load_file(tmp_path / "run" / "checkpoint" / name)["seen/0"]) for name in files]
        assert sum(rows) <= 2 * 12
        sizes.append(rows[-1])

    fq.run(scenario, "fedper", training=training, out=tmp_path / "run", checkpoint_every=1, alone=False,
           callbacks=[look], engine="sequential")  # fmt: skip
    assert sizes[:2] == [3, 3]


def test_an_earlier_checkpoint_that_was_changed_is_noticed(tmp_path: Path) -> None:
    scenario = build(clients=12)

    def stop(federation: fq.Federation, report: RoundReport) -> None:
        if report.round == 2:
            kill_me()

    training = scenario.training.but({"share": 0.25})
    go = partial(fq.run, scenario, "fedper", training=training, out=tmp_path / "run", checkpoint_every=1, alone=False,
                 callbacks=[stop], engine="sequential")  # fmt: skip
    assert dies(go) == -9
    first = tmp_path / "run" / "checkpoint" / "round-000001.safetensors"
    first.write_bytes(first.read_bytes()[:-1] + b"\x07")
    with pytest.raises(Damaged, match="was changed since it was written"):
        fq.resume(tmp_path / "run", scenario)
