"""One registered client against a federation of real processes: it costs itself, and nobody else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")
if shutil.which("nginx") is None:
    pytest.skip("nginx is not installed", allow_module_level=True)

from deploy_help import Network, digits_with_public, lines
from hostile import Hostile

from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.project import Address, Rounds

pytestmark = pytest.mark.deploy
BAD, HONEST = "client-2", ["client-0", "client-1"]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    rules = Rounds(timeout=25, quorum=0.5, grace=8)
    scenario = digits_with_public(clients=3)
    project = create_from_scenario(
        tmp_path_factory.mktemp("hostile") / "fed", scenario, Address(port=free_port()), rules
    )
    with Network(project, but=[BAD]) as running:
        yield running


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("superlink.db*"))


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("stall", "no-answer"),
        ("badobject", "no-answer"),
        ("bomb", "no-answer"),
        ("poison", "far-from-others"),
        ("nan", "not-finite"),
        ("noise", "unreadable"),
    ],
)
def test_it_is_left_out_by_name_and_the_run_goes_on(network: Network, way: str, code: str) -> None:
    with Hostile(network.project, BAD, way) as client:
        folder, summary = network.run("fedavg", rounds=2)
    assert client.letters >= 2
    rounds = [line for line in lines(folder / "letters.jsonl") if line["what"] == "round"]
    assert [sorted(set(line["answered"]) - set(line["refused"])) for line in rounds] == [HONEST, HONEST]
    assert all(line["refused"] == {BAD: code} for line in rounds)
    assert max(line["seconds"] for line in rounds) < 20  # quorum and grace, not the time-out, and never 180 s
    assert set(summary["left_out"]) == {BAD}
    if way == "bomb":
        assert client.uploaded < 40 << 20
        assert size_of(network.project.server_folder) < 80 << 20


def test_a_declaration_that_cannot_be_keeps_its_client_out_of_the_run(network: Network) -> None:
    """Else its 400 bytes would make the server allocate gigabytes, and the shared model would be that client's."""
    with Hostile(network.project, BAD, "samples", honest=0) as client:
        folder, summary = network.run("fedavg", rounds=2)
    assert client.letters >= 1
    rounds = [line for line in lines(folder / "letters.jsonl") if line["what"] == "round"]
    assert [line["answered"] for line in rounds if set(line["asked"]) != set(HONEST)] == []
    assert summary["clients"] == 2
    (told,) = [line for line in (folder / "leader.log").read_text().splitlines() if "is not in this run" in line]
    assert f"client '{BAD}'" in told
    assert "its number of samples is not between 1 and most_samples = 1000000" in told
