"""A member of secure sums that does not keep to the protocol: rubbish is never merged, and who can be told is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from deploy_help import LocalPost, digits_with_public

from fedquilt.core.federation import Federation
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address, Rounds
from fedquilt.deploy.server.coordinator import make_federation
from fedquilt.deploy.server.declarations import declare
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import pack, unpack
from fedquilt.secure import SecureSums

LIAR, EVERYBODY = "client-2", [f"client-{i}" for i in range(5)]


def deployed(folder: Path, secure: SecureSums, phase: str, lie: Any) -> Federation:
    """Five clients, one of whom changes the arrays of its answers to one question."""
    scenario = digits_with_public(clients=5, each=30, hidden=8)
    project = create_from_scenario(folder, scenario, Address(), Rounds(timeout=5, attempts=1, quorum=0.4), None, secure)
    post = LocalPost(project)
    spec = {"run": "test", "rounds": 2, "seed": 0, "method": "fedavg", "settings": {}}
    made = make_federation(project, spec, post, declare(project, spec, post))

    def accident(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        text = unpack(letter)[1]
        if client != LIAR or text.get("phase", text["kind"]) != phase:
            return None
        arrays, said = unpack(device.handle(letter))
        return Answer(client, pack({name: lie(array) for name, array in arrays.items()}, said))

    post.accident = accident
    return made


def values(of: Federation) -> torch.Tensor:
    return torch.cat([place.value.flatten() for place in of.server.all_values])


def noise(array: Any) -> Any:
    return np.frombuffer(np.random.default_rng(0).bytes(array.nbytes), array.dtype).reshape(array.shape)


def of_its_binding(keys: Any) -> Any:
    return np.concatenate([keys[:, :64], 255 - keys[:, 64:]], 1)


def of_its_mask_key(keys: Any) -> Any:
    return np.concatenate([keys[:, :3] ^ 1, keys[:, 3:]], 1)


@pytest.mark.parametrize("bits", [SecureSums(), SecureSums(bits=32, range=64.0)], ids=["64", "32"])
@pytest.mark.parametrize(
    ("phase", "lie", "told"),
    [
        ("shares", noise, "bad-shares"),  # letters that nobody can open, so that its mask cannot be taken off
        ("round", of_its_binding, "bad-shares"),  # it is bound to another secret than it gives shares of
        ("round", of_its_mask_key, "spoilt-sum"),  # masks of pairs do not cancel
        ("masked", noise, "spoilt-sum"),
        ("masked", np.zeros_like, "spoilt-sum"),
    ],
)
def test_a_circle_whose_sum_was_spoilt_is_named_and_keeps_its_value(
    tmp_path: Path, bits: SecureSums, phase: str, lie: Any, told: str
) -> None:
    of = deployed(tmp_path / "fed", bits, phase, lie)
    before = values(of)
    of.step()
    assert torch.equal(values(of), before)
    assert of.server.round == 1  # the round is not repeated: its liar could do the same again
    assert remote(of).left_out == {name: {told if name == LIAR else "spoilt-sum": 1} for name in EVERYBODY}
    assert of.server.refused.tolist() == [1] * 5
    assert remote(of).told == {name: told if name == LIAR else "spoilt-sum" for name in EVERYBODY}


def test_an_absurd_copy_is_not_in_a_circles_value(tmp_path: Path) -> None:
    """Honest masks on numbers within the range, a million times as large as anybody's."""
    of = deployed(tmp_path / "fed", SecureSums(), "masked", lambda numbers: numbers + np.uint64(2**58))
    before = values(of)
    of.step()
    assert torch.equal(values(of), before)
    assert {code for codes in remote(of).left_out.values() for code in codes} == {"spoilt-sum"}


@pytest.mark.parametrize("lie", [noise, np.zeros_like])
def test_who_gives_wrong_shares_of_others_is_named_and_the_sum_is_what_it_was(tmp_path: Path, lie: Any) -> None:
    honest = deployed(tmp_path / "honest", SecureSums(), "nothing", None)
    honest.step()
    of = deployed(tmp_path / "fed", SecureSums(), "unmask", lie)
    of.step()
    torch.testing.assert_close(values(of), values(honest), rtol=0, atol=1e-9)
    assert remote(of).left_out == {LIAR: {"bad-shares": 1}}
