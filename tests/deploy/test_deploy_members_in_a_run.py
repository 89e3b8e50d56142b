"""While a run goes on one client gets a new key, one is removed, and the server a new certificate: the others stay."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
if shutil.which("nginx") is None:
    pytest.skip("nginx is not installed", allow_module_level=True)

from deploy_help import lines
from test_deploy_endurance import Machines, wait

from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Address, Rounds
from fedquilt.scenarios import build

pytestmark = pytest.mark.deploy
CLIENTS, ROUNDS = 4, 60


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    rules = Rounds(timeout=60, quorum=0.5, grace=20)
    made = Machines(
        create_from_scenario(tmp_path / "fed", build("digits", clients=CLIENTS), Address(port=free_port()), rules)
    )
    try:
        made.server()
        for name in made.project.clients:
            made.client(name)
        wait(lambda: list((who_is_there(made.project) or {}).values()).count("online") == CLIENTS, 120)
        yield made
    finally:
        made.end()


def rounds(machines: Machines) -> list[dict[str, Any]]:
    found = [line for path in machines.project.runs.glob("*/letters.jsonl") for line in lines(path)]
    return [line for line in found if line["what"] == "round"]


def members(machines: Machines, *words: str) -> None:
    ran = machines.type("members", *words, "--dir", str(machines.project.folder))
    assert ran.wait(30) == 0, machines.said("members")


def test_the_run_goes_on_to_its_end_with_whom_belongs_to_it(machines: Machines) -> None:
    project = machines.project
    stays, rekeyed, removed, also = project.clients
    follower = machines.run("digits", "fedavg", "--rounds", str(ROUNDS))
    wait(lambda: len(rounds(machines)) >= 3, 90)

    members(machines, "renew")
    members(machines, "remove", removed)
    without = rounds(machines)[-1]["round"] + 1  # the last that it may have been asked for
    stolen = project.folder / "stolen"
    shutil.copytree(project.client_folder(rekeyed), stolen)
    members(machines, "rekey", rekeyed)
    assert (stolen / "node.key").read_bytes() != (project.client_folder(rekeyed) / "node.key").read_bytes()
    machines.running[rekeyed].terminate()
    machines.running[rekeyed].wait(30)
    machines.type("thief", "client", str(stolen))
    wait(lambda: "the server sends this client away" in machines.said("thief"), 60)
    assert who_is_there(project) == {
        stays: "online",
        rekeyed: "registered",
        also: "online",
    }  # never seen with its new key
    away = rounds(machines)[-1]["round"]

    machines.client(rekeyed)
    wait(lambda: any(rekeyed in line["answered"] for line in rounds(machines) if line["round"] > away + 1), 60)
    back = rounds(machines)[-1]["round"]
    assert back < ROUNDS - 3
    assert follower.wait(200) == 0, machines.said("run")

    asked = {line["round"]: set(line["asked"]) for line in rounds(machines)}
    assert max(asked) == ROUNDS
    assert not [round_ for round_, names in asked.items() if round_ > without and removed in names]
    assert all(asked[round_] == {stays, rekeyed, also} for round_ in range(back, ROUNDS + 1))
    answered = [set(line["answered"]) for line in rounds(machines)]
    assert all({stays, also} <= names for names in answered)
    refused = {(name, code) for line in rounds(machines) for name, code in line["refused"].items()}
    assert refused <= {(rekeyed, "no-answer"), (removed, "no-answer")}
    assert "the server is there" not in machines.said("thief")
    members(machines, "status")
    said = machines.said("members")
    assert f"{rekeyed} with a key that was replaced or taken away, from 127.0.0.1" in said
    assert re.search(rf"refused .*{removed}", said)
    for name in (stays, also):  # neither the certificate nor the others cost them anything
        assert machines.said(name).count("training samples") == 1
    print({"asked without it since": without, "away": away, "back": back})
