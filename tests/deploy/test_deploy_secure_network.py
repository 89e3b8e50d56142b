"""Secure sums over real processes: all that clients upload opens nobody's copy, and a client is killed in mid-round."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
if shutil.which("nginx") is None:
    pytest.skip("nginx is not installed", allow_module_level=True)

import torch
from deploy_help import Network, lines, row_key
from hostile import Hostile
from safetensors.torch import load_file
from test_deploy_secure import CLIENTS, SECURE, found, phase_of, simulated

from fedquilt.core.federation import Federation
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.deploy.transport.wire import unpack

pytestmark = pytest.mark.deploy
NAMES = [f"client-{i}" for i in range(CLIENTS)]
KILLED = NAMES[-1]


class Recorder(Hostile):
    """An honest client over the network that keeps what it uploads; `before` is called with each letter."""

    def __init__(self, project: Project, name: str, before: Callable[[bytes], None] = lambda _: None) -> None:
        super().__init__(project, name, "none")
        self.before = before
        self.sent: list[bytes] = []

    def _lie(self, letter: bytes, honest: bool) -> bytes:
        self.before(letter)
        self.sent.append(self.device.handle(letter))
        return self.sent[-1]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    rules = Rounds(timeout=40, quorum=0.5, grace=15)
    folder, address = tmp_path_factory.mktemp("secure") / "fed", Address(port=free_port())
    with Network(
        create_from_scenario(folder, simulated().scenario, address, rules, None, SECURE), but=NAMES
    ) as running:
        yield running


def open_rounds(took: dict[int, list[str]]) -> tuple[Federation, dict[Any, float]]:
    """The open federation in which these clients take part in each round, and its accuracies."""
    of = simulated()
    of.sample_clients = lambda round_, *_: tuple(NAMES.index(name) for name in took[round_])  # type: ignore[method-assign]
    rows = [row for _ in took for evaluation in of.step().evaluations for row in evaluation.rows()]
    return of, {row_key(row): row["accuracy"] for row in rows}


def same_end(project: Project, folder: Path, of: Federation, scores: dict[Any, float], who: list[str]) -> None:
    """A run's scores and its clients' last models are those of an open federation."""
    rows = lines(folder / "metrics.jsonl")
    assert len(rows) > 10
    assert all(abs(row["accuracy"] - scores[row_key(row)]) < 1e-6 for row in rows)
    for name in who:
        model = load_file(project.client_folder(name) / "models" / f"{folder.name}.safetensors")
        for key, value in of.model(name).state_dict().items():
            torch.testing.assert_close(model[key].to(value.dtype), value, rtol=1e-4, atol=1e-5)


def test_what_clients_upload_opens_no_copy_and_comes_to_the_open_merge(network: Network) -> None:
    with ExitStack() as stack:
        clients = {name: Recorder(network.project, name) for name in NAMES}
        for client in clients.values():
            stack.enter_context(client)
        folder, summary = network.run("fedavg", rounds=1)
    sent = {name: client.sent for name, client in clients.items()}
    assert all({"share/0", "masked/0", "shares/0", "keys/0"} <= kinds(contents) for contents in sent.values())
    assert not any(kind.startswith("value/") for contents in sent.values() for kind in kinds(contents))
    of, scores = open_rounds({1: NAMES})
    assert found(SimpleNamespace(up=sent), of, SECURE) == set()  # type: ignore[arg-type]
    assert summary["left_out"] == {}
    same_end(network.project, folder, of, scores, NAMES)


def kinds(contents: list[bytes]) -> set[str]:
    return {kind for content in contents for kind in unpack(content)[0]}


def test_a_client_killed_in_mid_round_is_out_of_that_sum(network: Network) -> None:
    """Its keys are there, and the others mask with it, when it is killed: their sum is opened."""
    network.start(KILLED)
    killed: list[bool] = []

    def kill(letter: bytes) -> None:
        if phase_of(letter) == "shares" and unpack(letter)[1]["round"] == 2 and not killed:
            network.nodes[KILLED].kill()
            killed.append(True)

    others = NAMES[:-1]
    with ExitStack() as stack:
        for name in others:
            stack.enter_context(Recorder(network.project, name, kill if name == others[0] else lambda _: None))
        folder, summary = network.run("fedavg", rounds=2)
    assert killed
    masked = {line["round"]: line["answered"] for line in lines(folder / "letters.jsonl") if line["what"] == "masked"}
    assert {round_: sorted(names) for round_, names in masked.items()} == {1: NAMES, 2: others}
    assert set(summary["left_out"]) == {KILLED}
    same_end(network.project, folder, *open_rounds({1: NAMES, 2: others}), others)
