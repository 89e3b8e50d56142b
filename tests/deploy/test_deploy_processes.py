"""Processes are ended with what they started, and once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from fedquilt.deploy.ops import server_processes
from fedquilt.deploy.ops.create import create
from fedquilt.deploy.ops.processes import Failed, Service
from fedquilt.deploy.ops.server_processes import ServerSide

PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); {}"


def start(folder: Path, then: str) -> Service:
    code = PARENT.format(then)
    return Service.start("a process", [sys.executable, "-c", code], folder / "logs" / "it.log", os.environ)


def group(service: Service) -> int:
    """How many processes are in the group and alive."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, gid = entry.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        found += int(gid) == service.process.pid and state != "Z"
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux")
@pytest.mark.parametrize("then", ["time.sleep(60)", "print('done')"])
def test_nothing_is_left_behind(tmp_path: Path, then: str) -> None:
    service = start(tmp_path, then)
    service.wait_until(lambda: group(service) >= (2 if "sleep" in then else 1), "starting", patience=20)
    if then == "print('done')":
        end = time.monotonic() + 20
        while service.alive and time.monotonic() < end:
            time.sleep(0.05)
        assert not service.alive
    service.stop()
    end = time.monotonic() + 10  # a killed orphan is gone only once somebody has reaped it
    while group(service) and time.monotonic() < end:
        time.sleep(0.05)
    assert group(service) == 0
    assert service.process.returncode is not None
    service.stop()  # once more does nothing
    service.kill()


def test_a_process_that_dies_says_why(tmp_path: Path) -> None:
    service = Service.start(
        "a process", [sys.executable, "-c", "print('no licence'); exit(3)"], tmp_path / "l", os.environ
    )
    with pytest.raises(Failed, match=r"a process ended while starting(.|\n)*no licence"):
        service.wait_until(lambda: False, "starting", patience=20)
    service.stop()


def test_patience_has_an_end(tmp_path: Path) -> None:
    service = start(tmp_path, "time.sleep(60)")
    with pytest.raises(TimeoutError, match="took more than 0 s"):
        service.wait_until(lambda: False, "answering", patience=0.2)
    service.kill()
    assert not service.alive


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerSide]:
    """A server's three processes as far as watching over them goes; time passes only where it is slept."""
    side = ServerSide(create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2))
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(server_processes, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(side, "_healthy", lambda: True)
    for name in ("superlink", "superexec", "gate"):
        words = [sys.executable, "-c", "import time; print('some words', flush=True); time.sleep(60)"]
        side._starts[name] = partial(Service.start, name, words, tmp_path / name, os.environ)
        side.services[name] = side._starts[name]()
    yield side
    for service in side.services.values():
        service.kill()


@pytest.mark.parametrize("name", ["superlink", "superexec", "gate"])
def test_whatever_the_server_started_is_started_again(watched: ServerSide, name: str) -> None:
    before = dict(watched.services)
    os.kill(before[name].process.pid, 9)
    while before[name].alive:
        time.sleep(0.01)
    says = watched.watch()
    assert f"{name} ended by itself, and is started again" in next(says)
    os.kill(before["gate" if name != "gate" else "superexec"].process.pid, 9)
    next(says)  # it watches on
    assert watched.services[name].alive
    assert watched.services[name].process.pid != before[name].process.pid


def test_a_server_that_is_alive_and_deaf_is_started_again(watched: ServerSide, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = watched.superlink
    monkeypatch.setattr(watched, "_healthy", lambda: False)
    says = watched.watch()
    assert "SuperLink has not answered for 60 s" in next(says)
    next(says)
    assert not deaf.alive
    assert watched.superlink.alive


def test_what_ends_again_and_again_is_given_up_with_its_last_words(watched: ServerSide, tmp_path: Path) -> None:
    def start_in_vain() -> Service:
        words = [sys.executable, "-c", "print('no licence')"]
        service = Service.start("SuperExec", words, tmp_path / "superexec", os.environ)
        while service.alive:
            time.sleep(0.01)
        return service

    watched._starts["superexec"] = start_in_vain
    watched.services["superexec"].kill()
    with pytest.raises(Failed, match=r"SuperExec ended 6 times in a row(.|\n)*no licence"):
        list(watched.watch())
