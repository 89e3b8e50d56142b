"""Compression over letters: the bits of a simulation, the bytes that are counted, and codes that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from deploy_help import LocalPost, digits_with_public, federate
from torch import nn

from fedquilt import Client, Compression, Training
from fedquilt._util.toml import values_of
from fedquilt.core.federation import Federation
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.project import Project, Transfer
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.transport.packed import pack_code, unpack_code
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import Refused, pack, unpack
from fedquilt.runs.rebuilding import make_method
from fedquilt.scenario import Scenario
from fedquilt.testing import small_scenario

BAD = "client-2"
BOTH = {"up": "float16", "down": "float16"}
INT8, TOPK = {"up": "int8"}, {"up": "topk", "kept": 0.02}
KINDS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("fedavg", {}, {"unlike": True}, INT8),
    ("fedavg", {}, {"unlike": True}, TOPK),
    ("fedavg", {}, {}, {"up": "topk", "kept": 0.3, "down": "float16"}),
    ("fedavg", {}, {}, BOTH),
    ("ditto", {}, {}, TOPK),
    ("feddl", {"interval": 1}, {}, INT8),  # its clients move half-way to some circles
    ("fedmn", {"blocks": [2, 2]}, {}, TOPK),  # they choose what they send
    ("fedamp", {}, {}, INT8),  # mixtures
    ("ifca", {}, {}, {"down": "float16"}),  # offers
    ("fedfomo", {}, {}, {"down": "float16"}),  # copies
]


def normed() -> nn.Module:
    """A model whose units have running statistics beside parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 10))


def normed_clients() -> Scenario:
    clients = digits_with_public().clients
    made = [Client(c.name, normed, c.train, c.validation, c.test, labels=range(10)) for c in clients]
    return Scenario("normed", made, Training(batch=10, lr=0.1, share=0.5))


def sent_bytes(post: LocalPost, way: str, round_: int) -> int:
    """Bytes of the arrays that passed in a round; headers and text are not counted."""
    total = 0
    for letters in getattr(post, way).values():
        for letter in letters:
            arrays, text = unpack(letter)
            if text.get("round") == round_ and text.get("kind") == "round":
                total += sum(array.nbytes for name, array in arrays.items())
    return total


@pytest.mark.parametrize(("method", "settings", "which", "compress"), KINDS)
def test_letters_change_no_bit_and_bytes_are_those_that_are_sent(
    tmp_path: Path, method: str, settings: dict[str, Any], which: dict[str, Any], compress: dict[str, Any]
) -> None:
    compare(tmp_path, digits_with_public(**which), method, settings, compress)


@pytest.mark.parametrize(
    ("method", "compress"), [("fedavg", INT8), ("fedavg", {**TOPK, "down": "float16"}), ("scaffold", TOPK)]
)
def test_running_statistics_and_those_who_are_not_there(tmp_path: Path, method: str, compress: dict[str, Any]) -> None:
    compare(tmp_path, normed_clients(), method, {}, compress, rounds=5)


def compare(
    folder: Path, scenario: Scenario, method: str, settings: dict[str, Any], compress: dict[str, Any], rounds: int = 4
) -> None:  # fmt: skip
    simulated = Federation(
        scenario, make_method(method, values_of(settings)), scenario.training.but({"rounds": rounds}), device="cpu",
        engine="sequential", compress=Compression.of(compress),
    )  # fmt: skip
    deployed, post = federate(folder / "fed", scenario, method, rounds, settings=settings, compress=compress)
    for round_ in range(1, rounds + 1):
        expected, got = simulated.step(evaluate=False), deployed.step(evaluate=False)
        values = {key: place for place in simulated.server.all_values for key in place.keys}
        for place in deployed.server.all_values:
            for key in place.keys:
                torch.testing.assert_close(place.column(key), values[key].column(key), rtol=0, atol=2e-6)
        for way in ("total_up", "total_down"):
            assert getattr(got.traffic, way) == getattr(expected.traffic, way)
        assert sent_bytes(post, "up", round_) == expected.traffic.total_up
        plan = deployed.server.plan
        if not plan.offered and not plan.copies:  # what is among offers does not travel twice, nobody's copy does
            assert sent_bytes(post, "down", round_) == expected.traffic.total_down
    assert remote(deployed).left_out == {}


def test_a_device_that_is_killed_after_it_answered_sends_the_same_again(tmp_path: Path) -> None:
    """The server did not take its answer, so what waits is what waited before."""
    scenario = digits_with_public()
    whole, _ = federate(tmp_path / "whole", scenario, "fedavg", 4, compress=TOPK)
    cut, post = federate(tmp_path / "cut", scenario, "fedavg", 4, compress=TOPK)
    lost: list[bytes] = []

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        post.devices[name] = post.device(name)  # whatever a device must remember is in its files
        if name == BAD and round_ == 3 and not lost:
            lost.append(device.handle(letter))  # it trained and staged, and the answer never came
        return None

    post.accident = accident
    for _ in range(4):
        whole.step(evaluate=False), cut.step(evaluate=False)
    assert lost
    for one, other in zip(whole.server.all_values, cut.server.all_values, strict=True):
        assert torch.equal(one.value, other.value)


# --- codes that are none ----------------------------------------------------------------------------------------------


