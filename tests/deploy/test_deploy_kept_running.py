"""What watches over a client's process: it is started again, after pauses that grow, and its owner hears why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedquilt.deploy.ops import client_processes
from fedquilt.deploy.ops.client_processes import BEAT, REFUSED, Care
from fedquilt.deploy.ops.processes import Service, environment


class Processes:
    """Stand-ins for the clients' process: a line of Python each, the last one for all that follow."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
        self.folder, self.lines, self.started = folder, list(lines), list[Service]()
        self.pauses: list[float] = []
        monkeypatch.setattr(client_processes, "start_nodes", self.start)
        clock = SimpleNamespace(sleep=self.pauses.append, monotonic=time.monotonic)
        monkeypatch.setattr(client_processes, "time", clock)

    def start(self, *_: object) -> Service:
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        command, log = [sys.executable, "-c", line], self.folder / "node.log"
        service = Service.start("the clients' process", command, log, environment(self.folder), stdout=subprocess.PIPE)
        self.started.append(service)
        return service


def told(folder: Path) -> Generator[str, None, None]:
    yield from Care([folder], [folder / "data.npz"], pause=1.0).keep_running()


def test_a_process_that_ends_is_started_again_after_pauses_that_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(tmp_path, monkeypatch, "print('here')")
    said = list(islice(told(tmp_path), 8))
    assert said[::2] == ["here"] * 4
    assert said[1].endswith("; it is started again in 2 s")
    assert said[7].endswith("; it is started again in 16 s")
    assert processes.pauses == [2.0, 4.0, 8.0]
    assert len(processes.started) == 4


def test_pauses_are_short_again_once_it_has_run_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(tmp_path, monkeypatch, "print('here')")
    monkeypatch.setattr(client_processes, "_CALM", -1.0)
    list(islice(told(tmp_path), 6))
    assert processes.pauses == [1.0, 1.0]


def test_one_that_is_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(
        tmp_path, monkeypatch, "import time; print('here', flush=True); time.sleep(600)", "print('back')"
    )
    said = told(tmp_path)
    assert next(said) == "here"
    os.kill(processes.started[0].process.pid, signal.SIGKILL)
    assert next(said).startswith("its process ended")
    assert next(said) == "back"
    said.close()


def test_one_that_does_not_move_is_ended_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / BEAT).touch()
    monkeypatch.setattr(client_processes, "_HUNG", 0.5)
    monkeypatch.setattr(client_processes, "_LOOK", 0.1)
    processes = Processes(tmp_path, monkeypatch, "import time; time.sleep(600)", "print('back')")
    said = told(tmp_path)
    assert next(said) == "the process has not moved for 0 s"
    next(said)
    assert next(said) == "back"
    said.close()
    assert processes.started[0].process.poll() is not None


def test_what_is_wrong_is_an_error_at_first_and_a_sentence_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = f"print('{REFUSED}its data are gone')"
    Processes(tmp_path, monkeypatch, refusal)
    with pytest.raises(ValueError, match="its data are gone"):
        next(told(tmp_path))
    Processes(tmp_path, monkeypatch, "print('here')", refusal)
    said = list(islice(told(tmp_path), 3))
    assert said[2] == "its data are gone; it is started again in 4 s"
