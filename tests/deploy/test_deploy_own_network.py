"""A method of one's own over real processes: where it is allowed, where it is not, and where it fails."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr")

from deploy_help import digits_with_public, lines, same_rows, simulate
from test_deploy_endurance import Machines, wait

from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Address, Node, Rounds

pytestmark = pytest.mark.deploy
MINE = """
from dataclasses import dataclass
from typing import ClassVar

from fedquilt.methods import FedAvg
from fedquilt.interface.steps import Install, Train


@dataclass(frozen=True)
class Slow(FedAvg):
    name: ClassVar[str] = "slow"
    rate: float = 0.01

    def local(self):
        return Install(), Train(lr=self.rate)


@dataclass(frozen=True)
class Cold(Slow):
    name: ClassVar[str] = "cold"

    def learn(self, state, updates, roster):
        raise RuntimeError("the boiler is cold")
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three clients; the owners of two allow the methods of a file that they have."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_slow.py").write_text(MINE)
    rules = Rounds(timeout=60, attempts=2)
    made = Machines(create_from_scenario(folder / "fed", digits_with_public(3), Address(port=free_port()), rules))
    for name in made.project.clients[:2]:
        own = made.project.client_folder(name)
        (own / "methods").mkdir()
        shutil.copy(folder / "own_slow.py", own / "methods")
        allowed = ("methods/own_slow.py:Slow", "methods/own_slow.py:Cold")
        dataclasses.replace(Node.read(own), allow=allowed).write()
    try:
        made.server()
        for name in made.project.clients:
            made.client(name)
        wait(lambda: list((who_is_there(made.project) or {}).values()).count("online") == 3, 120)
        yield made
    finally:
        made.end()


def own(machines: Machines, name: str) -> str:
    return f"{machines.project.folder.parent}/own_slow.py:{name}"


def test_who_allows_it_trains_as_in_a_simulation_and_who_does_not_is_left_out_by_name(machines: Machines) -> None:
    words = ["--rounds", "3", "--set", "rate=0.05"]
    assert machines.run("digits-public", own(machines, "Slow"), *words).wait(120) == 0
    said = machines.said("run").replace("\n", " ")
    assert "client-2 left out: the method is none of the library's own, and the device's owner has not allowed" in said
    assert len(re.findall(r"round +\d  2 of 2 answered", said)) == 3
    (folder,) = machines.project.runs.glob("*slow*")
    three = digits_with_public(3)
    two = dataclasses.replace(three, clients=three.clients[:2])
    there = simulate(two, own(machines, "Slow"), 3, settings={"rate": 0.05})
    same_rows(lines(folder / "metrics.jsonl"), there.rows)


def test_a_server_half_that_raises_ends_the_run_with_its_line(machines: Machines) -> None:
    assert machines.run("digits-public", own(machines, "Cold"), "--rounds", "2").wait(90) == 2
    line = MINE.splitlines().index('        raise RuntimeError("the boiler is cold")') + 1
    said = machines.said("run").rpartition("has started")[2].replace("\n", " ")
    assert f"failed: own_slow.py, line {line}, in learn: RuntimeError: the boiler is cold" in said
    assert said.count("--resume") == 1
    assert "Traceback" not in said


def test_where_no_answer_can_be_taken_the_run_ends_with_the_reason(machines: Machines) -> None:
    assert machines.run("digits-public", "fedavg", "--rounds", "2", "--set", "lr=1e30").wait(90) == 2
    said = machines.said("run").rpartition("has started")[2].replace("\n", " ")
    assert "round 1 was tried 2 times and fewer than 50% of its clients gave an answer that could be taken; " in said
    assert re.search(r"at the last try it held NaN or infinite values \(client-0, client-1, client-2\)", said)
