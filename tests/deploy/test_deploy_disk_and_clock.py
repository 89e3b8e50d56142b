"""Disks that are full and clocks that are set while a run goes on: it is the same run in the end."""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from deploy_help import LocalPost, digits_with_public, federate, lines, same_rows

from fedquilt.deploy.device.state import NodeState
from fedquilt.deploy.ops import client_processes
from fedquilt.deploy.ops.client_processes import BEAT, Care
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import Service
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.deploy.server.coordinator import lead
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.runs.run import run

FULL = OSError(errno.ENOSPC, "No space left on device")


def made(folder: Path) -> tuple[Project, dict[str, Any]]:
    project = create_from_scenario(folder, digits_with_public(each=24), Address(), Rounds(timeout=5, attempts=3))
    spec = {"run": "r", "project": str(project.folder), "folder": str(project.runs / "r"), "method": "fedper"}
    return project, {**spec, "rounds": 3}


def check(spec: dict[str, Any]) -> None:
    """The run is what a simulation gives, every round once."""
    expected = run(digits_with_public(each=24), "fedper", 3, device="cpu", engine="sequential", alone=False)
    same_rows(lines(Path(spec["folder"]) / "metrics.jsonl"), expected.rows)
    assert [line["round"] for line in lines(Path(spec["folder"]) / "traffic.jsonl")] == [1, 2, 3]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
@pytest.mark.parametrize("moment", [2, 5, 9])
def test_a_full_disk_of_the_server_stops_a_run_that_goes_on_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The disk is full from one of the files on that the server writes; later there is room again."""
    project, spec = made(tmp_path / "fed")
    written, sync = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal written
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(project.runs):
            written += 1
            if written >= moment:
                raise FULL
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left|free some space and go on with: fedquilt deploy run --resume r"):
        lead(project, spec, LocalPost(project))
    assert written >= moment
    monkeypatch.setattr(os, "fsync", sync)
    lead(project, spec, LocalPost(project))
    check(spec)


def test_a_full_disk_of_a_device_costs_it_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it cannot keep it does not send: the server would count on it later. Nobody is told why."""
    of, post = federate(tmp_path / "fed", digits_with_public(each=24), "fedper", 3)
    stage, told = NodeState.stage, []

    def full(self: NodeState, *what: Any) -> None:
        if "client-2" in str(self.folder) and of.round == 1:
            told.append(True)
            raise FULL
        stage(self, *what)

    monkeypatch.setattr(NodeState, "stage", full)
    assert [of.step().participants for _ in range(3)] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3)]
    assert told
    assert remote(of).left_out == {"client-2": {"failed": 1}}
    assert not any(b"No space" in answer for answers in post.up.values() for answer in answers)


def test_clocks_that_jump_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock of the day finds it a day ahead of, or behind, the one before."""
    project, spec = made(tmp_path / "fed")
    looks, clock = 0, time.time

    def jumping() -> float:
        nonlocal looks
        looks += 1
        return clock() + (86_400 if looks % 2 else -86_400)

    monkeypatch.setattr(time, "time", jumping)
    lead(project, spec, LocalPost(project))
    monkeypatch.undo()
    check(spec)


@pytest.mark.parametrize("beats", [True, False])
def test_a_process_is_hung_by_its_beat_and_not_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    """The clock is set on by a day while it beats: it is left alone. One without a beat is ended."""
    project, _ = made(tmp_path / "fed")
    folder = project.client_folder("client-0")
    code = "import pathlib, sys, time\nfor _ in range(30):\n    time.sleep(0.1)\n"
    code += f"    pathlib.Path({str(folder / BEAT)!r}).touch()\n" if beats else ""
    looks, clock, wait = 0, time.time, select.select

    def set_on() -> float:
        nonlocal looks
        looks += 1
        return clock() + 86_400 * (looks > 1)

    monkeypatch.setattr(time, "time", set_on)
    monkeypatch.setattr(client_processes, "_HUNG", 1.0)
    monkeypatch.setattr(select, "select", lambda r, w, x, t: wait(r, w, x, 0.1))
    service = Service.start("a process", [sys.executable, "-c", code], tmp_path / "log", os.environ, stdout=-1)
    try:
        said = list(Care([folder], [folder / "data.npz"])._lines(service))
    finally:
        service.kill()
    assert said == ([] if beats else ["the process has not moved for 1 s"])
