"""`auto` on devices: what clients report follows from their models, and is checked client by client."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deploy_help import federate

from fedquilt.core.federation import Federation
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import pack, unpack
from fedquilt.methods import Auto
from fedquilt.scenarios import build

ROUNDS, LOOK = 12, 3  # clients are asked to look in the third round


def test_clients_of_every_architecture_are_heard_and_one_that_reports_otherwise_is_not(tmp_path: Path) -> None:
    scenario = build("digits", clients=4, fraction=0.3)
    training, method = scenario.training.but({"rounds": ROUNDS}), Auto(sure=0.5)
    simulated = Federation(scenario, method, training, device="cpu", engine="sequential")
    deployed, post = federate(tmp_path / "fed", scenario, "auto", ROUNDS, settings={"sure": 0.5})
    for _ in range(LOOK + 2):  # a look and two ballots
        simulated.step(), deployed.step()
        assert deployed.server.plan == simulated.server.plan
    assert remote(deployed).left_out == {}
    assert deployed.server.state["decisions"]
    assert len(deployed.server.state["decisions"]) == len(simulated.server.state["decisions"])

    other, post = federate(tmp_path / "other", scenario, "auto", ROUNDS, settings={"sure": 0.5})

    def shorten(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if (client, round_) != ("gen2-east-1", LOOK):
            return None
        arrays, text = unpack(device.handle(letter))
        return Answer(client, pack({**arrays, "report/half-1": arrays["report/half-1"][:-1]}, text))

    post.accident = shorten
    for _ in range(LOOK):
        other.step()
    assert remote(other).left_out == {"gen2-east-1": {"wrong-shape": 1}}
