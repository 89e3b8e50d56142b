"""Processes are ended with what they started, and once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedquilt.deploy.ops.processes import Failed, Service

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
