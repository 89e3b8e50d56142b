"""Auto: planted groups are found and nothing else, whoever takes part; what that costs, and what a run says of it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from planted_groups import ROUNDS, called, planted
from torch import Tensor

import fedquilt as fq
from fedquilt.client import Change
from fedquilt.core.federation import Federation
from fedquilt.methods import FedAvg
from fedquilt.methods.auto import Auto
from fedquilt.sharing import adjusted_rand
from fedquilt.testing import check_method

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import splits


def run(scenario: fq.Scenario, method: fq.Method | None = None, engine: str = "vectorised") -> fq.Run:
    rounds = scenario.training.rounds
    return fq.run(scenario, method or Auto(), alone=False, engine=engine, device="cpu", evaluate_every=rounds)


def rand(of: fq.Plan, unit: str, truth: Tensor) -> float:
    """How well a unit's circles agree with the truth, each private client a circle of its own."""
    plan = of[unit]
    assert isinstance(plan, fq.UnitPlan)
    circle = torch.where(plan.circle < 0, -1 - torch.arange(len(plan.circle)), plan.circle)
    return adjusted_rand(circle, truth)


def best_of(plan: fq.Plan, truth: Tensor) -> float:
    return max(rand(plan, unit, truth) for unit in plan.units)


def best_rand(result: fq.Run, truth: Tensor) -> float:
    return best_of(result.plan, truth)


def split(result: fq.Run) -> list[str]:
    """The units that are not shared by all."""
    circles = {unit: plan.circle for unit, plan in result.plan.units.items() if isinstance(plan, fq.UnitPlan)}
    return [unit for unit, circle in circles.items() if len(circle.unique()) > 1 or bool((circle < 0).any())]


THREE = torch.arange(15) % 3


# --- what is found ----------------------------------------------------------------------------------------------------


def test_groups_that_give_digits_other_names_are_found_and_gain() -> None:
    scenario = planted()
    found, averaged = run(scenario), run(scenario, FedAvg())
    assert best_rand(found, THREE) > 0.9
    assert found.summary["accuracy_mean"] > averaged.summary["accuracy_mean"] + 0.15


@pytest.mark.parametrize("kind", ["iid", "skewed"])
@pytest.mark.parametrize(("share", "rounds"), [(1.0, 16), (0.25, 40)])
def test_nothing_is_split_where_there_are_no_groups(kind: str, share: float, rounds: int) -> None:
    scenario = planted(kind, share=share, rounds=rounds)
    result = run(scenario)
    assert split(result) == [], result.summary["decisions"]
    averaged = run(scenario, FedAvg())
    assert result.summary["accuracy_mean"] == averaged.summary["accuracy_mean"]  # looking changes nobody's model


