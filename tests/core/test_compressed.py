"""Compression in a federation: what is sent, what waits, what is counted, and what it goes with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from core_help import ENGINES, Planned, Tap, federation, points, rows_after, rows_of, same
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core.compressed import compressed
from fedquilt.core.local_training import LocalTraining
from fedquilt.families.layout import Layout
from fedquilt.families.units import cut
from fedquilt.interface.messages import Instructions, UnitValues, Update
from fedquilt.methods import METHODS, FedAvg, Scaffold
from fedquilt.privacy import Privacy
from fedquilt.sharing import Compression, Plan, UnitPlan

INT8, TOPK = Compression("int8"), Compression("topk", kept=0.2)
KINDS = [Compression("float16"), INT8, TOPK, Compression("int8", "float16"), Compression(down="float16")]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def waiting(federated: fq.Federation) -> dict[str, Tensor]:
    """What waits of each client's parameters, by name."""
    layout = federated.simulation.family_states[0].family.layout
    return {name: row[layout.width - layout.waiting :] for name, row in rows_of(federated).items()}


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_three_rounds_of_topk_by_hand() -> None:
    """One unit of three weights; the client goes by (3, 2, -1) from where it starts, one number in three is sent."""
    net = nn.Linear(3, 1, bias=False)
    layout, how = Layout(net, cut(net), wait=True), Compression("topk", kept=1 / 3)
    assert (layout.width, layout.waiting, layout.learned) == (6, 3, {"model": (0, 3)})
    rows, held, step = torch.zeros(1, 6), torch.tensor([[10.0, 20.0, 30.0]]), torch.tensor([[3.0, 2.0, -1.0]])
    at, waits = [], []
    for round_ in (1, 2, 3):
        block = UnitValues(("model",), (3,), None, held)
        down = Instructions(round_, (0,), (block,), (None,), {"model": torch.tensor([True])})
        up = compressed(
            Update(round_, (0,), (UnitValues(("model",), (3,), None, held + step),)), down, layout, how, rows
        )
        held = up.blocks[0].value  # the only client of its circle
        at.append(held[0].tolist())
        waits.append(rows[0, 3:].tolist())
    assert at == [[13, 20, 30], [13, 24, 30], [19, 24, 30]]
    assert waits == [[0, 2, -1], [3, 0, -2], [0, 2, -3]]
    assert [a + w for a, w in zip(at[-1], waits[-1], strict=True)] == [10 + 9, 20 + 6, 30 - 3]


def test_who_sends_a_part_of_the_units_lets_the_others_wait() -> None:
    """Of two clients the second alone sends, and the first has not taken over what it was sent."""
    net = nn.Linear(2, 1, bias=False)
    layout = Layout(net, cut(net), wait=True)
    rows = torch.tensor([[0.0, 0.0, 7.0, 8.0], [0.0, 0.0, 1.0, 0.0]])
    held, sent = torch.zeros(2, 2), torch.tensor([[5.0, 1.0], [2.0, 1.0]])
    message = Instructions(1, (0, 1), (UnitValues(("model",), (2,), None, held),), (None,), {})
    one = Compression("topk", kept=0.5)
    block = UnitValues(("model",), (2,), torch.tensor([1]), sent[1:])
    up = compressed(Update(1, (0, 1), (block,)), message, layout, one, rows)
    assert up.blocks[0].value.tolist() == [[3, 0]]  # 2 and what waited, 1
    assert rows[:, 2:].tolist() == [[7, 8], [0, 1]]
    half_way = Instructions(1, (0, 1), message.blocks, (torch.tensor([0.5, 1.0]),), {})
    went = UnitValues(("model",), (2,), None, sent + torch.tensor([2.0, 1.0]))
    both = compressed(Update(1, (0, 1), (went,)), half_way, layout, one, rows)
    assert both.blocks[0].value.tolist() == [[7, 2], [4, 0]]  # the first as it is; the second wants to go by (4, 3)
    assert rows[:, 2:].tolist() == [[7, 8], [0, 3]]


