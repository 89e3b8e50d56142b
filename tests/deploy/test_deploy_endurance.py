"""Eight clients, twenty rounds, a client killed every second round and the server killed once: nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deploy_help import lines, processes_of
from safetensors import safe_open

from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.report.read_runs import read_run
from fedquilt.runs.run import run
from fedquilt.scenarios import build

pytestmark = pytest.mark.deploy
CLIENTS, ROUNDS = 8, 20
SERVER_DIES_IN = 9


def descendants(pid: int) -> list[int]:
    """A process and all that it started, as the kernel knows them."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def cut_power(process: subprocess.Popen[bytes]) -> None:
    """Ends a machine: every process of it at once, without a word."""
    if process.poll() is not None:
        return  # its number may be another process's by now
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


class Machines:
    """The commands a user types, each in a terminal of its own."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def type(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).parent / "fedquilt"), "deploy", *words]
        with (self.project.folder / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, process_group=0)
        return self.running[name]

    def server(self) -> None:
        gate = [] if shutil.which("nginx") else ["--without-nginx"]
        self.type("server", "server", str(self.project.folder), *gate)
        wait(lambda: who_is_there(self.project) is not None, 90)

    def client(self, name: str) -> None:
        self.type(name, "client", str(self.project.client_folder(name)))

    def run(self, *words: str) -> subprocess.Popen[bytes]:
        return self.type("run", "run", *words, "--dir", str(self.project.folder))

    def said(self, name: str) -> str:
        return (self.project.folder / f"{name}.out").read_text()

    def end(self) -> None:
        """Ends everything that still runs, politely first."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            cut_power(process)


def wait(ready: object, patience: float) -> None:
    end = time.monotonic() + patience
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)


def letters(project: Project) -> list[dict[str, object]]:
    found = list(project.runs.glob("*/letters.jsonl"))
    return lines(found[0]) if found else []


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    scenario = build("digits", clients=CLIENTS)
    rules = Rounds(timeout=25, quorum=0.5, attempts=20)
    made = Machines(create_from_scenario(tmp_path / "fed", scenario, Address(port=free_port()), rules))
    try:
        yield made
    finally:
        made.end()


def test_nothing_is_lost(machines: Machines) -> None:
    project = machines.project
    machines.server()
    for name in project.clients:
        machines.client(name)
    wait(lambda: list((who_is_there(project) or {}).values()).count("online") == CLIENTS, 240)
    options = ["--rounds", str(ROUNDS), "--readouts", "received,adapted,best-of-last-3"]
    follower = machines.run("digits", "modfl", *options)

    killed: list[str] = []
    server_died = False
    end = time.monotonic() + 2400
    while True:
        assert time.monotonic() < end, machines.said("run")
        done = len({line["round"] for line in letters(project) if line["what"] == "round"})
        if follower.poll() is not None:
            assert follower.returncode == 0, machines.said("run")
            break
        if done == SERVER_DIES_IN and not server_died:  # who follows the run goes on with it by itself
            server_died = True
            time.sleep(2)
            cut_power(machines.running["server"])
            assert who_is_there(project) is None
            machines.server()
        if done % 2 == 1 and len(killed) == done // 2 and done < ROUNDS - 1:  # in the middle of every second round
            time.sleep(2)
            victim = project.clients[len(killed) % CLIENTS]
            cut_power(machines.running[victim])
            killed.append(victim)
            machines.client(victim)
        time.sleep(0.1)

    assert len(killed) >= 9
    (folder,) = [path.parent for path in project.runs.glob("*/summary.json")]
    summary = json.loads((folder / "summary.json").read_text())
    codes = {code for found in summary["left_out"].values() for code in found}
    assert "lost-state" not in codes
    assert codes <= {"no-answer", "failed"}

    # The same circles as in a simulation where nothing happens, and about as good.
    quiet = run(build("digits", clients=CLIENTS), "modfl", ROUNDS, device="cpu", engine="sequential", alone=False)
    assert lines(folder / "plans.jsonl")[-1]["units"] == quiet.plan.to_json()["units"]
    assert summary["accuracy_mean"] > quiet.summary["accuracy_mean"] - 0.05
    assert [line["round"] for line in lines(folder / "traffic.jsonl")] == list(range(1, ROUNDS + 1))
    assert read_run(folder).series

    # Every client holds the state of the last round that the server took from it.
    took: dict[str, int] = {}
    for line in lines(folder / "traffic.jsonl"):
        took |= dict.fromkeys(line["up"], line["round"])
    assert set(took) == set(project.clients)
    assert min(took.values()) >= 14, took  # everybody came back, also after the server did
    for name, last in took.items():
        states = list((project.client_folder(name) / "state").glob("*/*.safetensors"))
        rounds = set()
        for path in states:
            with safe_open(path, framework="np") as file:
                rounds.add(int((file.metadata() or {})["round"]))
        assert last in rounds, name
    machines.end()
    wait(lambda: not processes_of(project.folder), 20)
    print(json.dumps({"left_out": summary["left_out"], "seconds": summary["seconds"], "killed": killed}))
