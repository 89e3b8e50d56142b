"""Whatever a member of a secure sum answers, its circle gets a true sum, or none."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_help import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("flwr")

import fedquilt as fq
from fedquilt.core.federation import Federation
from fedquilt.deploy.device.secure_session import SecureSession
from fedquilt.deploy.server.secure_exchange import Letters, Read, SecureExchange
from fedquilt.deploy.transport.secure_codec import Told
from fedquilt.deploy.transport.wire import Refused, pack, unpack
from fedquilt.interface.messages import UnitValues, Update
from fedquilt.methods import FedAvg
from fedquilt.secure import SecureSums
from fedquilt.secure.protocol import TooFew

CLIENTS, LIAR = 5, 2
PHASES = ("keys", "shares", "masked", "unmask")
WAYS = ("byte", "cut", "without", "more", "other bytes", "other type", "longer", "shorter", "flat", "zero")


def damaged(arrays: dict[str, Any], whole: bytes, way: str, where: float, what: int) -> bytes:
    """A damaged answer; how is drawn without a look at it, since it holds other things each time."""
    at, (name, array), more = int(where * (len(whole) - 1)), next(iter(arrays.items())), np.full(1, what, np.uint8)
    if way == "byte":
        return whole[:at] + bytes([what]) + whole[at + 1 :]
    if way == "cut":
        return whole[:at]
    other: dict[str, Any] = {
        "without": {},
        "more": {name: array, "value/0": more},
        "other bytes": {name: (array.view(np.uint8) ^ np.uint8(what)).view(array.dtype)},
        "other type": {name: array.astype(np.float32)},
        "longer": {name: np.concatenate([array, array[:1]])},
        "shorter": {name: array[:-1]},
        "flat": {name: array.ravel()[None]},
        "zero": {name: np.zeros_like(array)},
    }
    return pack(other[way], {})


@pytest.fixture(scope="module")
def federation() -> Federation:
    split = (torch.ones(4, 2), torch.arange(4) % 2)
    clients = [fq.Client(f"c{i}", lambda: nn.Linear(2, 2), split, split, split) for i in range(CLIENTS)]
    scenario = fq.Scenario("dots", clients, fq.Training(rounds=1))
    return Federation(scenario, FedAvg(), device="cpu", engine="sequential", secure=SecureSums())


@fuzzed(40)
@given(when=st.sampled_from(PHASES), damage=st.tuples(st.sampled_from(WAYS), st.floats(0, 1), st.integers(0, 255)))
def test_a_damaged_answer_of_a_member_changes_no_sum_but_by_its_copy(
    federation: Federation, when: str, damage: tuple[str, float, int]
) -> None:
    server, settings = federation.server, SecureSums()
    exchange, copies = SecureExchange(server, range(CLIENTS), settings), torch.arange(6.0).repeat(CLIENTS, 1)
    (place,) = server.all_values
    sessions = {}
    for i in range(CLIENTS):
        up = Update(1, (i,), (UnitValues(place.units, place.sizes, None, copies[i : i + 1] + i),))
        told = [Told(**text) for text in exchange.told(i)]
        sessions[i] = SecureSession(up, server.instructions([i]), told, settings)
    changed = False

    def answered(number: int, phase: str, arrays: Any, read: Any) -> None:
        nonlocal changed
        content = whole = pack(arrays, {})
        if number == LIAR and phase == when:
            content = damaged(arrays, whole, *damage)
            changed = content != whole
        with contextlib.suppress(Refused):
            read(number, unpack(content)[0])

    def ask(phase: str, letters: Letters, read: Read) -> None:
        for number, (arrays, text) in letters.items():
            try:
                answer = sessions[number].answer(phase, arrays, text)
            except Refused:
                continue
            answered(number, phase, answer, read)

    for number, session in sessions.items():
        answered(number, "keys", session.keys(), exchange.take_keys)
    try:
        opened, sums, left = exchange.run(ask)
    except TooFew:
        assert changed
        return
    assert exchange.blamed <= {LIAR}
    if not opened:
        assert changed
        assert [set(circle.members) for circle in exchange.spoilt] == [set(range(CLIENTS))]
        return
    (circle,), (summed,) = opened, sums
    assert {0, 1, 3, 4} <= set(circle.members)
    assert set(circle.members) | left <= set(range(CLIENTS))
    found, weight = summed.sums.total[0].numpy(), sum(circle.shares) * circle.largest
    expected = sum((np.arange(6.0) + i) * share for i, share in zip(circle.members, circle.shares, strict=True))
    if LIAR in circle.members and when == "masked" and changed:  # another copy than it has, as any client may send
        before = place.value[0].numpy()
        assert np.linalg.norm(found / weight - before) <= 1000 * max(float(np.linalg.norm(before)), 6**0.5)
    else:
        np.testing.assert_allclose(found, expected * circle.largest, atol=1e-6)