# --- what is sent and what waits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", KINDS[:3])
def test_what_was_sent_and_what_waits_is_the_way_that_a_client_went(how: Compression) -> None:
    scenario = points(normed, sizes=(5, 9, 7, 8), training={"share": 0.5, "rounds": 6})
    federated = federation(scenario, compress=how)
    tap, layout = Tap(federated), federated.simulation.family_states[0].family.layout
    units = list(layout.learned)
    sizes = [layout.learned[unit][1] - layout.learned[unit][0] for unit in units]
    went, sent = torch.zeros(2, 4, layout.parameters)
    for _ in range(6):
        before = waiting(federated)
        federated.step(evaluate=False)
        down, up = tap.downs[-1], tap.ups[-1]
        for place, number in enumerate(up.ids):
            row = list(rows_of(federated).values())[number]
            for unit, size in zip(units, sizes, strict=True):
                (start,) = [v for b in down.blocks if (v := b.columns([unit])) is not None]
                (told,) = [v for b in up.blocks if (v := b.columns([unit])) is not None]
                slice_ = slice(*layout.learned[unit])
                went[number, slice_] += row[slice_] - start[place, :size]
                sent[number, slice_] += told[place, :size] - start[place, :size]
                # running statistics are as they are
                for (a, b), shown in zip(layout.ranges[unit][1:], [told[place, size:]], strict=False):
                    assert torch.equal(shown, row[a:b])
        for number, (name, left) in enumerate(before.items()):
            assert number in up.ids or torch.equal(waiting(federated)[name], left)  # who is not there lets it wait
    torch.testing.assert_close(torch.stack(list(waiting(federated).values())), went - sent, rtol=1e-3, atol=2e-6)
    assert float((went - sent).abs().max()) > 1e-5 or how.up == "float16"


@pytest.mark.parametrize("how", [*KINDS, Compression("topk", kept=1.0)])
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_engines_agree(how: Compression, engine: str) -> None:
    scenario = points(sizes=(5, 9, 7))
    same(rows_after(scenario, engine=engine, compress=how), rows_after(scenario, compress=how))


def test_all_kept_is_no_compression() -> None:
    scenario = points(normed, training={"rounds": 4})
    plain, all_of_it = federation(scenario), federation(scenario, compress=Compression("topk", kept=1.0))
    for _ in range(4):
        plain.step(), all_of_it.step()
    for one, other in zip(plain.server.all_values, all_of_it.server.all_values, strict=True):
        torch.testing.assert_close(one.value, other.value, rtol=1e-5, atol=1e-6)
    assert all(float(left.abs().max()) == 0 for left in waiting(all_of_it).values())


def test_half_precision_down_is_what_clients_start_from() -> None:
    federated = federation(points(normed), compress=Compression(down="float16"))
    federated.server.all_values[0].value[0, :2] = torch.tensor([1e6, 0.1])
    tap = Tap(federated)
    moved = federated.step(evaluate=False).traffic
    (block,) = tap.downs[0].blocks
    assert block.value[0, :2].tolist() == [65504, float(torch.tensor(0.1).half())]
    parameters, statistics = 4 * 6 + 6 + 2 * 6 + 6 * 3 + 3, 2 * 6 + 1
    assert moved.bytes_down.tolist() == [2 * parameters + 4 * statistics] * 3
    assert moved.bytes_up.tolist() == [4 * (parameters + statistics)] * 3


# --- counted ----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_codes_and_of_all_else() -> None:
    federated = federation(points(normed), Scaffold(), compress=INT8)
    tap = Tap(federated)
    moved = federated.step(evaluate=False).traffic
    codes = sum(c.numel() * c.element_size() for code in tap.ups[0].codes.values() for c in code.values())
    learned, statistics = 4 * 6 + 6 + 2 * 6 + 6 * 3 + 3, 2 * 6 + 1
    assert codes == 3 * (learned + 3 * 4)  # three units
    assert moved.total_up == codes + 3 * 4 * (statistics + learned)  # and the control variates, as they are
    assert moved.by_unit()["c"] == (3 * 4 * learned, 3 * 4 * learned)


def test_a_unit_that_is_not_taken_over_travels_and_counts_as_it_is() -> None:
    half_way = Plan({"0": UnitPlan([0, 0, 0], pull=[1.0, 0.5, 1.0]), "2": UnitPlan([0, 0, 0])})
    federated = federation(points(), Planned(plans=(half_way,)), compress=INT8)
    tap = Tap(federated)
    moved = federated.step(evaluate=False).traffic
    assert moved.by_unit()["0"][0] == 2 * (30 + 4) + 4 * 30
    assert moved.by_unit()["2"][0] == 3 * (21 + 4)
    (sent,) = [v for block in tap.ups[0].blocks if (v := block.columns(["0"])) is not None]
    row = list(rows_of(federated).values())[1]
    assert torch.equal(sent[1], row[:30])
    assert not waiting(federated)["client-1"][:30].any()


def test_virtual_time_counts_codes() -> None:
    scenario = points(training={"rounds": 3})
    for client in scenario.clients:
        client.traits.update({"bandwidth": "0.001"})  # type: ignore[attr-defined]
    plain, small = federation(scenario), federation(scenario, compress=INT8)
    plain.step(), small.step()
    assert plain.clock is not None
    assert small.clock is not None
    numbers = 30 + 21
    assert plain.clock.now == pytest.approx(8 * numbers / 1000)
    assert small.clock.now == pytest.approx((4 * numbers + numbers + 8) / 1000)


