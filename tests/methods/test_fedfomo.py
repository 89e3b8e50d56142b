"""FedFomo beside a plain loop, and single copies in plans."""

from __future__ import annotations

import pytest
import torch
from plain import (
    Weights,
    close,
    federation,
    first_weights,
    flat,
    gradient,
    loss_of,
    moved,
    net,
    scenario,
    weights_of,
)
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import FedFomo, Local
from fedquilt.sharing import MixedUnit, Plan, UnitPlan, traffic

ENGINES = ("sequential", "vectorised")


def on_validation(weights: Weights, client: fq.Client) -> float:
    return float(F.cross_entropy(functional_call(net(), weights, (client.validation.x,)), client.validation.y))


def weighed(own: Weights, offered: dict[int, Weights], client: fq.Client) -> tuple[Weights, dict[int, float]]:
    """Where a client begins, and what each of the others is worth to it."""
    worth = {}
    for j, theirs in offered.items():
        far = float((flat(theirs) - flat(own)).norm())
        worth[j] = (on_validation(own, client) - on_validation(theirs, client)) / far
    total = sum(max(w, 0.0) for w in worth.values())
    start = dict(own)
    for j, theirs in offered.items():
        if worth[j] > 0:
            start = moved(start, moved(theirs, own, -1), worth[j] / total)
    return start, worth


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedfomo_by_hand(share: float, engine: str) -> None:
    of = scenario((6, 9, 4, 7), rounds=6, epochs=2, share=share, groups=2)
    fed = federation(of, FedFomo(models=2), engine)
    own = [first_weights(of) for _ in of.clients]
    sent: dict[int, Weights] = {}
    affinity = torch.zeros(4, 4)
    better = 0
    for _ in range(6):
        offered = fed.server.state["offered"].clone()
        report = fed.step(evaluate=False)
        numbers = 4 * sum(value.numel() for value in own[0].values())
        told = 8 * 2 * len(report.participants)  # whose they are
        copies = sum(int((offered[i] >= 0).sum()) for i in report.participants)
        assert report.traffic.total_down == copies * numbers + told
        assert report.traffic.total_up == len(report.participants) * (
            numbers + 2 * 4
        )  # a model, and what they are worth
        new = {}
        for i in report.participants:
            assert i not in offered[i].tolist()
            client = of.clients[i]
            theirs = {j: sent[j] for j in offered[i].tolist() if j >= 0}  # what each sent last, whenever that was
            now, worth = weighed(own[i], theirs, client)
            better += any(w > 0 for w in worth.values())
            for j, w in worth.items():
                affinity[i, j] += w
            for _ in range(2):
                now = moved(now, gradient(loss_of(client), now), -0.3)
            new[i] = now
        sent |= new
        for i, weights in new.items():
            own[i] = weights
        for i, client in enumerate(of.clients):
            close(weights_of(fed.model(client.name)), own[i], atol=1e-4)
        torch.testing.assert_close(fed.server.state["affinity"], affinity, atol=1e-3, rtol=1e-3)
    assert better > 2


def test_whoever_was_worth_most_is_offered_again_and_chance_explores() -> None:
    of = scenario((20,) * 6, rounds=8, batch=10, groups=2)
    greedy = federation(of, FedFomo(models=2, epsilon=0.0), "vectorised")
    greedy.run()
    affinity, offered = greedy.server.state["affinity"], greedy.server.state["offered"]
    for i in range(6):
        others = sorted((j for j in range(6) if j != i), key=lambda j: -float(affinity[i, j]))
        assert sorted(offered[i].tolist()) == sorted(others[:2])
    curious = federation(of, FedFomo(models=2, epsilon=1.0, decay=0.0), "vectorised")
    seen: list[set[int]] = [set() for _ in range(6)]
    for _ in range(20):
        curious.step(evaluate=False)
        for i, numbers in enumerate(curious.server.state["offered"].tolist()):
            seen[i] |= set(numbers)
            assert len(set(numbers)) == 2
    assert all(len(numbers) == 5 for numbers in seen)


def test_where_nobody_helps_it_is_local() -> None:
    """Also in the first round, when there is nothing to offer."""
    of = scenario((6, 9), rounds=4, groups=2)
    lone = [fq.Client(c.name, net, c.train, None, c.test) for c in of.clients]  # nothing to weigh others on
    of = fq.Scenario("lone", lone, of.training, label_names=of.label_names)
    fomo, local = federation(of, FedFomo()), federation(of, Local())
    for fed in (fomo, local):
        fed.run()
    for client in of.clients:
        close(weights_of(fomo.model(client.name)), weights_of(local.model(client.name)))


def test_only_models_of_one_architecture_are_offered() -> None:
    plain = scenario((6, 9, 4, 5), rounds=3)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3))

    clients = [
        fq.Client(c.name, wide if i > 1 else net, c.train, c.validation, c.test) for i, c in enumerate(plain.clients)
    ]
    fed = federation(fq.Scenario("two", clients, plain.training, label_names=plain.label_names), FedFomo())
    fed.run()
    assert [sorted(row, reverse=True) for row in fed.server.state["offered"].tolist()] == [
        [1, -1, -1], [0, -1, -1], [3, -1, -1], [2, -1, -1],
    ]  # fmt: skip


def test_fedfomo_that_is_handed_nothing() -> None:
    with pytest.raises(ValueError, match="use the method 'local'"):
        FedFomo(models=0)
    with pytest.raises(ValueError, match=r"epsilon=1\.5 is a probability"):
        FedFomo(epsilon=1.5)


# --- single copies in plans -------------------------------------------------------------------------------------------


def mixed(k: int = 3) -> MixedUnit:
    return MixedUnit(torch.eye(k))


def test_copies_are_part_of_a_plan() -> None:
    numbers = torch.tensor([[1, 2], [0, -1], [-1, -1]])
    plan = Plan({"u": mixed()}, asked={"u": [1, 1, 1]}, copies={"u": numbers})
    assert Plan.from_json(plan.to_json()) == plan != Plan({"u": mixed()}, asked={"u": [1, 1, 1]})
    assert str(plan).endswith("private; asked of 3; 3 copies offered")
    assert plan.but().copies["u"].tolist() == numbers.tolist()
    assert (plan | Plan({"v": UnitPlan([0, 0, 0])})).copies.keys() == {"u"}
    assert traffic(plan, {"u": 10}).down[:, 0].tolist() == [20, 10, 0]
    assert traffic(plan, {"u": 10}, [1, 2]).down[:, 0].tolist() == [0, 10, 0]


def test_copies_that_cannot_be_handed_over() -> None:
    with pytest.raises(ValueError, match="no mixed unit of the plan"):
        Plan({"u": UnitPlan([0, 0, 0])}, copies={"u": torch.zeros(3, 1)})
    with pytest.raises(ValueError, match=r"give each of 3 clients as many numbers"):
        Plan({"u": mixed()}, copies={"u": torch.tensor([[1], [0], [7]])})
    plan = Plan({"u": mixed()}, copies={"u": torch.tensor([[1], [0], [-1]])})
    shapes: list[object] = [((2,),), ((3,),), ((2,),)]
    with pytest.raises(ValueError, match=r"client 'a' is offered the copy of 'b', which has other shapes"):
        plan.check({"u": shapes}, ["a", "b", "c"])
