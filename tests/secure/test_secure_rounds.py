"""Rounds under secure sums: results are those of the open merge to the fixed point's step, and what needs more than
sums is refused."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.core.federation import Federation
from fedquilt.core.server import Server
from fedquilt.interface.messages import Update
from fedquilt.methods import METHODS, Method
from fedquilt.runs.rebuilding import make_method
from fedquilt.secure import SecureSums
from fedquilt.sharing import median

SUMS_SUFFICE = {
    "apfl", "ditto", "fedala", "fedavg", "fedbabu", "fedbn", "feddyn", "fedem", "fedper", "fedprox", "fedrep",
    "fedrod", "fml", "lg-fedavg", "modfl", "per-fedavg", "pfedme", "scaffold",
}  # fmt: skip


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def scenario(clients: int = 7, build: Any = model, rounds: int = 2, **training: Any) -> fq.Scenario:
    random = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 4, generator=random), torch.arange(count) % 3

    made = [
        fq.Client(f"c{i}", build, draw(6 + i), draw(4), draw(6), {"device": "ab"[i > 3], "cohort": "xy"[i % 2]})
        for i in range(clients)
    ]
    return fq.Scenario("points", made, fq.Training(rounds=rounds, batch=4, lr=0.1, **training))


def federation(method: Method | str = "fedavg", secure: SecureSums | None = None, **how: Any) -> Federation:
    place = how.pop("scenario", None) or scenario()
    made = make_method(method) if isinstance(method, str) else method
    return Federation(place, made, device="cpu", engine="sequential", secure=secure, **how)


def test_a_round_by_hand() -> None:
    """Weights 1, 2, 4 and copies 1, 2, -3: the sum is 1 + 4 - 12 = -7 and the mean -1; shares are 1/4, 1/2 and 1."""
    of = federation(scenario=scenario(3, lambda: nn.Linear(4, 3)), secure=SecureSums())
    (values,) = of.server.all_values
    values.plan = fq.UnitPlan([0, 0, 0], [1.0, 2.0, 4.0])
    from fedquilt.core.secure_round import circles, close
    from fedquilt.interface.messages import UnitValues

    (circle,) = circles(of.server, [0, 1, 2])
    assert circle.shares == (0.25, 0.5, 1.0)
    assert (circle.largest, circle.planned, circle.size) == (4.0, 3, 15)
    copies = torch.tensor([[1.0], [2.0], [-3.0]]).expand(3, 15)
    up = Update(1, (0, 1, 2), (UnitValues(values.units, values.sizes, None, copies),))
    ((_, answer),) = close(of.server, [(of.server.instructions([0, 1, 2]), up)], SecureSums())
    assert answer.blocks == ()
    assert answer.masked is not None
    ((summed,),) = (answer.masked.sums,)
    assert summed.sums.weight.tolist() == [7.0]
    assert torch.equal(summed.sums.total, torch.full((1, 15), -7.0, dtype=torch.float64))
    of.server.merge([answer])
    assert torch.equal(values.value, torch.full((1, 15), -1.0))


@pytest.mark.parametrize("bits", [32, 64])
def test_a_mean_is_off_by_half_a_step_for_each_member_and_no_more(bits: int) -> None:
    """A mean is sum_i s_i copy_i / sum_i s_i with shares s_i in (0, 1] whose largest is 1. Each summand is off by at
    most half a step, so the mean is by at most members * step / 2 / sum_i s_i; floats round once more on the way out.
    """
    secure = SecureSums(bits=bits, range=60.0)
    hidden, open_ = federation(secure=secure), federation()
    hidden.step(), open_.step()
    weight = torch.tensor([float(client.samples) for client in hidden.scenario.clients])
    bound = 7 * secure.point(7).step / 2 / float((weight / weight.max()).sum())
    for mine, other in zip(hidden.server.all_values, open_.server.all_values, strict=True):
        error = (mine.value.double() - other.value.double()).abs()
        slack = 2 * torch.finfo(torch.float32).eps * other.value.abs().double()
        assert bool((error <= bound + slack).all())
        if bits == 32:
            assert float(error.max()) > 0  # it is rounded, so the test can fail


def values_of(of: Federation) -> list[Tensor]:
    return [values.value for values in of.server.all_values]


@pytest.mark.parametrize("name", sorted(SUMS_SUFFICE))
def test_methods_that_need_sums_only_come_to_what_they_come_to_in_the_open(name: str) -> None:
    if name in ("apfl", "fedbabu"):
        place = scenario(build=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    else:
        place = scenario()
    method = make_method(name, {"split": 1, "by": {"operation": "everyone"}} if name == "modfl" else None)
    hidden, open_ = (federation(method, secure, scenario=place) for secure in (SecureSums(), None))
    for _ in range(2):
        mine, other = hidden.step(), open_.step()
        assert mine.plan == other.plan
        for a, b in zip(values_of(hidden), values_of(open_), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - SUMS_SUFFICE))
def test_others_are_refused_or_need_sums_only(name: str) -> None:
    """What the names above leave out is refused for a reason that is said, or works as they do."""
    try:
        method = make_method(name)
    except ValueError:
        pytest.skip("it has settings without defaults")
    try:
        federation(method, None)
    except ValueError:
        pytest.skip("it does not go with these clients, secure sums or not")
    if name == "local":
        with pytest.raises(
            ValueError, match=r"^secure sums would do nothing: clients of the method 'local' share nothing"
        ):
            federation(method, SecureSums())
    elif method.learns or name in ("fedfomo", "fedamp", "gossip"):
        with pytest.raises(ValueError, match=r"does not go with secure sums|single copies"):
            federation(method, SecureSums())
    else:
        hidden, open_ = (federation(method, secure) for secure in (SecureSums(), None))
        hidden.step(), open_.step()
        for a, b in zip(values_of(hidden), values_of(open_), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_circles_found_in_copies_are_refused() -> None:
    found = make_method("modfl", {"split": 1, "by": {"configuration": "device", "operation": "found"}})
    with pytest.raises(ValueError, match="learns from what single clients send"):
        federation(found, SecureSums())


def test_merges_that_look_at_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="looks at single copies"):
        federation(secure=SecureSums(), rule=median)


@pytest.mark.parametrize("how", [{"epsilon": 8.0}, {"noise": 1.0, "level": "local", "adaptive": True}])
def test_noise_that_the_server_adds_to_sums_of_its_own_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"secure sums are opened without it|adaptive"):
        federation(secure=SecureSums(), privacy=fq.Privacy(**how))


def test_noise_of_the_clients_own_is_summed_with_their_copies() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    noisy = fq.Privacy(noise=1.0, level="local")
    hidden, open_ = (federation(secure=s, privacy=noisy, scenario=scenario(build=build)) for s in (SecureSums(), None))
    hidden.step(), open_.step()
    for a, b in zip(values_of(hidden), values_of(open_), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_liars_lie_under_masks_too() -> None:
    pairs = (federation(secure=s, attack=fq.attacks.pick("sign-flip")) for s in (SecureSums(), None))
    hidden, open_ = pairs
    hidden.step(), open_.step()
    for a, b in zip(values_of(hidden), values_of(open_), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 61.0])
def test_who_has_a_faulty_copy_keeps_it(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 2's copy is not summed; the mean is that of the others, and it is counted once."""
    hidden, open_ = federation(secure=SecureSums(range=60.0)), federation()
    run = type(hidden.simulation).run

    def spoilt(self: Any, down: Any) -> Update:
        up = run(self, down)
        for block in up.blocks:
            block.value[2, 0] = bad if self is hidden.simulation else math.nan
        return up

    monkeypatch.setattr(type(hidden.simulation), "run", spoilt)
    assert hidden.step().refused == open_.step().refused == 1
    for a, b in zip(values_of(hidden), values_of(open_), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_small_circles_stay_home_and_their_members_keep_what_they_have() -> None:
    """Devices: four clients of a, two of b; the circle of b is too small for a sum."""
    place = scenario(6)
    of = federation(make_method("modfl", {"split": 1, "by": {"operation": "everyone"}}), SecureSums(), scenario=place)
    circle = of.server.plan["configuration"].circle  # type: ignore[union-attr]
    assert circle.tolist() == [0, 0, 0, 0, -1, -1]
    report = of.step()
    assert report.traffic.up[4:, 0].tolist() == [0, 0]
    own = of.simulation.family_states[0].store.take([4]).clone()
    of.simulation._install(of.simulation.family_states[0], again := own.clone(), of.server.instructions([4]))
    layout = of.simulation.family_states[0].family.layout
    assert torch.equal(layout.take(again, "configuration"), layout.take(own, "configuration"))
    assert not torch.equal(layout.take(again, "operation"), layout.take(own, "operation"))


def test_nothing_to_share_is_refused_before_work() -> None:
    with pytest.raises(ValueError, match=r"no circle has 3 clients"):
        federation(secure=SecureSums(), scenario=scenario(2))
    with pytest.raises(ValueError, match=r"no circle has 8 clients"):
        federation(secure=SecureSums(minimum=8))


def test_a_round_with_too_few_of_a_circle_leaves_its_value() -> None:
    of = federation(secure=SecureSums(), scenario=scenario(7, share=0.3))
    before = [value.clone() for value in values_of(of)]
    report = of.step()
    assert len(report.participants) == 2
    assert all(torch.equal(a, b) for a, b in zip(values_of(of), before, strict=True))
    assert report.traffic.total_up == 0
    assert report.refused == 0


def test_traffic_counts_the_protocol_by_hand() -> None:
    """7 members, all pairs: keys 64, what binds 32, 6 sealed shares of 50, 7 shares of 17 and 8 bytes a number go up;
    the keys of 6, 6 sealed shares and 7 numbers of 4 bytes come down beside what the open round brings."""
    hidden, open_ = federation(secure=SecureSums()).step().traffic, federation().step().traffic
    numbers = int(open_.up[0].sum())
    assert hidden.bytes_up.tolist() == [64 + 32 + 6 * 50 + 7 * 17 + 8 * numbers] * 7
    assert (hidden.bytes_down - open_.bytes_down).tolist() == [6 * 64 + 6 * 50 + 7 * 4] * 7


def test_the_server_half_sees_sums_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the server is handed in a round has a row a circle, not a row a client."""
    seen: list[Update] = []
    merge = Server.merge

    def looking(self: Server, ups: Any) -> None:
        seen.extend(ups)
        merge(self, ups)

    monkeypatch.setattr(Server, "merge", looking)
    federation(secure=SecureSums()).step()
    assert all(not up.blocks and not up.reports for up in seen)
    sums = [summed.sums for up in seen if up.masked for summed in up.masked.sums]
    assert [tuple(each.total.shape) for each in sums] == [(1, 76)]
    seen.clear()
    federation().step()
    assert all(len(block.value) == 7 for up in seen for block in up.blocks)


def test_a_run_on_disk_says_so_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    how: dict[str, Any] = {"engine": "sequential", "alone": False, "secure": SecureSums(minimum=4)}
    whole = fq.run(scenario(), "fedavg", 3, **how)

    def stop(of: Any, report: Any) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fq.run(scenario(), "fedavg", 3, out=tmp_path, checkpoint_every=1, callbacks=[stop], **how)
    assert "minimum = 4" in (tmp_path / "run.toml").read_text()
    again = fq.resume(tmp_path, scenario())
    assert again.federation.terms.secure == SecureSums(minimum=4)
    assert again.rows == whole.rows


def test_on_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--set", "clients=4", "epochs=1", "--rounds", "1", "--engine", "sequential", "--no-alone"]
    assert main(["run", "digits", "fedavg", *small, "--out", "open"]) == 0
    assert main(["run", "digits", "fedavg", *small, "--secure-sums", "--out", "hidden"]) == 0
    assert main(["run", "hidden/run.toml", "--out", "again", "--set", "secure.minimum=4"]) == 0
    tables = [tomllib.loads((tmp_path / name / "run.toml").read_text()) for name in ("open", "hidden", "again")]
    assert [table.get("secure", {}).get("minimum") for table in tables] == [None, 3, 4]
    assert main(["run", "digits", "feddl", *small, "--secure-sums", "--no-keep"]) != 0
    assert "learns from what single clients send" in capfd.readouterr().err
    assert main(["run", "digits", "fedavg", *small, "--set", "secure.minimum=2", "--no-keep"]) != 0
    assert "give at least 3" in capfd.readouterr().err