# --- what it goes with ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [INT8, TOPK])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_or_says_why_not(name: str, how: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where codes are sent, clients did start from what they were sent."""
    from fedquilt.testing import small_scenario

    began: list[Tensor] = []
    train = LocalTraining.train

    def watched(self: LocalTraining, state: Any, number: int, job: Any, seen: Any) -> Any:
        began.append(job.rows.clone())
        return train(self, state, number, job, seen)

    monkeypatch.setattr(LocalTraining, "train", watched)
    made: Any = METHODS[name]
    needs: Any = {"fedprox": {"mu": 0.1}, "fedmn": {"blocks": (2, 2)}}.get(name, {})
    why_not = {
        **dict.fromkeys(("ifca", "fedfomo", "fedala"), f"clients of '{name}' do not start from what they receive"),
        **dict.fromkeys(("pfedhn", "fedproto", "score-sharing"), f"units of the method '{name}' hold none"),
        "local": "clients of the method 'local' share nothing here",
    }  # fmt: skip
    if name in why_not:
        with pytest.raises(ValueError, match=why_not[name]):
            federation(small_scenario(), made(**needs), compress=how)
        return
    try:
        plain = federation(small_scenario(), made(**needs))
    except ValueError:
        return  # it does not go with these clients
    federated = federation(small_scenario(), made(**needs), compress=how)
    run = federated.simulation.run

    def looked_at(down: Instructions) -> Update:
        began.clear()
        up, layout = (
            run(down),
            federated.simulation.family_states[federated.simulation.home[down.ids[0]][0]].family.layout,
        )
        for unit in up.codes:
            ((value, pull),) = [
                (v, pull)
                for b, pull in zip(down.blocks, down.pulls, strict=True)
                if (v := b.columns([unit])) is not None
            ]
            took = torch.ones(len(value), dtype=torch.bool) if pull is None else pull == 1
            assert not began or torch.equal(layout.take(began[0], unit)[took], value[took])
        return up

    federated.simulation.run = looked_at  # type: ignore[method-assign]
    for _ in range(3):
        report, other = federated.step(), plain.step()
        assert report.refused == 0
        assert report.traffic.total_up <= other.traffic.total_up
    federated.close()
    plain.close()


def test_refused_before_work() -> None:
    private = Privacy(noise=1.0, smallest=2)
    with pytest.raises(ValueError, match=r"compress with dp\.level=client: noise is for changes"):
        federation(points(), compress=INT8, privacy=private)
    with pytest.raises(ValueError, match=r"compress with dp\.level=client"):
        federation(points(), compress=Compression(down="float16"), privacy=private)
    with pytest.raises(ValueError, match=r"compress\.up=topk: secure sums add up numbers of secure\.bits=64"):
        federation(points(), compress=TOPK, secure=fq.SecureSums())
    halved = federation(points(), compress=Compression(down="float16"), secure=fq.SecureSums())
    assert halved.step(evaluate=False).refused == 0


@pytest.mark.parametrize("level", ["local", "sample"])
def test_noise_of_clients_is_in_before_anything_is_compressed(level: Any) -> None:
    privacy = Privacy(noise=0.5, level=level, clip=1.0)
    plain = federation(points(), privacy=privacy)
    federated = federation(points(), compress=INT8, privacy=privacy)
    taps = Tap(plain), Tap(federated)
    plain.step(evaluate=False), federated.step(evaluate=False)
    for one, other in zip(taps[0].ups[0].blocks, taps[1].ups[0].blocks, strict=True):
        steps = float((one.value - taps[0].downs[0].blocks[0].value).abs().max()) / 127
        assert float((one.value - other.value).abs().max()) <= steps


def test_robust_merges_see_what_codes_say_and_liars_say_theirs_in_codes() -> None:
    federated = federation(
        points(sizes=(5,) * 5), compress=TOPK, rule=fq.sharing.pick("median"),
        attack=fq.attacks.pick("sign-flip"),
    )  # fmt: skip
    seen: list[tuple[Instructions, Update]] = []
    exchange = federated.backend.exchange

    def tapped(*args: Any) -> list[tuple[Instructions, Update]]:
        found = exchange(*args)
        seen.extend(copy.deepcopy(found))
        return found

    federated.backend.exchange = tapped  # type: ignore[method-assign, assignment]
    federated.step(evaluate=False)
    (pair,) = seen
    (block,), (start,) = pair[1].blocks, pair[0].blocks
    changed = (block.value != start.value).sum(1)
    assert federated.liars
    assert bool((changed <= TOPK.count(30) + TOPK.count(21)).all())  # nobody says more than a code can


