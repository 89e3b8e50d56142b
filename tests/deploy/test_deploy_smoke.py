"""Two clients, two rounds, real processes, TLS and node authentication: the whole way, quickly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deploy_help import Network, lines, processes_of, same_rows, simulate

from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.project import Address, Rounds
from fedquilt.report.read_runs import read_run
from fedquilt.scenarios import build


@pytest.mark.slow
def test_a_federation_of_unlike_clients_trains_as_in_a_simulation(tmp_path: Path) -> None:
    scenario = build("digits", clients=2)
    project = create_from_scenario(tmp_path / "fed", scenario, Address(port=free_port()), Rounds(timeout=120))
    assert project.server.tls
    assert project.server.authentication
    with Network(project) as network:
        folder, summary = network.run("modfl", rounds=2)
        inner = network.server.inner_port

    simulated = simulate(scenario, "modfl", 2)
    same_rows(lines(folder / "metrics.jsonl"), simulated.rows)
    assert summary["accuracy_mean"] == pytest.approx(simulated.summary["accuracy_mean"], abs=1e-6)
    assert summary["megabytes_up"] == pytest.approx(simulated.summary["megabytes_up"])
    assert summary["refused_updates"] == 0
    files = read_run(folder)  # an ordinary run directory
    assert files.clients == tuple(client.name for client in scenario.clients)
    assert (files.method, files.scenario) == ("modfl", "digits")
    for name in project.clients:
        assert len(list((project.client_folder(name) / "models").glob("*.safetensors"))) == 1

    end = time.monotonic() + 10  # Flower's helpers notice within a second or two that their parent is gone
    while processes_of(project.folder) + processes_of(Path(f"127.0.0.1:{inner}")) and time.monotonic() < end:
        time.sleep(0.2)
    assert processes_of(project.folder) == []
    assert processes_of(Path(f"127.0.0.1:{inner}")) == []
