"""Methods of every kind over a real network of processes: the numbers of a simulation, and what it costs in bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from deploy_help import Network, digits_with_public, lines, same_rows, simulate

from fedquilt._util.toml import values_of
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.scenario import Scenario

pytestmark = pytest.mark.deploy
ROUNDS = 3


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return digits_with_public(unlike=True)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("network") / "fed"
    with Network(create_from_scenario(folder, scenario, Address(port=free_port()), Rounds(timeout=180))) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("modfl", {"split": 2}),
        ("feddl", {"interval": 1}),
        ("fedmn", {"blocks": {"a": [2, 2], "b": [2, 2]}}),
        ("score-sharing", {}),
    ],
)
def test_the_same_numbers_as_in_a_simulation(
    network: Network, scenario: Scenario, method: str, settings: dict[str, Any]
) -> None:
    folder, summary = network.run(method, rounds=ROUNDS, settings=settings)
    expected = simulate(scenario, method, ROUNDS, settings=values_of(settings))
    same_rows(lines(folder / "metrics.jsonl"), expected.rows)
    plans = {line["round"]: line["units"] for line in lines(folder / "plans.jsonl")}
    assert {round_: plan.to_json()["units"] for round_, plan in expected.plans} == plans
    assert summary["megabytes_up"] == pytest.approx(expected.summary["megabytes_up"])
    assert summary["megabytes_down"] == pytest.approx(expected.summary["megabytes_down"])
    assert summary["left_out"] == {}


def wire_bytes(project: Project) -> dict[str, tuple[int, int]]:
    """Bytes up and down of each client so far as nginx counted them, headers and all, inside TLS."""
    total = dict.fromkeys(project.clients, (0, 0))
    for line in (project.server_folder / "nginx" / "access.log").read_text().splitlines():
        _, _, path, received, sent, name, _ = line.split()
        if path.endswith(("heartbeat", "activate-node", "get-fab", "get-run")):
            continue
        up, down = total[name]
        total[name] = up + int(received), down + int(sent)
    return total


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx does the counting")
@pytest.mark.parametrize("compress", [{}, {"up": "float16", "down": "float16"}, {"up": "int8"}, {"up": "topk"}])
def test_bytes_on_the_wire_are_those_of_the_plan_and_the_protocols_own(
    tmp_path: Path, compress: dict[str, str]
) -> None:
    """A model of 1 MB, so that the protocol's own bytes, about the same for every model, do not hide it."""
    scenario = digits_with_public(clients=2, hidden=4000)
    project = create_from_scenario(tmp_path / "fed", scenario, Address(port=free_port()), Rounds(timeout=180))
    with Network(project) as network:
        folder, summary = network.run("fedavg", rounds=2, compress=compress)
    planned = [sum(sum(line[way].values()) for line in lines(folder / "traffic.jsonl")) for way in ("up", "down")]
    letters = lines(folder / "letters.jsonl")
    ours = [sum(sum(line[way].values()) for line in letters) for way in ("bytes_up", "bytes_down")]
    wire = [sum(way) for way in zip(*wire_bytes(project).values(), strict=True)]
    # The end of a run sends the last values down once more, so that clients have them and can say how good they are.
    planned = [planned[0], planned[1] * 1.5]
    print(json.dumps({"compress": compress, "planned": planned, "letters": ours, "wire": wire}))
    own = 20_000  # bytes of headers, scores and texts
    for expected, written, moved in zip(planned, ours, wire, strict=True):
        assert expected < written < expected + own + expected * 0.02
        # the longer a round takes, the more often clients ask
        assert written < moved < written + 10 * own + written * 0.1
    assert summary["left_out"] == {}


def test_a_federation_without_protection_works_and_says_so(tmp_path: Path) -> None:
    scenario = digits_with_public(clients=2)
    address = Address(port=free_port(), tls=False, authentication=False)
    assert address.warning is not None
    with Network(create_from_scenario(tmp_path / "fed", scenario, address, Rounds(timeout=180))) as network:
        folder, _ = network.run("fedavg", rounds=1)
    same_rows(lines(folder / "metrics.jsonl"), simulate(scenario, "fedavg", 1).rows)