def first(arrays: dict[str, Any], part: str) -> str:
    return next(name for name in arrays if name.startswith(f"{part}/"))


def but(part: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], bytes]:
    def made(arrays: dict[str, Any], text: dict[str, Any]) -> bytes:
        name = first(arrays, part)
        now = change(arrays[name])
        return pack({k: v for k, v in arrays.items() if k != name} | ({} if now is None else {name: now}), text)

    return made


def twice(places: Any) -> Any:
    return np.concatenate([places[:1], places[:-1]])


LIES: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any], dict[str, Any]], bytes]]] = {
    "a scale of NaN": ("not-finite", INT8, but("scale", lambda a: np.full_like(a, np.nan))),
    "an infinite scale": ("not-finite", INT8, but("scale", lambda a: np.full_like(a, np.inf))),
    "a scale below 0": ("bad-code", INT8, but("scale", lambda a: -np.abs(a) - 1)),
    "an absurd scale": ("absurd-norm", INT8, but("scale", lambda a: np.full_like(a, 1e30))),
    "two scales": ("wrong-shape", INT8, but("scale", lambda a: np.concatenate([a, a]))),
    "a scale in double precision": ("wrong-dtype", INT8, but("scale", lambda a: a.astype(np.float64))),
    "no scale": ("missing-unit", INT8, but("scale", lambda a: None)),
    "numbers as they are": ("wrong-dtype", INT8, but("value", lambda a: a.astype(np.float32))),
    "too few numbers": ("wrong-shape", INT8, but("value", lambda a: a[:-1])),
    "places for int8": ("unknown-unit", INT8, lambda a, t: pack({**a, "where/x": np.ones(1, np.uint8)}, t)),
    "a place too many": ("wrong-shape", TOPK, but("where", lambda a: np.concatenate([a, a[-1:]]))),
    "a place beyond the end": ("bad-code", TOPK, but("where", lambda a: np.append(a[:-1], 65535).astype(a.dtype))),
    "a place twice": ("bad-code", TOPK, but("where", twice)),
    "places in another order": ("bad-code", TOPK, but("where", lambda a: a[::-1].copy())),
    "places that are too wide": ("wrong-dtype", TOPK, but("where", lambda a: a.astype(np.int64))),
    "no places": ("missing-unit", TOPK, but("where", lambda a: None)),
    "NaN among the largest": ("not-finite", TOPK, but("value", lambda a: np.full_like(a, np.nan))),
    "infinity as a half": ("not-finite", BOTH, but("value", lambda a: np.full_like(a, np.inf))),
    "a rest that is none": ("wrong-shape", INT8, lambda a, t: pack({**a, first(a, "value").replace("value/", "rest/"):
                                                                    np.ones(3, np.float32)}, t)),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_code_that_is_none_is_left_out(tmp_path: Path, lie: str) -> None:
    code, compress, change = LIES[lie]
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 2, compress=compress)

    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        return Answer(name, change(*unpack(device.handle(letter)))) if name == BAD else None

    post.accident = accident
    federation.step(evaluate=False)
    assert remote(federation).left_out == {BAD: {code: 1}}
    assert all(bool(place.value.isfinite().all()) for place in federation.server.all_values)


def test_bits_beyond_the_end_and_too_few_of_them_are_no_code() -> None:
    how = Compression("topk", kept=0.5)
    good = pack_code(how.encode(torch.tensor([[3.0, 0.0, -4.0, 1.0]])), how, 4)
    for marks in (0b10001, 0b0001, 0b0111, 0b0):
        with pytest.raises(Refused) as refusal:
            unpack_code({**good, "where": np.array([marks], np.uint8)}, how, 4, "u")
        assert refusal.value.code == "bad-code"
    assert unpack_code(good, how, 4, "u")["where"].tolist() == [[0, 2]]


# --- asked for --------------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compress with dp\.level=client"):
        federate(tmp_path / "a", small_scenario(), "fedavg", 1, compress=INT8, dp={"noise": 1.0, "smallest": 2})
    with pytest.raises(ValueError, match="clients of 'ifca' do not start"):
        federate(tmp_path / "b", small_scenario(), "ifca", 1, compress=INT8)


def test_a_project_from_before_says_what_to_do(tmp_path: Path) -> None:
    deployed, _ = federate(tmp_path / "fed", small_scenario(), "fedavg", 1)
    deployed.close()
    path = tmp_path / "fed" / "federation.toml"
    plain = path.read_text()
    path.write_text(plain.replace("[transfer]\n", '[transfer]\ndtype = "float32"\n'))
    assert Project.read(tmp_path / "fed").transfer == Transfer()
    path.write_text(plain.replace("[transfer]\n", '[transfer]\ndtype = "float16"\n'))
    with pytest.raises(ValueError, match=r"start runs with --set compress\.up=float16 compress\.down=float16"):
        Project.read(tmp_path / "fed")


def test_the_command_line_takes_it() -> None:
    from fedquilt.cli.deploy_runs import choose

    asked = choose("fedavg", "mean", ["compress.up=topk", "compress.kept=0.1"])
    assert asked["compress"] == {"up": "topk", "kept": 0.1}
    assert "compress" not in choose("fedavg", "mean", ["lr=0.1"])
