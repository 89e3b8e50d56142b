"""Ctrl-C of the server while letters are on their way: nothing of it stays, clients do, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deploy_help import digits_with_public, lines, processes_of, same_rows, simulate
from test_deploy_endurance import Machines, wait

from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Address, Rounds
from fedquilt.scenario import Scenario

pytestmark = pytest.mark.deploy
ROUNDS = 14
# Seconds after a round's end, when letters of the next go out; and whether the command alone gets the signal, as from
# a script, or all of its terminal, as from the keyboard.
MOMENTS = [(0.0, True), (0.1, False), (0.25, True), (0.5, True)]


def scenario() -> Scenario:
    """A model of 1 MB, so that a letter takes a while to send."""
    return digits_with_public(clients=2, hidden=4000)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    rules = Rounds(timeout=40, quorum=1.0)
    made = Machines(create_from_scenario(tmp_path / "fed", scenario(), Address(port=free_port()), rules))
    try:
        made.server()
        for name in made.project.clients:
            made.client(name)
        wait(lambda: list((who_is_there(made.project) or {}).values()).count("online") == 2, 120)
        yield made
    finally:
        made.end()


def of_the_server(machines: Machines, inner: int) -> list[str]:
    """Its processes: those that name its folder and are no client's, and those that talk to its inner port."""
    folder = machines.project.folder
    named = [words for words in processes_of(folder) if f"{folder}/clients/" not in words]
    return named + processes_of(Path(f"127.0.0.1:{inner}"))


def test_nothing_of_it_stays_and_the_run_goes_on_to_the_simulations_numbers(machines: Machines) -> None:
    project = machines.project
    machines.run("digits-public", "fedper", "--rounds", str(ROUNDS))
    for cut, (delay, keyboard) in enumerate(MOMENTS):
        inner = int(json.loads((project.server_folder / "control.json").read_text())["port"])
        wait(lambda: done(machines) >= 2 * cut + 2, 90)  # noqa: B023
        time.sleep(delay)
        server = machines.running["server"]
        (os.killpg if keyboard else os.kill)(server.pid, signal.SIGINT)
        looking = machines.running["run"]
        looking.kill()  # it would go on with the run by itself
        looking.wait()
        start = time.monotonic()
        assert server.wait(30) == 0
        wait(lambda: not of_the_server(machines, inner), 10)  # noqa: B023
        print({"ended in": round(time.monotonic() - start, 1), "after": delay, "round": done(machines)})
        assert all(machines.running[name].poll() is None for name in project.clients)
        machines.server()
        machines.run("--resume")
    assert machines.running["run"].wait(120) == 0, machines.said("run")
    (folder,) = project.runs.iterdir()
    assert [line["round"] for line in lines(folder / "traffic.jsonl")] == list(range(1, ROUNDS + 1))
    same_rows(lines(folder / "metrics.jsonl"), simulate(scenario(), "fedper", ROUNDS).rows)
    assert all(machines.said(name).count("training samples") == 1 for name in project.clients)  # never started again


def done(machines: Machines) -> int:
    """Rounds that the run has completed."""
    found = [len(lines(path)) for path in machines.project.runs.glob("*/traffic.jsonl")]
    return max(found, default=0)
