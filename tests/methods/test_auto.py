"""Auto: planted groups are found and nothing else; looks, ballots and patches as they should be."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.client import Change
from fedquilt.core.federation import Federation
from fedquilt.data import load
from fedquilt.interface.messages import UnitValues, Update, Updates
from fedquilt.methods import FedAvg
from fedquilt.methods.auto import Auto
from fedquilt.methods.candidates import values_of
from fedquilt.methods.decisions import by_ballot, in_words
from fedquilt.methods.hypotheses import enough, groups, joined, nothing_seen, tidy, with_look
from fedquilt.methods.patches import patches_of
from fedquilt.sharing import adjusted_rand
from fedquilt.sharing.evidence import Gain
from fedquilt.sharing.sketch import sketch
from fedquilt.testing import check_method

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import splits

ROUNDS = 24


def net(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def called(group: int, seed: int) -> np.ndarray:
    """What a group calls each digit."""
    return np.random.default_rng([seed, group]).permutation(10)


def planted(
    kind: str = "names", clients: int = 15, sizes: tuple[int, ...] = (60,), validation: int = 20, share: float = 1.0,
    seed: int = 0, rounds: int = ROUNDS, widths: tuple[int, ...] = (32,),
) -> fq.Scenario:  # fmt: skip
    """Digits dealt out to clients of three groups: with other names for the digits, or (iid, skewed) no difference."""
    data, rng = load("digits"), np.random.default_rng([seed, 9])
    x, y, used, made = data.images(), data.y, np.zeros(len(data), dtype=bool), []
    for i in range(clients):
        parts = (sizes[i % len(sizes)], validation, 25)
        odds = rng.dirichlet(np.full(10, 0.5)) if kind == "skewed" else np.full(10, 0.1)
        free = rng.permutation(np.flatnonzero(~used))
        mine = rng.choice(free, sum(parts), replace=False, p=odds[y[free]] / odds[y[free]].sum())
        used[mine] = True
        label = called(i % 3, seed)[y[mine]] if kind == "names" else y[mine]
        a, b = parts[0], parts[0] + parts[1]
        train, held, test = ((x[mine[s]], label[s]) for s in (slice(a), slice(a, b), slice(b, None)))
        model = partial(net, widths[i // 3 % len(widths)])
        made.append(fq.Client(f"c{i}", model, train, held if validation else None, test, {"cohort": str(i % 3)}))
    return fq.Scenario("planted", made, fq.Training(rounds=rounds, epochs=2, batch=10, lr=0.1, share=share))


def run(scenario: fq.Scenario, method: fq.Method | None = None, engine: str = "vectorised") -> fq.Run:
    rounds = scenario.training.rounds
    return fq.run(scenario, method or Auto(), alone=False, engine=engine, device="cpu", evaluate_every=rounds)


def rand(result: fq.Run, unit: str, truth: Tensor) -> float:
    """How well a unit's circles agree with the truth, each private client a circle of its own."""
    plan = result.plan[unit]
    assert isinstance(plan, fq.UnitPlan)
    circle = torch.where(plan.circle < 0, -1 - torch.arange(len(plan.circle)), plan.circle)
    return adjusted_rand(circle, truth)


def best_rand(result: fq.Run, truth: Tensor) -> float:
    return max(rand(result, unit, truth) for unit in result.plan.units)


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
def test_nothing_is_split_where_there_are_no_groups(kind: str) -> None:
    scenario = planted(kind, rounds=16)
    result = run(scenario)
    assert split(result) == [], result.summary["decisions"]
    averaged = run(scenario, FedAvg())
    assert result.summary["accuracy_mean"] == averaged.summary["accuracy_mean"]  # looking changes nobody's model


