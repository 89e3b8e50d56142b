"""Noise in shares on devices: the server opens no sum without it, and numbers of a round leave a device once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

import torch
from deploy_help import LocalPost, PowerCut, cut_at, digits_with_public, lines
from test_deploy_secure import phase_of, values_of

import fedquilt as fq
from fedquilt.core.federation import Federation
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.deploy.server.agreement import make_terms
from fedquilt.deploy.server.coordinator import lead, make_federation
from fedquilt.deploy.server.declarations import declare
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import pack, unpack
from fedquilt.methods import FedAvg
from fedquilt.secure import SecureSums

CLIENTS = 6
NOISE: dict[str, Any] = {"noise": 1e-7, "clip": 0.5, "level": "distributed", "smallest": 3}
SPEC: dict[str, Any] = {"run": "test", "rounds": 2, "seed": 0, "method": "fedavg"}


def scenario() -> fq.Scenario:
    return digits_with_public(clients=CLIENTS, each=24)


def made(folder: Path, quorum: float = 0.4) -> Project:
    rules = Rounds(timeout=5, attempts=2, quorum=quorum)
    return create_from_scenario(folder, scenario(), Address(), rules, None, SecureSums())


def deployed(folder: Path, quorum: float = 0.4, **dp: Any) -> tuple[Federation, LocalPost]:
    project = made(folder, quorum)
    post, spec = LocalPost(project), {**SPEC, "dp": NOISE | dp}
    return make_federation(project, spec, post, declare(project, spec, post)), post


def simulated(**dp: Any) -> Federation:
    training = scenario().training.but({"rounds": 2})
    return Federation(
        scenario(), FedAvg(), training, device="cpu", engine="sequential", privacy=fq.Privacy(**NOISE | dp),
        secure=SecureSums(),
    )  # fmt: skip


def test_without_secure_sums_it_is_refused_when_the_run_is_asked_for(tmp_path: Path) -> None:
    """The command says so, before anybody is asked anything."""
    project = create_from_scenario(tmp_path, scenario(), Address())
    with pytest.raises(ValueError, match="needs secure sums: add --secure-sums"):
        make_terms(project, {**SPEC, "dp": NOISE})
    with pytest.raises(ValueError, match=r"take dp\.level=distributed"):
        make_terms(made(tmp_path / "secure"), {**SPEC, "dp": {"epsilon": 8}})


def flat(of: Federation) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values_of(of).values()])


def test_letters_come_to_what_the_simulation_comes_to(tmp_path: Path) -> None:
    """With next to no noise; scores say which, and training losses stay home."""
    here, there = deployed(tmp_path)[0], simulated()
    for _ in range(2):
        mine, theirs = here.step(), there.step()
        assert mine.epsilon == theirs.epsilon
        assert mine.traffic.total_up == theirs.traffic.total_up
        torch.testing.assert_close(flat(here), flat(there), rtol=1e-4, atol=1e-5)
    assert remote(here).left_out == {}


def test_noise_is_drawn_by_devices_alone_and_has_the_promised_length(tmp_path: Path) -> None:
    """Two federations with one seed learn the same, and have other noise: of z C / sqrt(honest), over all clients."""
    values = []
    for place in ("here", "there"):
        of, _ = deployed(tmp_path / place, noise=0.5)
        of.step()
        values.append(flat(of))
    noise = (values[0] - values[1]) / 2**0.5
    assert float(noise.std()) == pytest.approx(0.5 * 0.5 / 0.5**0.5 / CLIENTS, rel=0.1)


def silent(post: LocalPost, who: tuple[str, ...], phase: str, round_: int = 1) -> None:
    """Let some clients say nothing from a phase of a round on."""

    def leave(client: str, now: int, letter: bytes, device: Device) -> Answer | None:
        gone = now == round_ and client in who and phase_of(letter) in ("masked", "unmask")[phase == "unmask" :]
        return Answer(client, code="no-answer") if gone else None

    post.accident = leave


def test_who_leaves_is_out_and_those_who_stay_have_noise_enough(tmp_path: Path) -> None:
    """Two of six leave: the sum is that of four, each with a share by which three have enough."""
    of, post = deployed(tmp_path, noise=0.5)
    silent(post, ("client-0", "client-3"), "masked")
    assert of.step().participants == (1, 2, 4, 5)
    twin, other = deployed(tmp_path / "twin", noise=0.5)
    silent(other, ("client-0", "client-3"), "masked")
    twin.step()
    noise = (flat(of) - flat(twin)) / 2**0.5
    assert float(noise.std()) == pytest.approx(0.25 / 3**0.5 * 4**0.5 / 4, rel=0.1)


def test_a_sum_with_too_little_noise_is_not_opened_and_the_round_is_over(tmp_path: Path) -> None:
    """Five of six are wanted and two leave. No device gave a share of a mask; the next round goes on."""
    of, post = deployed(tmp_path, honest=0.8)
    silent(post, ("client-0", "client-3"), "masked")
    before = flat(of)
    of.step()
    assert torch.equal(flat(of), before)
    assert {phase_of(letter) for letters in post.down.values() for letter in letters} == {
        "hello", "round", "shares", "masked",
    }  # fmt: skip
    of.step()
    assert not torch.equal(flat(of), before)
    assert remote(of).left_out == {name: {"no-answer": 1} for name in ("client-0", "client-3")}


def test_a_sum_of_fewer_than_a_quorum_is_not_opened_though_it_has_noise_enough(tmp_path: Path) -> None:
    of, post = deployed(tmp_path, quorum=0.8)
    silent(post, ("client-0", "client-3"), "masked")  # four of the five that are wanted stay, and three have enough
    before = flat(of)
    of.step()
    assert torch.equal(flat(of), before)
    assert "unmask" not in {phase_of(letter) for letters in post.down.values() for letter in letters}
    of.step()
    assert not torch.equal(flat(of), before)


def say(post: LocalPost, codes: dict[str, list[str]]) -> None:
    """Let clients answer the round's letters with codes, and as they are when there are no more of them."""

    def answer(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if phase_of(letter) != "round" or not codes.get(client):
            return None
        code, text = codes[client].pop(0), unpack(letter)[1]
        if code == "no-answer":
            return Answer(client, code=code)
        return Answer(client, pack({}, {"code": code, "token": text["token"]}))

    post.accident = answer


def test_a_round_comes_again_for_as_long_as_those_whose_numbers_have_not_left_may_be_a_quorum(tmp_path: Path) -> None:
    """Of six, four are wanted. One's numbers had left, and two are late: at the second try they are there."""
    of, post = deployed(tmp_path, quorum=0.6)
    late = ["no-answer"]
    say(post, {"client-0": ["asked-again"] * 2, "client-1": list(late), "client-2": list(late)})
    assert of.step().participants == (1, 2, 3, 4, 5)
    assert [phase_of(letter) for letter in post.down["client-3"]] == [
        "hello", "round", "round", "shares", "masked", "unmask",
    ]  # fmt: skip


def test_a_round_is_over_where_those_whose_numbers_have_not_left_are_no_quorum(tmp_path: Path) -> None:
    """Three had left, three are no quorum of four: no number of theirs is asked for, and the next round goes on."""
    of, post = deployed(tmp_path, quorum=0.6)
    say(post, {f"client-{i}": ["asked-again"] for i in range(3)})
    before = flat(of)
    of.step()
    assert torch.equal(flat(of), before)
    assert {phase_of(letter) for letters in post.down.values() for letter in letters} == {"hello", "round"}
    of.step()
    assert not torch.equal(flat(of), before)


def test_a_device_gives_no_shares_for_a_sum_with_too_little_noise(tmp_path: Path) -> None:
    """A server that would open it all the same: five of six are wanted, and it says that four arrived."""
    of, post = deployed(tmp_path, honest=0.8)
    codes = []

    def lie(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if phase_of(letter) != "unmask":
            return None
        arrays, text = unpack(letter)
        fates = text["circles"]["0"]
        left = [number for number in fates["arrived"] if number != int(client[-1])][:2]
        text["circles"]["0"] = {"arrived": [n for n in fates["arrived"] if n not in left], "left": left}
        content = device.handle(pack(arrays, text))
        codes.append(unpack(content)[1]["code"])
        return Answer(client, content)

    post.accident = lie
    before = flat(of)
    of.step()
    assert codes == ["unsafe-sum"] * CLIENTS
    assert torch.equal(flat(of), before)  # and the round is over


def test_numbers_of_a_round_leave_once(tmp_path: Path) -> None:
    of, post = deployed(tmp_path)
    of.step()
    for name, device in post.devices.items():
        letter = next(letter for letter in post.down[name] if phase_of(letter) == "round")
        assert unpack(device.handle(letter))[1]["code"] == "asked-again"
        arrays, text = unpack(letter)
        again = device.handle(pack(arrays, text | {"round": 3}))  # a round that was not promised
        assert unpack(again)[1]["code"] == "asked-again"


def test_an_open_copy_is_not_sent_even_where_the_device_was_not_told_of_secure_sums(tmp_path: Path) -> None:
    of, post = deployed(tmp_path)
    for name in of.scenario.clients:
        file = tmp_path / "clients" / name.name / "client.toml"
        file.write_text(file.read_text().replace("secure = true", "secure = false"))
    post = LocalPost(Project.read(tmp_path))
    codes = []

    def open_(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        arrays, text = unpack(letter)
        if text["kind"] == "round":
            del text["secure"]
            codes.append(unpack(device.handle(pack(arrays, text)))[1]["code"])
        return None

    post.accident = open_
    remote(of).post = post
    of.step()
    assert codes == ["open-copy"] * CLIENTS


@pytest.mark.parametrize("moment", [20, 26])  # 6 letters of hello, 24 a round: while numbers are masked, and unmasked
def test_a_server_killed_in_a_round_loses_that_round_and_goes_on(tmp_path: Path, moment: int) -> None:
    """Whose numbers had left sends none of that round again; those of the others make a sum where they are enough."""
    project = made(tmp_path)
    spec = {**SPEC, "dp": NOISE, "project": str(project.folder), "folder": str(project.runs / "r")}
    post = LocalPost(project)
    post.accident = cut_at(moment)
    with pytest.raises(PowerCut):
        lead(project, spec, post)
    later = LocalPost(project)
    lead(project, spec, later)
    privacy = lines(Path(spec["folder"]) / "privacy.jsonl")
    assert [line["round"] for line in privacy] == [1, 2]
    refused = [
        name for name, answers in later.up.items() for answer in answers
        if unpack(answer)[1].get("code") == "asked-again"
    ]  # fmt: skip
    assert sorted(refused) == [f"client-{i}" for i in range(CLIENTS)][: 1 if moment == 20 else CLIENTS]