def test_a_client_that_is_not_finite_is_left_out_and_waits_for_nothing() -> None:
    federated = federation(points(), compress=INT8)
    federated.step(evaluate=False)
    kept = {name: left.clone() for name, left in waiting(federated).items()}
    client = federated.simulation.family_states[0]
    client.samples.parts[1][0].fill_(torch.nan)
    federated.step(evaluate=False)
    assert federated.server.refused.tolist() == [0, 1, 0]
    assert torch.equal(waiting(federated)["client-1"], kept["client-1"])
    assert all(bool(left.isfinite().all()) for left in waiting(federated).values())


# --- kept -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["int8", TOPK])
def test_a_run_that_was_interrupted_goes_on_to_the_same_bits(how: str | Compression, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(federation: fq.Federation, report: Any) -> None:
        if report.round == 3:
            raise Enough

    def run(out: Path, **more: Any) -> fq.Run:
        return fq.run(
            fq.scenarios.build("digits", clients=8), "fedper", 5, training={"share": 0.5}, compress=how, out=out,
            checkpoint_every=1, alone=False, engine="sequential", device="cpu", **more,
        )  # fmt: skip

    whole = run(tmp_path / "whole")
    with pytest.raises(Enough):
        run(tmp_path / "cut", callbacks=[stop])
    again = fq.resume(tmp_path / "cut")
    assert again.rows == whole.rows
    assert again.bytes_up == whole.bytes_up
    for one, other in zip(rows_of(again.federation).values(), rows_of(whole.federation).values(), strict=True):
        assert torch.equal(one, other)
    assert any(bool(left.any()) for left in waiting(again.federation).values())
    kept = (tmp_path / "cut" / "run.toml").read_text()
    assert "[compress]" in kept
    assert str(again).splitlines()[-1].startswith("Clients sent ")


def test_whoever_gets_other_samples_keeps_what_waits() -> None:
    from fedquilt.client import Change

    scenario = points(training={"rounds": 4})
    one, *others = scenario.clients
    change = Change(train=(torch.randn(6, 4), torch.randint(0, 3, (6,))))
    one = fq.Client(one.name, one.model, one.train, one.validation, one.test, labels=(0, 1, 2), changes={2: change})
    scenario = fq.Scenario("points", [one, *others], scenario.training)
    federated = federation(scenario, compress=TOPK)
    federated.step(evaluate=False)
    before = waiting(federated)
    assert bool(before["client-0"].any())
    federated.backend.turn(federated.server, 2)
    assert all(torch.equal(left, before[name]) for name, left in waiting(federated).items())


def test_without_compression_rows_have_no_room_for_it() -> None:
    layout = federation(points(), FedAvg()).simulation.family_states[0].family.layout
    assert layout.waiting == 0
    assert layout.width == 51
    assert federation(points()).server.bytes is None


def test_asked_for_in_a_file_and_on_top_of_it(tmp_path: Path) -> None:
    from fedquilt.cli.config import read_config
    from fedquilt.cli.request import Choices

    path = tmp_path / "a.toml"
    path.write_text('scenario = "digits"\nmethod = "fedavg"\n[compress]\nup = "topk"\nkept = 0.2\n')
    assert read_config(path, False).request(Choices()).compress == Compression("topk", kept=0.2)
    on_top = read_config(path, False).request(Choices(settings=["compress.up=int8"]))
    assert on_top.compress == Compression("int8")
    path.write_text('scenario = "digits"\nmethod = "fedavg"\ncompress = "int8"\n')
    assert read_config(path, False).request(Choices()).compress == Compression("int8")


def test_the_page_tells_runs_apart_by_how_bytes_were_saved_and_who_lied(tmp_path: Path) -> None:
    from fedquilt.report.page_content import grouped
    from fedquilt.report.read_runs import read_run

    def run(name: str, **more: Any) -> None:
        fq.run(
            fq.scenarios.build("digits", clients=8), "fedavg", 1, out=tmp_path / name, alone=False, device="cpu",
            engine="sequential", **more,
        )  # fmt: skip

    run("a")
    run("b", compress="int8")
    run("c", attack="sign-flip")
    found = grouped([read_run(tmp_path / name) for name in "abc"])
    assert [len(group.runs) for group in found] == [1, 1, 1]
    names = [group.name for group in found]
    assert names[0] == "fedavg (defaults)"
    assert "up=int8" in names[1]
    assert "attack=sign-flip" in names[2]