def test_digits_renamed_is_parted_by_cohort() -> None:
    result = run(fq.scenarios.build("digits", seed=0, renamed=3))
    cohorts = torch.tensor([i // 2 % 4 for i in range(24)])
    assert rand(result, "operation.2", cohorts) > 0.9


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


def test_very_unlike_sizes() -> None:
    assert best_rand(run(planted(sizes=(30, 60, 110, 45))), THREE) > 0.9


def test_without_validation_samples_the_look_decides() -> None:
    result = run(planted(validation=0))
    assert best_rand(result, THREE) > 0.9
    assert any("nobody to judge" in sentence for sentence in result.summary["decisions"])
    assert split(run(planted("iid", validation=0))) == []


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
    scenario = planted(clients=16)  # the last one, 15, is of group 0
    others = replace(scenario, clients=scenario.clients[:-1])
    before = fq.run(
        others, Auto(), alone=False, engine="vectorised", device="cpu", evaluate_every=ROUNDS, out=tmp_path / "run"
    )
    assert best_rand(before, THREE) > 0.9
    joined_ = fq.onboard(tmp_path / "run", scenario.clients[-1], visits=1, scenario=others)
    parted = [unit for unit in split(before) if rand(before, unit, THREE) > 0.9]
    for unit in parted:
        assert set(joined_.circles[unit]) == {f"c{i}" for i in range(15) if i % 3 == 0}


def test_a_client_that_says_that_its_data_changed_moves_to_where_it_fits() -> None:
    scenario = planted(rounds=34)
    mover = scenario.clients[0]
    back = np.argsort(called(0, 0))  # from group 0's names to the digits, and on to group 1's names
    other = torch.tensor(called(1, 0)[back])
    now = fq.Client(
        mover.name, mover.model, (mover.train.x, mover.train.y), (mover.validation.x, mover.validation.y),
        (mover.test.x, mover.test.y), mover.traits, changes={27: Change(train=(mover.train.x, other[mover.train.y]))},
    )  # fmt: skip
    result = run(replace(scenario, clients=(now, *scenario.clients[1:])))
    truth = THREE.clone()
    truth[0] = 1
    assert best_rand(result, truth) > 0.9, result.summary["decisions"]


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


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_sketches_keep_inner_products_in_the_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 3000, generator=rng)
    found = [float(sketch(one, 64, str(i)) @ sketch(one + other, 64, str(i))) for i in range(200)]
    assert sum(found) / 200 == pytest.approx(float(one @ (one + other)), rel=0.05)


def test_only_clients_of_one_circle_and_round_are_compared() -> None:
    circle = torch.tensor([0, 0, 1, 1])
    seen = with_look(nothing_seen(4), circle, torch.tensor([0, 1, 2]), torch.ones(3, 2), torch.zeros(3, 2))
    assert seen["pairs"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert not enough(seen, circle)
    assert groups(seen, circle, torch.ones(4), 0.3).tolist() == [0, 0, 1, 1]


def test_whoever_was_not_seen_is_no_reason_to_part_and_waits_by_itself_where_others_do() -> None:
    rng = torch.Generator().manual_seed(0)
    for apart, expected in ((0.0, [0, 0, 0, 0, 0, 0]), (9.0, [0, 1, 0, 1, 2, 2])):
        middle = apart * torch.tensor([[1.0], [-1.0]]).repeat(2, 8)
        one, other = (middle + torch.randn(4, 8, generator=rng) for _ in range(2))
        seen = with_look(nothing_seen(6), torch.zeros(6, dtype=torch.int64), torch.arange(4), one, other)
        assert groups(seen, torch.zeros(6, dtype=torch.int64), torch.ones(6), 0.3).tolist() == expected


def test_the_candidate_of_a_circle_is_the_mean_of_its_members_by_their_samples() -> None:
    federation = Federation(planted(clients=4, sizes=(30, 60)), Auto(), engine="sequential", device="cpu")
    roster = federation.server.roster
    head = list(roster.units)[-1]
    size = int(roster.sizes()[head][0])
    copies = torch.arange(4.0)[:, None].expand(4, size)
    sent = Update(1, (0, 1, 2, 3), (UnitValues((head,), (size,), torch.arange(4), copies),), {})
    asked = values_of(torch.tensor([[0, 0, 1, 1]]), head, Updates(1, (sent,)), roster)
    (table,) = asked["values"].values()
    assert table[asked["rows"][0], 0].tolist() == pytest.approx([2 / 3, 2 / 3, 8 / 3, 8 / 3])  # 30 and 60 samples
    federation.close()


def test_nearest_circles_are_those_that_may_join() -> None:
    circle = torch.tensor([0, 0, 1, 1, 2, 2, -1])
    values = {0: torch.tensor([0.0]), 1: torch.tensor([1.0]), 2: torch.tensor([9.0])}
    assert tidy(joined(circle, values)).tolist() == [0, 0, 0, 0, 1, 1, -1]


def asked(received: float, candidate: float, own: float, spread: float = 0.0) -> dict[str, Any]:
    """A ballot of eight clients about two circles, in which all have about the same losses."""
    wobble = spread * torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]
    losses = torch.tensor([received, candidate, own]).double().expand(8, 2, 3).clone()
    losses[:, :, 1:2] += wobble
    circles = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    return {
        "unit": "head", "names": ["its own evidence"], "back": [], "circles": circles, "losses": losses,
        "judged": torch.full((8, 2), 5.0, dtype=torch.float64),
    }  # fmt: skip


def test_a_gain_that_lasts_parts_and_one_that_fades_does_not() -> None:
    first = asked(1.0, 0.8, 0.8, 0.05)  # no better than one's own copies
    circle, made = by_ballot(first, torch.zeros(8, dtype=torch.int64), 5, 2.0)
    assert len(circle.unique()) == 1
    for candidate, parts in ((0.84, True), (0.9, False)):  # four fifths and a half of the gain are left
        later, again = by_ballot(asked(1.0, candidate, candidate, 0.05), circle, 9, 2.0, made)
        assert (len(later.unique()) == 2) is parts
        assert again[0]["changed"] is parts


@pytest.mark.parametrize(
    ("received", "candidate", "own", "spread", "parts"),
    [
        (1.0, 0.8, 0.9, 0.05, True),  # better than both, by far more than its error
        (1.0, 0.8, 0.7, 0.05, False),  # what a client can do by itself is no reason to part
        (1.0, 0.98, 1.1, 0.2, False),  # not sure
        (0.8, 1.0, 1.2, 0.05, False),  # worse
    ],
)
def test_circles_must_beat_what_is_shared_and_what_is_ones_own(
    received: float, candidate: float, own: float, spread: float, parts: bool
) -> None:
    circle, made = by_ballot(asked(received, candidate, own, spread), torch.zeros(8, dtype=torch.int64), 7, 2.0)
    assert (len(circle.unique()) == 2) is parts
    assert made[0]["changed"] is parts
    assert made[0]["gain"] == pytest.approx(received - candidate)
    assert "round 7: unit head, 8 clients" in in_words(made[0])


@pytest.mark.parametrize(("errors", "joins"), [(1.0, False), (6.0, True)])
def test_circles_are_joined_again_for_a_gain_that_is_sure(errors: float, joins: bool) -> None:
    back = asked(1.0, 0.9, 1.2, 0.1 / errors * 7**0.5) | {"names": [], "back": ["everybody together"]}
    back["circles"] = torch.zeros(1, 8, dtype=torch.int64)
    circle, made = by_ballot(back, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 9, Auto().sure)
    assert (len(circle.unique()) == 1) is joins
    assert made[0]["backwards"]
    assert ("joined in one circle" in in_words(made[0])) is joins


def test_sentences_say_what_a_gain_lacks_and_count_errors_as_the_decision_does() -> None:
    for own, spread, says in ((0.7, 0.05, "own copy may do as well"), (1.2, 0.2 / 4 * 7**0.5, "3 errors are needed")):
        _, made = by_ballot(asked(1.0, 0.8, own, spread), torch.zeros(8, dtype=torch.int64), 7, Auto().sure)
        assert says in in_words(made[0])
    assert "evidence: 2.8 standard errors" in in_words(made[0])  # four, of eight clients


def test_what_is_nearly_as_good_in_fewer_circles_is_taken() -> None:
    both = asked(1.0, 0.8, 0.9, 0.05)
    pairs = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    both |= {"names": ["its own evidence", "its own evidence, more circles"]}
    both["circles"] = torch.stack([both["circles"][0], pairs])
    for loss, taken in ((0.792, 2), (0.78, 4)):  # 4 and 9 per cent of the gain more in four circles, the same for all
        finer = both["losses"][:, :, 1:2] - 0.8 + loss
        losses = torch.cat([both["losses"][:, :, :2], finer, both["losses"][:, :, 2:]], dim=2)
        circle, made = by_ballot({**both, "losses": losses}, torch.zeros(8, dtype=torch.int64), 7, 2.0)
        assert made[0]["circles"] == [1, taken]
        assert len(circle.unique()) == taken


@pytest.mark.parametrize(("errors", "parts"), [(4.0, False), (7.0, True)])  # of eight clients: 2.8 and 3.8 of many
def test_the_best_of_many_splits_needs_more_than_a_single_test(errors: float, parts: bool) -> None:
    spread = 0.2 / errors * 7**0.5  # so that the gain of 0.2 is so many standard errors
    circle, made = by_ballot(asked(1.0, 0.8, 1.2, spread), torch.zeros(8, dtype=torch.int64), 7, Auto().sure)
    assert made[0]["gain"] / made[0]["error"] == pytest.approx(errors)
    assert (len(circle.unique()) == 2) is parts


def test_few_clients_are_as_sure_as_students_t_says() -> None:
    for t in (1.0, 3.0, 8.0):  # with three clients the chance is 1/2 - t / 2 sqrt(2 + t^2)
        exact = -NormalDist().inv_cdf(0.5 - t / (2 * (2 + t * t) ** 0.5))
        assert Gain(t, 1.0, 3).sure == pytest.approx(exact, abs=0.06)
        assert Gain(-t, 1.0, 3).sure == -Gain(t, 1.0, 3).sure


def test_a_client_with_a_place_leaves_it_for_a_gain_that_is_sure_and_is_one() -> None:
    federation = Federation(planted(clients=6), Auto(), engine="sequential", device="cpu")
    roster, method = federation.server.roster, Auto()
    head = list(roster.units)[-1]
    state = method.begin(roster)
    state["circle"][head] = torch.tensor([0, 0, 0, 1, 1, 1])
    for gain, error, waits, asks, moves in (
        (0.3, 0.01, False, True, True), (0.03, 0.01, False, True, False), (1e-8, 1e-10, False, True, False),
        (1e-8, 1e-10, True, False, True), (0.3, 0.01, False, False, False),
    ):  # fmt: skip
        state["waiting"], state["asked"] = (torch.tensor([who] + [False] * 5) for who in (waits, asks))
        _, patches = patches_of(state["circle"], state["waiting"], roster, 0)
        assert patches == [(0,), (0,), (1,)] or patches == [(0,), (1,), (0,)]
        fits = torch.tensor([[0.5 - gain * (patch == (1,)) for patch in patches]], dtype=torch.float64)
        said = Update(3, (0,), (), {"fits": fits, "errors": torch.full_like(fits, error)})
        after = method.learn(state, Updates(3, (said,)), roster)
        assert (int(after["circle"][head][0]) == 1) is moves
        assert not after["waiting"].any()
        assert not after["asked"].any()
    federation.close()


def test_whether_a_patch_fits_is_asked_until_nearly_all_have_answered() -> None:
    federation = Federation(planted(clients=8), Auto(), engine="sequential", device="cpu")
    roster, method = federation.server.roster, Auto()
    head = list(roster.units)[-1]
    state = method.begin(roster)
    state["circle"][head] = torch.arange(8) % 2
    state = method.enrol(state, roster, roster, Updates(0, ()))  # nothing declared has changed: data have
    asked = []
    for round_, ids in enumerate(((0, 1, 2, 3), (2, 3, 4), (5, 6)), 1):
        asked.append(method.plan(state, roster).offered[head].nonzero()[:, 0].tolist())
        fits = torch.zeros(len(ids), 3, dtype=torch.float64)
        state = method.learn(state, Updates(round_, (Update(round_, ids, (), {"fits": fits, "errors": fits}),)), roster)
    assert asked == [list(range(8)), [4, 5, 6, 7], [5, 6, 7]]
    assert not method.plan(state, roster).offered
    federation.close()


def test_a_ballot_goes_on_until_three_quarters_have_answered() -> None:
    federation = Federation(planted(share=0.5, rounds=40), Auto(), engine="sequential", device="cpu", readouts=())
    heard = []
    while len(heard) < 2:
        federation.step(evaluate=False)
        state = federation.server.state
        if state["doing"] == "votes":
            heard.append(float(state["ballot"]["heard"].double().mean()))
    assert heard[0] == 0
    assert 0.4 < heard[1] < 0.75  # one half: the same ballot
    federation.close()


@pytest.mark.parametrize(("spent", "looks"), [(0.0, True), (1.0, False)])
def test_nobody_looks_once_the_share_of_the_traffic_is_spent(spent: float, looks: bool) -> None:
    federation = Federation(planted(clients=6), Auto(), engine="sequential", device="cpu", readouts=())
    roster, method = federation.server.roster, Auto()
    numbers = sum(float(sizes.float().mean()) for sizes in roster.sizes().values())
    state = method.begin(roster) | {"heard": 1.0, "round": 2}
    state |= {"spent": spent * 0.08 * 2 * numbers * 100}
    after = method.learn(state, Updates(3, (Update(3, tuple(range(6)), ()),)), roster)
    assert (after["doing"] == "looks") is looks
    federation.close()


def test_now_and_then_all_are_asked_whether_their_patch_fits() -> None:
    federation = Federation(planted(clients=6), Auto(), engine="sequential", device="cpu", readouts=())
    roster, method = federation.server.roster, Auto()
    for circle, asks in ((torch.arange(6) % 2, True), (torch.zeros(6, dtype=torch.int64), False)):
        state = method.begin(roster) | {"heard": 9.0, "round": 9, "doing": "looks", "tries": 5}
        state |= {"seen": {unit: nothing_seen(6) for unit in roster.units}}  # nothing to propose
        state["circle"] = dict.fromkeys(roster.units, circle)
        after = method.learn(state, Updates(10, (Update(10, tuple(range(6)), ()),)), roster)
        assert bool(method.plan(after, roster).offered) is asks  # where there is but one patch, nobody
    federation.close()


def test_a_unit_that_nobody_can_judge_is_left_to_the_look_and_the_others_to_ballots() -> None:
    few = planted(clients=18, sizes=(50,), validation=15, widths=(32, 24), rounds=12)
    blind = [fq.Client(c.name, c.model, (c.train.x, c.train.y), None, (c.test.x, c.test.y)) for c in few.clients]
    clients = [b if i // 3 % 2 else c for i, (b, c) in enumerate(zip(blind, few.clients, strict=True))]  # of width 24
    said = run(replace(few, clients=tuple(clients))).summary["decisions"]
    assert any("nobody to judge" in each for each in said), said
    assert any("nats" in each and "nobody to judge" not in each for each in said), said
