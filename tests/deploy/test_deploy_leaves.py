"""What leaves a device: the bytes on the wire side of the adapter, and what must not be among them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from deploy_help import digits_with_public, federate
from safetensors.numpy import load_file

from fedquilt.deploy.device.device import Device
from fedquilt.deploy.device.node import ClientLoop
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.transport.wire import pack, unpack
from fedquilt.scenario import Scenario

SECRET = "the patient's name is Ada"


def pieces(array: np.ndarray, length: int = 16) -> list[bytes]:
    """Some stretches of an array's bytes that are no accident if they occur elsewhere."""
    flat = np.ascontiguousarray(array).reshape(-1)
    starts = range(0, max(1, len(flat) - length), max(1, len(flat) // 20))
    found = [flat[at : at + length].tobytes() for at in starts]
    return [piece for piece in found if len(set(piece)) > 8]  # a run of equal numbers is nobody's secret


def all_sent(post_up: list[bytes]) -> bytes:
    return b"".join(post_up)


@pytest.fixture
def scenario() -> Scenario:
    return digits_with_public(unlike=True)


def test_private_units_never_leave(tmp_path: Path, scenario: Scenario) -> None:
    federation, post = federate(tmp_path / "fed", scenario, "fedper", 3)
    for _ in range(3):
        federation.step()
    federation.evaluate(last=True)
    for number, name in enumerate(post.devices):
        sent = all_sent(post.up[name])
        family_state = next(
            family_state for family_state in remote(federation).stubs.family_states if number in family_state.family.ids
        )
        plan = federation.server.plan
        kept = load_file(post.project.client_folder(name) / "state" / "test" / "committed.safetensors")["row"]
        rows = torch.from_numpy(kept)[None]
        private = [unit.name for unit in family_state.family.layout.units if not bool(plan.sends(unit.name)[number])]
        shared = [unit.name for unit in family_state.family.layout.units if bool(plan.sends(unit.name)[number])]
        assert private
        for unit in private:
            for piece in pieces(family_state.family.layout.take(rows, unit).numpy()[0]):
                assert piece not in sent, f"{name}: {unit}"
        if shared:  # the test could see them: a unit that is shared is found
            unit = shared[0]
            assert any(piece in sent for piece in pieces(family_state.family.layout.take(rows, unit).numpy()[0]))


@pytest.mark.parametrize("method", ["fedavg", "feddl", "score-sharing"])
def test_raw_data_never_leave(tmp_path: Path, method: str) -> None:
    scenario = digits_with_public()
    federation, post = federate(tmp_path / "fed", scenario, method, 3)
    for _ in range(3):
        federation.step()
    federation.evaluate(last=True)
    for client in scenario.clients:
        sent = all_sent(post.up[client.name])
        for split in (client.train, client.validation, client.test):
            for sample in split.x.numpy():
                assert not any(piece in sent for piece in pieces(sample))
            assert split.y.numpy().tobytes() not in sent


def test_score_sharing_sends_no_parameters(tmp_path: Path, scenario: Scenario) -> None:
    federation, post = federate(tmp_path / "fed", scenario, "score-sharing", 2)
    federation.step()
    federation.step()
    for name in post.devices:
        arrays, _ = unpack(post.up[name][-1])
        assert {key.split("-")[0] for key in arrays if key.startswith("value/")} == {"value/label"}


def test_an_answer_says_these_things_and_no_others(tmp_path: Path, scenario: Scenario) -> None:
    federation, post = federate(tmp_path / "fed", scenario, "fedavg", 2)
    federation.step()
    federation.step()
    hello, *rounds = post.up["client-0"]
    assert set(unpack(hello)[1]) == {"member", "changes", "token", "kind"}
    assert set(unpack(hello)[1]["member"]) == {
        "name",
        "samples",
        "traits",
        "labels",
        "public",
        "units",
        "kinds",
        "statistics",
        "constant",
    }
    for answer in rounds:
        arrays, text = unpack(answer)
        assert set(text) <= {"round", "counts", "losses", "training_loss", "token", "kind"}
        assert {name.split("/")[0] for name in arrays} == {"value"}


def test_no_text_of_an_exception_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 2)

    def fail(*_: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr("fedquilt.deploy.device.device.keep", fail)
    with pytest.raises(RuntimeError, match="was tried"):
        federation.step()
    assert SECRET in capfd.readouterr().err  # on the device it is in the log
    for answers in post.up.values():
        assert SECRET.encode() not in all_sent(answers)
        assert unpack(answers[-1])[1]["code"] == "failed"


def test_not_even_where_the_program_around_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = create_from_scenario(tmp_path / "fed", digits_with_public(clients=2))
    folder = project.client_folder("client-0")
    loop = ClientLoop(folder, folder / "data.npz", print)

    def fail(_: bytes) -> bytes:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(loop.device, "handle", fail)
    assert loop._answer(b"letter") == b""
    assert SECRET in (folder / "node.log").read_text()


def test_a_letter_brings_nothing_of_others_but_their_circles(tmp_path: Path) -> None:
    """With private plans a client receives no values at all, and never another client's name."""
    federation, post = federate(tmp_path / "fed", digits_with_public(), "local", 2)
    federation.step()
    federation.step()
    for name, letters in post.down.items():
        for letter in letters[1:]:
            arrays, text = unpack(letter)
            assert not arrays
            others = [other for other in post.devices if other != name]
            assert not any(other in json.dumps(text) for other in others)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: text["terms"]["method"].update({"class": "subprocess:Popen"}), "unknown-method"),
        (lambda text: text.update(run="../../../elsewhere"), "bad-letter"),
        (lambda text: text.update(run=""), "bad-letter"),
        (lambda text: text["terms"].pop("classes"), "failed"),
        (lambda text: text.update(units=[["no-such-unit"]]), "failed"),
    ],
)
def test_a_letter_cannot_make_a_device_do_other_things(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], code: str
) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 1)
    federation.step()
    arrays, text = unpack(post.down["client-0"][-1])
    change(text)
    before = {path for path in tmp_path.rglob("*") if "state" not in path.parts}
    answer = unpack(post.devices["client-0"].handle(pack(arrays, text)))[1]
    assert answer["code"] == code
    assert {path for path in tmp_path.rglob("*") if "state" not in path.parts} == before


def test_a_device_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 1)
    federation.step()
    federation.evaluate(last=True)
    folder = post.project.client_folder("client-0")
    known = {"client.toml", "ca.crt", "node.key", "node.pub", "deploy_models.py"}
    known |= {"data.npz", "common.npz", "public_test.npz"}
    assert {p.name for p in folder.iterdir()} == known | {"state", "models"}
    assert isinstance(post.devices["client-0"], Device)
