"""Of a round one sum a circle is opened: of two whose members differ by one, the difference would be a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from deploy_help import LocalPost, PowerCut, digits_with_public, lines

from fedquilt.core.federation import Federation
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.deploy.server.coordinator import lead, make_federation
from fedquilt.deploy.server.declarations import declare
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import pack, unpack
from fedquilt.secure import SecureSums
from fedquilt.secure.protocol import Sum

SPEC: dict[str, Any] = {"run": "test", "rounds": 2, "seed": 0, "method": "fedavg"}
Accident = Callable[[str, int, bytes, Device], Answer | None]


def project(folder: Path, clients: int = 5, quorum: float = 0.8) -> Project:
    scenario = digits_with_public(clients=clients, each=30, hidden=8)
    return create_from_scenario(folder, scenario, Address(), Rounds(timeout=5, quorum=quorum), None, SecureSums())


def deployed(made: Project, **spec: Any) -> tuple[Federation, LocalPost]:
    post = LocalPost(made)
    return make_federation(made, {**SPEC, **spec}, post, declare(made, {**SPEC, **spec}, post)), post


def phase_of(letter: bytes) -> str:
    text = unpack(letter)[1]
    return str(text.get("phase", text["kind"]))


def silent(names: tuple[str, ...], phase: str, times: int) -> Accident:
    """Clients that say nothing to so many letters of a phase."""
    gone: list[str] = []

    def leave(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if client in names and phase_of(letter) == phase and len(gone) < times:
            gone.append(client)
            return Answer(client, code="no-answer")
        return None

    return leave


def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Whose sums the server could open, one after another."""
    found: list[list[int]] = []
    whole = Sum.open

    def told(self: Sum) -> Any:
        total = whole(self)
        found.append(sorted(self.arrived))
        return total

    monkeypatch.setattr(Sum, "open", told)
    return found


def test_a_round_that_is_repeated_was_not_opened_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five would make a sum and no quorum of four; then four come, and the fourth's copy would be bare."""
    of, post = deployed(project(tmp_path / "fed"))
    sums = opened(monkeypatch)
    post.accident = silent(("client-3", "client-4"), "masked", 2)
    of.step()
    assert sums == [[0, 1, 2, 3, 4]]
    assert remote(of).left_out == {f"client-{i}": {"no-answer": 1} for i in (3, 4)}


def test_where_one_circle_was_opened_another_that_cannot_be_keeps_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cohorts of three: of one of them two say nothing any more when masks are to come off."""
    by = {"split": 2, "by": {"configuration": "everyone", "operation": "cohort"}}
    of, post = deployed(project(tmp_path / "fed", 6, 0.3), method="modfl", settings=by)
    circle = of.server.plan["operation"].circle.tolist()  # type: ignore[union-attr]
    members = [number for number in range(6) if circle[number] == circle[0]]
    before = {key: values.column(key).clone() for values in of.server.all_values for key in values.keys}
    sums = opened(monkeypatch)
    post.accident = silent(tuple(f"client-{i}" for i in members[:2]), "unmask", 2)
    of.step()
    assert sorted(sums) == sorted([list(range(6)), [i for i in range(6) if i not in members]])
    assert [phase_of(letter) for letter in post.down["client-0"]].count("round") == 1
    for values in of.server.all_values:
        for key in values.keys:
            same = [torch.equal(now, then) for now, then in zip(values.column(key), before[key], strict=True)]
            assert sum(same) == (1 if key[0].startswith("operation") else 0)


@pytest.mark.parametrize("gone", [(), ("client-4",)])
def test_a_server_killed_after_masks_came_off_opens_the_same_sum_again_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: tuple[str, ...]
) -> None:
    """Devices know whose sum they helped to open, and help with no other one of that round."""
    made = project(tmp_path / "fed")
    spec = {**SPEC, "project": str(made.folder), "folder": str(made.runs / "r")}
    sums, post = opened(monkeypatch), LocalPost(made)

    def cut(self: Federation, *_: object) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr("fedquilt.core.server.take_sums", cut)
        with pytest.raises(PowerCut):
            lead(made, spec, post)
    assert sums == [[0, 1, 2, 3, 4]]
    later = LocalPost(made)
    later.accident = silent(gone, "round", 1)
    lead(made, spec, later)
    assert sums[1:] == ([] if gone else [[0, 1, 2, 3, 4]]) + [[0, 1, 2, 3, 4]]
    codes = [unpack(answer)[1].get("code") for answers in later.up.values() for answer in answers if answer]
    assert codes.count("unsafe-sum") == (4 if gone else 0)
    assert {row["round"] for row in lines(Path(spec["folder"]) / "metrics.jsonl")} == {1, 2}


def test_a_sum_of_as_many_others_is_another_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round comes again, and in the place of the one that was not there before another one is not."""
    made = project(tmp_path / "fed")
    sums = opened(monkeypatch)
    for gone in ("client-4", "client-3"):
        of, post = deployed(made)
        post.accident = silent((gone,), "masked", 1)
        of.step()
    assert sums == [[0, 1, 2, 3]]
    assert [unpack(post.up[f"client-{i}"][-1])[1].get("code") for i in range(3)] == ["unsafe-sum"] * 3


def test_of_long_runs_devices_keep_as_little_and_refuse_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round comes again after many, without one client: it is not noted any more, and refused for that."""
    made = project(tmp_path / "fed")
    of, _ = deployed(made, rounds=9)
    sums, files = opened(monkeypatch), list[set[str]]()
    for _ in range(9):
        of.step()
        files.append({path.name for path in tmp_path.glob("fed/clients/*/state/test/*")})
    assert files[-1] == files[2] == {"committed.safetensors", "earlier", "lock", "opened", "staged.safetensors"}
    again, post = deployed(made, rounds=9)
    post.accident = silent(("client-4",), "round", 1)
    again.step()
    assert len(sums) == 9
    assert [unpack(answers[-1])[1].get("code") for name, answers in post.up.items() if name != "client-4"] == [
        "unsafe-sum"
    ] * 4


@pytest.mark.parametrize("lie", ["share", "value"])
def test_a_sum_of_other_numbers_of_the_same_clients_is_another_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """A server that lets a round come again and tells one client otherwise could take the sums from each other."""
    made, liar = project(tmp_path / "fed"), ["client-0"]
    of, _ = deployed(made)
    of.step()
    again, post = deployed(made)
    codes = []

    def tell_otherwise(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        arrays, text = unpack(letter)
        if client in liar and text["kind"] == "round":
            if lie == "share":
                text["secure"]["circles"][0]["share"] /= 2
            else:
                arrays = {name: array + array.dtype.type(1) for name, array in arrays.items()}
            return Answer(client, device.handle(pack(arrays, text)))
        if client in liar and text.get("phase") == "unmask":
            content = device.handle(letter)
            codes.append(unpack(content)[1].get("code"))
            return Answer(client, content)
        return None

    post.accident = tell_otherwise
    again.step()
    assert codes == ["unsafe-sum"]
