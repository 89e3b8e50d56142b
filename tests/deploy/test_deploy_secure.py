"""Secure sums over letters: what the server holds opens nobody's copy, and clients may leave whenever they like."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from deploy_help import LocalPost, PowerCut, cut_at, digits_with_public, lines, same_rows
from numpy.typing import NDArray
from scipy.stats import chisquare

from fedquilt.core.federation import Federation
from fedquilt.core.simulation import Simulation
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address, Node, Project, Rounds
from fedquilt.deploy.server.coordinator import lead, make_federation
from fedquilt.deploy.server.declarations import declare
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.server.secure_exchange import SecureExchange
from fedquilt.deploy.server.silence import NoQuorum
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import pack, unpack
from fedquilt.runs.rebuilding import make_method
from fedquilt.runs.run import run
from fedquilt.secure import SecureSums, masks, shamir

CLIENTS = 5
SECURE = SecureSums()
SPEC: dict[str, Any] = {"run": "test", "rounds": 2, "seed": 0}
SILENT = ("client-0", "client-3")


def deployed(
    folder: Path, method: str = "fedavg", secure: SecureSums | None = SECURE, attempts: int = 3,
    settings: dict[str, Any] | None = None, **how: Any,
) -> tuple[Federation, LocalPost]:  # fmt: skip
    rules = Rounds(timeout=5, attempts=attempts, quorum=0.4)
    scenario = digits_with_public(**{"clients": CLIENTS, "each": 30, "hidden": 8, **how})
    project = create_from_scenario(folder, scenario, Address(), rules, None, secure)
    post = LocalPost(project)
    spec = {**SPEC, "method": method, "settings": settings or {}}
    return make_federation(project, spec, post, declare(project, spec, post)), post


def simulated(method: str = "fedavg", secure: SecureSums | None = None, settings: Any = None, **how: Any) -> Federation:
    scenario = digits_with_public(**{"clients": CLIENTS, "each": 30, "hidden": 8, **how})
    training = scenario.training.but({"rounds": 2})
    return Federation(
        scenario, make_method(method, settings), training, device="cpu", engine="sequential", secure=secure
    )  # fmt: skip


def values_of(of: Federation) -> dict[Any, torch.Tensor]:
    return {key: values.column(key) for values in of.server.all_values for key in values.keys}


def same_values(mine: Federation, other: Federation) -> None:
    expected = values_of(other)
    for key, value in values_of(mine).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def phase_of(letter: bytes) -> str:
    text = unpack(letter)[1]
    return str(text.get("phase", text["kind"]))


@pytest.mark.parametrize(
    ("method", "settings", "how"),
    [
        ("fedavg", {}, {}),
        ("fedadam", {}, {}),
        ("modfl", {"split": 2, "by": {"configuration": "everyone", "operation": "cohort"}}, {"clients": 6}),
    ],
)
def test_letters_come_to_what_the_open_merge_comes_to(
    tmp_path: Path, method: str, settings: dict[str, Any], how: dict[str, Any]
) -> None:
    (hidden, _), open_ = (
        deployed(tmp_path / "fed", method, settings=settings, **how),
        simulated(method, None, settings, **how),
    )
    same = simulated(method, SecureSums(), settings, **how)
    for _ in range(2):
        mine, theirs = hidden.step(), same.step()
        open_.step()
        assert mine.plan == theirs.plan
        assert (mine.traffic.total_up, mine.traffic.total_down) == (theirs.traffic.total_up, theirs.traffic.total_down)
        same_values(hidden, open_)
    assert remote(hidden).left_out == {}


def without(numbers: tuple[int, ...], chosen: tuple[int, ...] = tuple(range(CLIENTS))) -> Federation:
    """The open federation after a round that some clients did not take part in."""
    of = simulated()
    of.sample_clients = lambda *_: tuple(i for i in chosen if i not in numbers)  # type: ignore[method-assign]
    of.step()
    return of


@pytest.mark.parametrize("phase", ["round", "shares", "masked", "unmask"])
def test_clients_that_leave_in_any_phase_are_survived(tmp_path: Path, phase: str) -> None:
    """Two of five say nothing any more. Who sent masked numbers is in the sum, who did not is out of it."""
    of, post = deployed(tmp_path / "fed")
    gone: set[str] = set()

    def leave(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if round_ == 1 and client in SILENT and (client in gone or phase_of(letter) == phase):
            gone.add(client)
            return Answer(client, code="no-answer")
        return None

    post.accident = leave
    report = of.step()
    assert gone == set(SILENT)
    same_values(of, without(() if phase == "unmask" else (0, 3)))
    assert len(report.participants) == (5 if phase == "unmask" else 3)
    assert remote(of).left_out == {name: {"no-answer": 1} for name in SILENT}
    of.step()  # and they are back
    assert len(of.server.refused) == CLIENTS
    assert remote(of).left_out == {name: {"no-answer": 1} for name in SILENT}


def test_too_few_that_stay_make_the_round_anew_and_then_a_sentence(tmp_path: Path) -> None:
    of, post = deployed(tmp_path / "fed")
    times: list[str] = []

    def leave(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if phase_of(letter) == "masked" and client != "client-1" and len(times) < 4:
            times.append(client)
            return Answer(client, code="no-answer")
        return None

    post.accident = leave
    of.step()
    same_values(of, without(()))  # the second attempt, by all five
    assert [phase_of(letter) for letter in post.down["client-1"]][1:] == [
        "round", "shares", "masked", "round", "shares", "masked", "unmask",
    ]  # fmt: skip
    times[:] = []
    post.accident = lambda client, round_, letter, device: (
        Answer(client, code="no-answer") if phase_of(letter) == "masked" and client != "client-1" else None
    )
    with pytest.raises(NoQuorum, match="was tried 3 times"):
        of.step()


def test_a_device_that_starts_anew_in_mid_round_has_no_secrets_and_is_left_out(tmp_path: Path) -> None:
    of, post = deployed(tmp_path / "fed")

    def restart(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if client == "client-2" and phase_of(letter) == "masked":
            post.devices[client] = post.device(client)
        return None

    post.accident = restart
    of.step()
    same_values(of, without((2,)))
    assert remote(of).left_out == {"client-2": {"unsafe-sum": 1}}


def test_a_question_that_comes_again_is_not_answered(tmp_path: Path) -> None:
    """A server that asks for the other masks afterwards, with the letter of the same round, gets a code."""
    of, post = deployed(tmp_path / "fed")
    of.step()
    for name, device in post.devices.items():
        for letter in post.down[name]:
            if phase_of(letter) in ("shares", "masked", "unmask"):
                assert unpack(device.handle(letter))[1]["code"] == "unsafe-sum"


@pytest.mark.parametrize("bad", ["another's", "zero", "one twice"])
def test_keys_that_spoil_the_others_questions_cost_their_client_alone(tmp_path: Path, bad: str) -> None:
    """With such keys each neighbour would refuse to go on, and the liar alone would be left."""
    of, post = deployed(tmp_path / "fed")

    def lie(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if client != "client-3" or phase_of(letter) != "round":
            return None
        arrays, text = unpack(device.handle(letter))
        own = arrays["keys/0"]
        others = unpack(post.up["client-0"][-1])[0]["keys/0"]
        key = {"another's": others, "zero": np.zeros_like(own), "one twice": np.tile(own[:, :32], 3)}[bad]
        return Answer(client, pack({"keys/0": key}, text))

    post.accident = lie
    of.step()
    assert remote(of).left_out == {"client-3": {"bad-keys": 1}}
    same_values(of, without((3,)))


OTHER_SHAPES: dict[str, Any] = {
    "longer": lambda array: np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, 1)]),
    "one more": lambda array: np.concatenate([array, array[:1]]),
    "wider": lambda array: array.astype(np.uint32 if array.dtype == np.uint64 else np.uint64),
}


@pytest.mark.parametrize("wrong", OTHER_SHAPES)
@pytest.mark.parametrize("phase", ["round", "shares", "masked", "unmask"])
def test_answers_of_another_shape_cost_their_client_alone(tmp_path: Path, phase: str, wrong: str) -> None:
    """The others are handed some of it, or it is added to what is theirs."""
    of, post = deployed(tmp_path / "fed")

    def lie(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if client != "client-3" or phase_of(letter) != phase:
            return None
        arrays, text = unpack(device.handle(letter))
        return Answer(client, pack({name: OTHER_SHAPES[wrong](array) for name, array in arrays.items()}, text))

    post.accident = lie
    of.step()
    assert remote(of).left_out == {"client-3": {"wrong-shape": 1}}
    same_values(of, without(() if phase == "unmask" else (3,)))


def test_numbers_beyond_the_range_stay_on_their_device(tmp_path: Path) -> None:
    of, post = deployed(tmp_path / "fed", secure=SecureSums(range=0.01), attempts=1)
    with pytest.raises(NoQuorum):
        of.step()
    assert remote(of).left_out == {f"client-{i}": {"out-of-range": 1} for i in range(CLIENTS)}
    assert all(not unpack(answer)[0] for answers in post.up.values() for answer in answers)


@pytest.mark.parametrize("method", ["fedavg", "pfedhn"])  # what moved is sent as units, and as a report
def test_a_device_of_a_secure_federation_sends_no_open_copy(tmp_path: Path, method: str) -> None:
    _, post = deployed(tmp_path / "fed", attempts=1)
    project = replace(Project.read(tmp_path / "fed"), secure=None)
    spec = {**SPEC, "method": method}
    lying = make_federation(project, spec, post, declare(project, spec, post))
    with pytest.raises(NoQuorum):
        lying.step()
    assert {code for codes in remote(lying).left_out.values() for code in codes} == {"open-copy"}


def test_a_device_sends_no_reports_beside_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server says of the method that it is in."""
    of, _ = deployed(tmp_path / "fed", attempts=1)
    honest = Simulation.run
    told = {"loss": torch.zeros(1)}
    monkeypatch.setattr(Simulation, "run", lambda self, down: replace(honest(self, down), reports=told))
    with pytest.raises(NoQuorum):
        of.step()
    assert {code for codes in remote(of).left_out.values() for code in codes} == {"unsafe-sum"}


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_a_device_counts_as_a_part_of_the_largest(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its copy is multiplied by: with more it would be beyond the range that sums are opened for."""
    of, _ = deployed(tmp_path / "fed", attempts=1)
    honest = SecureExchange.told
    monkeypatch.setattr(
        SecureExchange, "told", lambda self, number: [{**circle, "share": share} for circle in honest(self, number)]
    )
    with pytest.raises(NoQuorum):
        of.step()
    assert {code for codes in remote(of).left_out.values() for code in codes} == {"unsafe-sum"}


@pytest.mark.parametrize("lie", ["one in two", "one in none", "one too many"])
def test_a_device_puts_each_of_its_units_into_one_sum(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sums of one unit, the one with a member less than the other, the difference would be a copy."""
    of, post = deployed(tmp_path / "fed", attempts=1)
    honest = SecureExchange.told

    def told(self: SecureExchange, number: int) -> list[dict[str, Any]]:
        (circle,) = honest(self, number)
        units = circle["units"]
        assert len(units) > 1
        if lie == "one in two":
            return [circle, {**circle, "units": units[:1]}]
        return [{**circle, "units": units[1:] if lie == "one in none" else (*units, "another")}]

    monkeypatch.setattr(SecureExchange, "told", told)
    with pytest.raises(NoQuorum):
        of.step()
    codes = {unpack(answers[-1])[1].get("code") for answers in post.up.values()}
    assert codes == {"unsafe-sum"}


def test_a_question_of_another_letter_is_not_answered_and_takes_no_turn(tmp_path: Path) -> None:
    """One that was late, of a try before this one: it would have the place of the question that is to come."""
    of, post = deployed(tmp_path / "fed")
    codes = []

    def late(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        arrays, text = unpack(letter)
        if text["kind"] == "secure":
            codes.append(unpack(device.handle(pack(arrays, text | {"token": "of before"})))[1].get("code"))
        return None

    post.accident = late
    of.step()
    assert codes == ["unsafe-sum"] * 3 * CLIENTS
    assert remote(of).left_out == {}


def test_the_files_say_so(tmp_path: Path) -> None:
    deployed(tmp_path / "fed", secure=SecureSums(minimum=4))
    project = Project.read(tmp_path / "fed")
    assert project.secure == SecureSums(minimum=4)
    assert all(Node.read(project.client_folder(name)).secure for name in project.clients)
    text = (tmp_path / "fed" / "federation.toml").read_text()
    (tmp_path / "fed" / "federation.toml").write_text(text.replace("minimum = 4", "minimum = 2"))
    with pytest.raises(ValueError, match="give at least 3"):
        Project.read(tmp_path / "fed")


def test_what_needs_copies_is_refused_before_a_letter_of_a_round(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not go with secure sums"):
        deployed(tmp_path / "fed", "feddl")


@pytest.mark.parametrize("moment", [14, 23, 28])  # 5 letters of hello, then 20 a round
def test_a_server_killed_within_the_protocol_goes_on_to_the_same_end(tmp_path: Path, moment: int) -> None:
    deployed(tmp_path / "fed")
    project = Project.read(tmp_path / "fed")
    spec = {**SPEC, "method": "fedper", "project": str(project.folder), "folder": str(project.runs / "r")}
    post = LocalPost(project)
    post.accident = cut_at(moment)
    with pytest.raises(PowerCut):
        lead(project, spec, post)
    lead(project, spec, LocalPost(project))
    scenario = digits_with_public(clients=CLIENTS, each=30, hidden=8)
    how: dict[str, Any] = {"device": "cpu", "engine": "sequential", "alone": False, "secure": SecureSums()}
    expected = run(scenario, "fedper", 2, **how)
    same_rows(lines(Path(spec["folder"]) / "metrics.jsonl"), expected.rows)
    assert "minimum = 3" in (Path(spec["folder"]) / "run.toml").read_text()


# --- what the server can see ------------------------------------------------------------------------------------------


def guesses(post: LocalPost, share: Mapping[str, float], secure: SecureSums) -> Iterator[NDArray[np.float64]]:
    """All that a curious server can read off what it got in a round: every array as it is, as fixed point, without the
    self mask that it put together, and the differences of any two clients' arrays."""
    answers = {name: [unpack(content)[0] for content in contents if content] for name, contents in post.up.items()}
    point, least = secure.point(CLIENTS), secure.least(CLIENTS)
    shares: dict[int, dict[int, bytes]] = {number: {} for number in range(CLIENTS)}
    for holder, name in enumerate(post.up):
        for arrays in answers[name]:
            for row, share_ in zip(range(CLIENTS), arrays.get("share/0", ()), strict=False):
                shares[row][holder] = share_.tobytes()
    arrived: dict[str, NDArray[Any]] = {}
    for number, name in enumerate(post.up):
        for arrays in answers[name]:
            values = [array for key, array in arrays.items() if key.startswith("value/")]
            if values:
                yield np.concatenate(values).astype(np.float64)
            for array in arrays.values():
                if array.dtype == point.dtype:
                    bare = array.copy()
                    if len(shares[number]) >= least:
                        seed = shamir.combine(shares[number], least)
                        bare -= masks.stream(masks.derive(seed, b"mask"), len(bare), bare.dtype)
                    for whole in (array, bare, *(bare - other for other in arrived.values())):
                        yield point.decode(whole) / share[name]
                    arrived[name] = bare


def found(post: LocalPost, of: Federation, secure: SecureSums) -> set[str]:
    """The clients whose copy, or its difference to what it received, a server could get at."""
    open_ = simulated()
    before = torch.cat([value[0] for value in values_of(open_).values()]).double().numpy()
    ((_, up),) = open_.simulation.exchange(open_.server, range(CLIENTS), ())
    copies = up.blocks[0].value.double().numpy()
    samples = [client.samples for client in open_.scenario.clients]
    share = {name: samples[i] / max(samples) for i, name in enumerate(post.up)}
    raw = [content for contents in post.up.values() for content in contents]
    hits = set()
    for number, name in enumerate(post.up):
        for secret in (copies[number], copies[number] - before):
            for kind in (np.float32, np.float16, np.float64):
                piece = secret.astype(kind)[40:72].tobytes()
                hits |= {name for content in raw if piece in content}
            for guess in guesses(post, share, secure):
                if guess.shape == secret.shape:
                    near = np.abs(guess - secret) < 1e-3 * (1 + np.abs(secret))
                    hits |= {name} if near.mean() > 0.05 else set()
    return hits


def test_no_single_update_is_in_what_the_server_gets_in_a_round(tmp_path: Path) -> None:
    of, post = deployed(tmp_path / "fed")
    of.step()
    assert found(post, of, SecureSums()) == set()
    masked = [
        a for contents in post.up.values() for c in contents for a in unpack(c)[0].values() if a.dtype == np.uint64
    ]
    assert len(masked) == CLIENTS
    for numbers in masked:
        assert chisquare(np.bincount(numbers.view(np.uint8), minlength=256)).pvalue > 1e-6


def test_the_same_search_finds_every_update_of_an_open_round(tmp_path: Path) -> None:
    of, post = deployed(tmp_path / "fed", secure=None)
    of.step()
    assert found(post, of, SecureSums()) == {f"client-{i}" for i in range(CLIENTS)}


def test_the_same_search_finds_what_is_masked_by_a_self_mask_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were masks of pairs left off, taking off the self masks would open every copy: the search would tell."""
    from fedquilt.secure.protocol import Party

    mask_keys = Party.mask_keys
    monkeypatch.setattr(Party, "mask_keys", lambda self, received: iter(list(mask_keys(self, received))[:1]))
    of, post = deployed(tmp_path / "fed")
    of.step()
    assert found(post, of, SecureSums()) == {f"client-{i}" for i in range(CLIENTS)}


def test_who_steals_a_device_finds_no_secret_of_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hides a copy is in memory alone: no seed of a round is in any file of a device, or of the server."""
    seeds: list[bytes] = []

    def fresh() -> bytes:
        seeds.append(os.urandom(masks.SEED))
        return seeds[-1]

    monkeypatch.setattr(masks, "fresh_seed", fresh)
    of, _ = deployed(tmp_path / "fed", "fedper")
    of.step(), of.step()
    files = [file for file in (tmp_path / "fed").rglob("*") if file.is_file()]
    assert any(file.suffix == ".safetensors" for file in files)  # rounds left something there
    kept = b"".join(file.read_bytes() for file in files)
    assert len(seeds) == 2 * CLIENTS * 3
    assert not any(seed in kept or seed.hex().encode() in kept for seed in seeds)