def test_digits_renamed_is_parted_by_cohort() -> None:
    result = run(fq.scenarios.build("digits", seed=0, renamed=3))
    cohorts = torch.tensor([i // 2 % 4 for i in range(24)])
    assert rand(result.plan, "operation.2", cohorts) > 0.9


@pytest.mark.skipif("FEDQUILT_DATA" not in os.environ, reason="needs real data")
def test_label_permutations_of_mnist_are_found() -> None:
    scenario = splits.mnist("names", seed=0, samples=(60, 24, 60), rounds=40)
    result = run(scenario)
    assert best_rand(result, torch.arange(24) % 3) > 0.9


def worse_than_alone(scenario: fq.Scenario, method: fq.Method, readout: str) -> list[str]:
    """Clients that do worse on validation samples than by themselves, by more than two errors of the difference."""
    how = {"alone": False, "engine": "vectorised", "device": "cpu", "evaluate_every": scenario.training.rounds}
    runs = {
        "alone": fq.run(scenario, "local", readouts=["received"], **how),  # type: ignore[arg-type]
        readout: fq.run(scenario, method, readouts=["received", readout], **how),  # type: ignore[arg-type]
    }
    scores = {
        name: {
            row["client"]: row["accuracy"]
            for row in result.rows
            if (row["readout"], row["split"]) == (name if name != "alone" else "received", "validation")
        }
        for name, result in runs.items()
    }
    found = []
    for client in scenario.clients:
        p, q, n = scores[readout][client.name], scores["alone"][client.name], len(client.validation)
        if p < q - 2 * ((p * (1 - p) + q * (1 - q)) / n) ** 0.5:
            found.append(client.name)
    return found


@pytest.mark.parametrize("kind", ["names", "skewed"])
def test_with_the_vote_nobody_is_worse_than_alone_by_validation_beyond_its_error(kind: str) -> None:
    assert worse_than_alone(planted(kind), Auto(), "vote") == []


def test_what_all_share_alone_would_be_worse_for_some() -> None:
    assert worse_than_alone(planted("names"), FedAvg(), "received")  # so the check above can fail


def test_half_of_the_clients_in_a_round() -> None:
    assert best_rand(run(planted(share=0.5, rounds=40)), THREE) > 0.9


def test_a_quarter_of_the_clients_in_a_round() -> None:
    scenario = planted(share=0.25, seed=11, rounds=40)
    found = fq.run(scenario, Auto(), alone=False, engine="vectorised", device="cpu", evaluate_every=40, seed=11)
    assert best_rand(found, THREE) > 0.9, found.summary["decisions"]
    assert found.summary["looking_cost"] * 0.4 <= 0.1  # of 100 such rounds; these are 40


def test_very_unlike_sizes() -> None:
    assert best_rand(run(planted(sizes=(30, 60, 110, 45))), THREE) > 0.9


def test_without_validation_samples_the_look_decides() -> None:
    result = run(planted(validation=0))
    assert best_rand(result, THREE) > 0.9
    assert any("nobody to judge" in sentence for sentence in result.summary["decisions"])
    assert split(run(planted("iid", validation=0))) == []


def test_a_unit_that_nobody_can_judge_is_left_to_the_look_and_the_others_to_ballots() -> None:
    few = planted(clients=18, sizes=(50,), validation=15, widths=(32, 24), rounds=12)
    blind = [fq.Client(c.name, c.model, (c.train.x, c.train.y), None, (c.test.x, c.test.y)) for c in few.clients]
    clients = [b if i // 3 % 2 else c for i, (b, c) in enumerate(zip(blind, few.clients, strict=True))]  # of width 24
    said = run(replace(few, clients=tuple(clients))).summary["decisions"]
    assert any("nobody to judge" in each for each in said), said
    assert any("nats" in each and "nobody to judge" not in each for each in said), said


def test_unlike_architectures_are_compared_where_shapes_agree() -> None:
    result = run(planted(clients=18, sizes=(50,), validation=15, widths=(32, 24), rounds=30))
    for unit in result.plan.units:
        plan = result.plan[unit]
        assert isinstance(plan, fq.UnitPlan)
        for circle in plan.circle[plan.circle >= 0].unique().tolist():
            members = (plan.circle == circle).nonzero()[:, 0].tolist()
            assert len({i // 3 % 2 for i in members}) == 1  # of one width
    truth = torch.tensor([(i % 3) * 2 + i // 3 % 2 for i in range(18)])
    assert best_rand(result, truth) > 0.9


def test_a_client_with_random_labels_spoils_nobody_elses_circle() -> None:
    scenario = planted()
    liar = scenario.clients[0]
    y = torch.randint(0, 10, (len(liar.train),), generator=torch.Generator().manual_seed(0))
    clients = [fq.Client(liar.name, liar.model, (liar.train.x, y), None, liar.test), *scenario.clients[1:]]
    result = run(replace(scenario, clients=tuple(clients)))
    without = [fq.UnitPlan(p.circle[1:]) for p in result.plan.units.values() if isinstance(p, fq.UnitPlan)]
    assert max(adjusted_rand(p.circle, THREE[1:]) for p in without) > 0.9


def test_a_newcomer_is_offered_patches_and_takes_that_of_its_group(tmp_path: Path) -> None:
    scenario = planted(clients=17)  # the last one, 16, is of group 1: not the circle that newcomers begin in
    others = replace(scenario, clients=scenario.clients[:15])
    before = fq.run(
        others, Auto(), alone=False, engine="vectorised", device="cpu", evaluate_every=ROUNDS, out=tmp_path / "run"
    )
    assert best_rand(before, THREE) > 0.9
    joined_ = fq.onboard(tmp_path / "run", scenario.clients[-1], visits=1, scenario=others)
    parted = [unit for unit in split(before) if rand(before.plan, unit, THREE) > 0.9]
    for unit in parted:
        assert set(joined_.circles[unit]) == {f"c{i}" for i in range(15) if i % 3 == 1}


def test_a_client_that_says_that_its_data_changed_moves_to_where_it_fits() -> None:
    scenario = planted(rounds=34)
    now = drifting(scenario.clients[0], 27, 0)
    result = run(replace(scenario, clients=(now, *scenario.clients[1:])))
    truth = THREE.clone()
    truth[0] = 1
    assert best_rand(result, truth) > 0.9, result.summary["decisions"]


@pytest.mark.parametrize(("share", "rounds", "at", "until"), [(1.0, 24, 20, 20), (0.25, 90, 30, 44)])
def test_a_group_that_drifts_wears_the_patch_of_those_it_is_like_now_once_each_has_taken_part(
    share: float, rounds: int, at: int, until: int
) -> None:
    scenario = planted(seed=11, share=share, rounds=rounds)
    clients = [drifting(c, at, 11) if i % 3 == 0 else c for i, c in enumerate(scenario.clients)]
    federation = Federation(
        replace(scenario, clients=tuple(clients)), Auto(), device="cpu", engine="vectorised", readouts=(), seed=11
    )
    groups, taken_part = THREE.clone(), set[int]()
    while federation.round < until:
        taken_part.update(federation.step(evaluate=False).participants)
        if federation.round == at - 1:
            assert best_of(federation.server.plan, groups) > 0.9
            taken_part.clear()
        elif federation.round >= at:
            groups[[i for i in taken_part if i % 3 == 0]] = 1
            assert best_of(federation.server.plan, groups) > 0.9
    assert set(groups.tolist()) == {1, 2}


def drifting(client: fq.Client, at: int, seed: int) -> fq.Client:
    """A client of group 0 that gives its training samples the names of group 1 from a round on."""
    other = torch.tensor(called(1, seed)[np.argsort(called(0, seed))])
    change = Change(train=(client.train.x, other[client.train.y]))
    return fq.Client(client.name, client.model, client.train, client.validation, client.test, changes={at: change})


# --- what it costs, says and promises ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["names", "iid"])
def test_looking_costs_less_than_a_tenth_of_the_traffic_of_fedavg(kind: str) -> None:
    scenario = planted(kind, clients=9, sizes=(30,), validation=10, rounds=100)
    found, averaged = run(scenario), run(scenario, FedAvg())
    moved = [sum(each.bytes_up) + sum(each.bytes_down) for each in (found, averaged)]
    assert moved[0] <= 1.1 * moved[1]


def test_what_a_run_says_that_looking_cost_is_what_it_moved_more_with_half_of_the_clients_too() -> None:
    scenario = planted("iid", clients=9, sizes=(30,), validation=10, rounds=60, share=0.5)  # nothing becomes private
    found, averaged = run(scenario), run(scenario, FedAvg())
    moved = [sum(each.bytes_up) + sum(each.bytes_down) for each in (found, averaged)]
    assert found.summary["looking_cost"] > 0.01
    assert found.summary["looking_cost"] == pytest.approx(moved[0] / moved[1] - 1, rel=0.03)  # and a few losses
    assert moved[0] <= 1.1 * moved[1]


def test_engines_agree_through_looks_and_ballots() -> None:
    scenario = planted(clients=9, rounds=12)
    one, other = (run(scenario, engine=engine) for engine in ("sequential", "vectorised"))
    assert one.plan == other.plan
    assert split(one) != []
    for client in scenario.clients:
        pair = zip(one.model(client.name).parameters(), other.model(client.name).parameters(), strict=True)
        assert max(float((a - b).detach().abs().max()) for a, b in pair) < 1e-3


def test_all_checks_of_a_method() -> None:
    assert {"engines", "resume", "private", "traffic", "unlike", "newcomer"} <= set(check_method(Auto()))


def test_a_run_says_why() -> None:
    result = run(planted())
    said = result.summary["decisions"]
    assert any("circles by" in each and "standard errors" in each and "would cost" in each for each in said)
    json.dumps(result.summary)
    assert "nothing_split" not in result.summary


@pytest.mark.parametrize(
    ("rounds", "why"), [(2, "too short to look"), (16, "never worse by more than its error, 3 standard errors")]
)
def test_a_run_that_splits_nothing_says_why_and_what_to_ask_next(rounds: int, why: str) -> None:
    result = run(planted("iid", rounds=rounds))
    assert result.summary["changes"] == []
    assert why in result.summary["nothing_split"]
    assert "fedquilt advise" in result.summary["nothing_split"]
    assert result.summary["nothing_split"] in str(result)


def test_a_look_leaves_a_client_as_it_was() -> None:
    scenario = planted(clients=6, rounds=5)  # looks in round 3
    models = []
    for method in (Auto(), FedAvg()):
        federation = Federation(scenario, method, device="cpu", engine="sequential", readouts=())
        for _ in range(3):
            federation.step(evaluate=False)
        models.append(federation.server.held("1", torch.arange(6)))
    assert torch.equal(*models)


@pytest.mark.parametrize(
    ("settings", "says"), [({"lam": 0}, "fedavg"), ({"sure": 0}, "standard errors"), ({"sketch": 2}, "16")]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Auto(**settings)  # type: ignore[arg-type]
