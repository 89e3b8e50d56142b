"""Attacks: each by hand and as byzfl 0.0.11 (MIT) has it, then what must hold of liars in whole rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_help import points
from torch import Tensor

import fedquilt as fq
from fedquilt import attacks
from fedquilt.attacks import ATTACKS, Attack, LabelFlip, Mimic, Sent
from fedquilt.attacks.lies import target_of
from fedquilt.core.attacked import AttackedSimulation
from fedquilt.methods import IFCA, FedAvg, FedPer
from fedquilt.report.read_runs import read_run
from fedquilt.runs.rule_texts import attack_from, attack_to
from fedquilt.sharing import Sums, pick

HONEST = torch.tensor([[1, 2, -1], [1.5, 1, -0.5], [0.5, 2.5, -2], [2, 1.5, -1.5], [1, 1, -1]])
BYZFL = [  # what byzfl's attacks make of HONEST
    (attacks.InnerProduct(tau=1.0), [-1.2, -1.6, 1.2]),  # SignFlipping()
    (attacks.InnerProduct(tau=2.0), [-2.4, -3.2, 2.4]),  # InnerProductManipulation(2.0)
    (attacks.ALittleIsEnough(tau=1.5), [2.0551314354, 2.5778803825, -0.3448685408]),  # ALittleIsEnough(1.5)
    (attacks.Mimic(victim=3), [2.0, 1.5, -1.5]),  # Mimic(3)
]


def told(attack: Attack, start: Tensor | None = None) -> Tensor:
    """(2, 3) what two liars send; there is a second circle with other moves."""
    other = torch.tensor([[50.0, 60, 70], [-5, 6, 7]])
    moves = torch.cat([HONEST, torch.tensor([[9.0, -7, 4], [0, 3, 0.5]]), other])
    begun = torch.zeros_like(moves) if start is None else start.expand_as(moves)
    circle, lies = torch.tensor([0] * 7 + [1] * 2), torch.tensor([False] * 5 + [True] * 2 + [False, True])
    return attack.copies(Sent(torch.arange(9), begun + moves, begun, circle, lies, 3))[5:7] - begun[5:7]


@pytest.mark.parametrize(("attack", "expected"), BYZFL, ids=str)
def test_liars_send_what_byzfl_has_them_send(attack: Attack, expected: list[float]) -> None:
    for found in told(attack):
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    if not isinstance(attack, Mimic):  # attacks are on what is learnt, wherever it began
        torch.testing.assert_close(told(attack, torch.tensor([7.0, -3, 2])), told(attack), rtol=1e-5, atol=1e-5)


def test_attacks_by_hand() -> None:
    assert told(attacks.SignFlip(scale=2)).tolist() == [[-18, 14, -8], [0, -6, -1]]
    assert told(attacks.Mimic()).tolist() == [[1, 2, -1]] * 2
    noise = torch.cat([told(attacks.Gaussian(sigma=3.0)).flatten() for _ in range(2)])
    assert torch.equal(noise[:6], noise[6:])  # by the seed, the round and the unit
    assert 0.5 < noise.std() < 9
    client = fq.Client("a", lambda: torch.nn.Linear(1, 9), ([[1.0], [2], [3], [4]], [2, 5, 5, 8]), test=([[1.0]], [2]))
    liar = LabelFlip().client(client)
    assert liar.train.y.tolist() == [8, 5, 5, 2]  # of the labels 2, 5, 8
    assert torch.equal(liar.train.x, client.train.x)
    assert client.train.y.tolist() == [2, 5, 5, 8]
    assert liar.test is client.test
    streaming = fq.Client(
        "b", lambda: torch.nn.Linear(1, 3), ([[1.0], [2]], [0, 2]), changes={3: fq.Change(train=([[1.0]], [2]))}
    )
    change = LabelFlip().client(streaming).changes[3].train
    assert isinstance(change, fq.Split)
    assert change.y.tolist() == [0]


def federation(attack: Attack | None, method: fq.Method | None = None, **more: Any) -> fq.Federation:
    scenario = points(sizes=(5, 9, 7, 6, 8, 5), **more)
    return fq.Federation(scenario, method or FedAvg(), device="cpu", engine="sequential", attack=attack, seed=4)


def sent(federation: fq.Federation) -> tuple[Tensor, Tensor]:
    """(k, size) what clients received and what they send in the first round."""
    federation.backend.turn(federation.server, 1)
    ((down, up),) = federation.backend.exchange(federation.server, range(len(federation.scenario.clients)), ())
    return torch.cat([b.value for b in down.blocks], 1), torch.cat([b.value for b in up.blocks], 1)


def test_who_lies_follows_from_the_seed_alone() -> None:
    drawn = {seed: attacks.SignFlip(liars=0.4).drawn(range(10), seed) for seed in range(20)}
    assert {len(liars) for liars in drawn.values()} == {4}
    assert len(set(drawn.values())) > 10
    assert {i for liars in drawn.values() for i in liars} == set(range(10))
    assert attacks.Gaussian(liars=0.4).drawn(range(10), 3) == drawn[3]  # the same for all attacks: they can be compared


def test_in_a_round_the_honest_send_what_they_always_do_and_liars_keep_what_they_trained() -> None:
    plain, attacked = federation(None), federation(attacks.InnerProduct(liars=0.3, tau=3.0))
    assert len(attacked.liars) == 2
    received, copies = sent(plain)
    _, false = sent(attacked)
    honest = [i for i in range(6) if i not in attacked.liars]
    assert torch.equal(false[honest], copies[honest])
    expected = received[0] - 3 * (copies[honest] - received[honest]).mean(0)
    for liar in attacked.liars:
        torch.testing.assert_close(false[liar], expected, rtol=1e-5, atol=1e-6)
    for simulation in (plain.simulation, attacked.simulation):
        assert torch.equal(simulation.family_states[0].store.all(), plain.simulation.family_states[0].store.all())


def test_a_circle_is_attacked_by_what_its_own_members_learn() -> None:
    method = fq.methods.ModFL(by={"*": "device"})
    plain, attacked = federation(None, method), federation(attacks.InnerProduct(liars=0.3), method)
    (received, copies), (_, false) = sent(plain), sent(attacked)
    for liar in attacked.liars:
        peers = [i for i in range(6) if i not in attacked.liars and i % 2 == liar % 2]
        expected = received[liar] - 2 * (copies[peers] - received[peers]).mean(0)
        torch.testing.assert_close(false[liar], expected, rtol=1e-5, atol=1e-6)


def test_private_units_are_not_touched_and_statistics_stay() -> None:
    def normed() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))

    attacked = federation(attacks.Gaussian(liars=0.3, sigma=100.0), FedPer(), model=normed)
    attacked.step()
    state = attacked.model("client-0").state_dict()
    assert float(state["0.weight"].abs().max()) > 5
    assert float(state["2.weight"].abs().max()) < 5
    assert bool((state["1.running_var"] > 0).all())


def test_an_impostor_is_put_where_its_target_is() -> None:
    honest, attacked = (federation(lie, IFCA(clusters=2)) for lie in (None, attacks.Impostor(liars=0.3)))
    for each in (honest, attacked):
        each.backend.turn(each.server, 1)
    ((_, plain),) = honest.backend.exchange(honest.server, range(6), ())
    ((_, false),) = attacked.backend.exchange(attacked.server, range(6), ())
    simulation = attacked.simulation
    assert isinstance(simulation, AttackedSimulation)
    target = target_of(torch.arange(6), simulation.lies)
    assert target is not None
    assert target not in attacked.liars
    for name, value in plain.reports.items():
        for i in range(6):
            assert torch.equal(false.reports[name][i], value[target if i in attacked.liars else i])
    attacked.step()
    for unit in attacked.server.plan.units.values():
        assert isinstance(unit, fq.UnitPlan)
        assert {int(unit.circle[liar]) for liar in attacked.liars} == {int(unit.circle[target])}


def test_liars_are_marked_and_not_counted(tmp_path: Path) -> None:
    scenario = points(sizes=(5, 9, 7, 6, 8, 5))
    run = fq.run(scenario, "fedavg", attack="gaussian", engine="sequential", device="cpu", out=tmp_path / "run", seed=4)
    liars = {scenario.clients[i].name for i in run.federation.liars}
    assert len(liars) == 1
    assert {row["client"] for row in run.rows if row.get("liar")} == liars
    last = [r for r in run.rows if r["round"] == 2 and (r["readout"], r["split"]) == ("received", "test")]
    honest = [r["accuracy"] for r in last if r["client"] not in liars]
    assert run.summary["accuracy_mean"] == pytest.approx(sum(honest) / 5)
    assert (run.summary["clients_measured"], run.summary["liars"], run.summary["attack"]) == (5, 1, "gaussian")
    assert run.evaluations[-1].score == pytest.approx(
        sum(r["accuracy"] for r in run.evaluations[-1].rows() if "liar" not in r) / 5
    )
    found = read_run(tmp_path / "run").series["received", "test"].score
    assert [bool(torch.tensor(column).isnan().all()) for column in found.T] == [
        c.name in liars for c in scenario.clients
    ]


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "impostor"])
def test_stacked_and_one_by_one_liars_are_the_same(name: str) -> None:
    scenario = points(sizes=(6,) * 6, common=None)
    found = [
        fq.Federation(scenario, FedAvg(), engine=how, device="cpu", attack=attacks.pick(name, liars=0.3))
        for how in ("sequential", "vectorised")
    ]
    for each in found:
        each.run()
    one, other = (each.server.all_values[0].value for each in found)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for each in found:
        each.close()


def test_an_attacked_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    scenario = points(sizes=(5, 9, 7, 6), training={"rounds": 3})
    how: dict[str, Any] = {"attack": attacks.ALittleIsEnough(0.3), "engine": "sequential", "alone": False}

    def stop(federation: fq.Federation, report: object) -> None:
        if federation.round == 1:
            raise KeyboardInterrupt

    whole = fq.run(scenario, "fedavg", **how)
    with pytest.raises(KeyboardInterrupt):
        fq.run(scenario, "fedavg", out=tmp_path / "run", callbacks=[stop], checkpoint_every=1, **how)
    assert fq.resume(tmp_path / "run", scenario).rows == whole.rows
    assert any(row.get("liar") for row in whole.rows)


def test_a_trusted_client_does_not_lie() -> None:
    common = (torch.randn(12, 4), torch.arange(12) % 3)
    for seed in range(8):
        scenario = points(common=common)
        made = fq.Federation(
            scenario, FedAvg(), rule=pick("fltrust"), attack=attacks.SignFlip(0.6), seed=seed, device="cpu"
        )
        assert 3 not in made.liars
        assert len(made.liars) == 2


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_trusted_client_is_there_in_every_round(sampling: str) -> None:
    """Without it nobody is measured, and the circle stands still."""
    scenario = points(sizes=(5, 9, 7, 6, 5), training={"share": 0.4, "sampling": sampling})
    made = fq.Federation(scenario, FedAvg(), rule=pick("fltrust", trusted=("client-2",)), device="cpu")
    rounds = [made.sample_clients(round_) for round_ in range(1, 30)]
    assert all(2 in chosen for chosen in rounds)
    assert len(set(rounds)) > 5


@pytest.mark.parametrize("kind", ATTACKS.values())
def test_an_attack_comes_back_from_a_file(kind: type[Attack]) -> None:
    assert attack_from(attack_to(kind(liars=0.3))) == kind(liars=0.3)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^there is no attack 'sing-flip'; did you mean 'sign-flip'"):
        attacks.pick("sing-flip")
    with pytest.raises(ValueError, match=r"^there is no setting of the attack alie 'taus'; did you mean 'tau'"):
        attacks.pick("alie", taus=1)
    with pytest.raises(ValueError, match=r"^alie with liars=1: give a share of the clients between 0 and 1"):
        attacks.pick("alie", liars=1)
    with pytest.raises(
        ValueError, match=r"^the attack 'impostor' lies in reports, and clients of 'fedavg' report nothing"
    ):
        federation(attacks.Impostor())
    with pytest.raises(
        ValueError, match=r"^the attack 'gaussian' lies in copies of units, and clients of 'pfedhn' send none"
    ):
        federation(attacks.Gaussian(), fq.methods.PFedHN())
    with pytest.raises(ValueError, match=r"^the method 'pfedhn' merges no copies, so the merge 'median' would guard"):
        fq.Federation(points(sizes=(5, 5, 5)), fq.methods.PFedHN(), rule=pick("median"), device="cpu")
    with pytest.raises(ValueError, match=r"^an attack needs two clients at least"):
        fq.Federation(points(sizes=(5,)), FedAvg(), attack=attacks.SignFlip(), device="cpu")


def test_of_a_circle_without_honest_members_nothing_is_known() -> None:
    values, circle = torch.ones(2, 3), torch.zeros(2).long()
    alone = Sent(torch.arange(2), values, torch.zeros(2, 3), circle, torch.tensor([True, True]), 0)
    assert alone.of_honest(values).tolist() == [[0] * 3] * 2
    for kind in ATTACKS.values():
        assert kind().copies(alone).isfinite().all()
    assert Sums.of(values, circle, torch.ones(2), 1).mean().value.tolist() == [[1] * 3]
