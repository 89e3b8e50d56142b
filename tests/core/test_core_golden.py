"""Rounds computed by hand, for two or three clients and one or two weights.

One linear layer without bias from zero: a sample x has the logits w x, two classes, so the gradient of the
cross-entropy is (p - onehot(y)) x. With the learning rate 1 and w = 0, p = 1/2: a client whose samples are all x with
label 0 moves to w = (x/2, -x/2), with label 1 to (-x/2, x/2).
"""

from __future__ import annotations

from math import exp

import pytest
import torch
from core_help import ENGINES, Planned, Zero, federation, parameter
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.methods import FedAvg, FedPer, FedProx, Local, Method
from fedquilt.sharing import Krum, MixedUnit, Rule, TrimmedMean, UnitPlan, everyone, mean, median

ROUND = {"rounds": 2, "epochs": 1, "batch": 8, "lr": 1.0}


def client(name: str, x: float, y: int, n: int, model: type[nn.Module] = Zero) -> fq.Client:
    """n times the same sample, so that a batch's mean gradient is that of the sample."""
    return fq.Client(name, model, ([[x]] * n, [y] * n), test=([[x]], [y]), labels=[0, 1])


def two(model: type[nn.Module] = Zero, **training: float) -> fq.Scenario:
    clients = [client("a", 2.0, 0, 1, model), client("b", 4.0, 1, 3, model)]
    return fq.Scenario("two", clients, training=fq.Training(**(ROUND | training)))  # type: ignore[arg-type]


def three() -> fq.Scenario:
    """After one step the first weight is 1, -2 and 5."""
    clients = [client("a", 2.0, 0, 1), client("b", 4.0, 1, 3), client("c", 10.0, 0, 2)]
    return fq.Scenario("three", clients, training=fq.Training(**ROUND))  # type: ignore[arg-type]


def received(federated: fq.Federation, name: str) -> list[float]:
    numbers: list[float] = next(federated.model(name).parameters()).flatten().tolist()
    return numbers


@pytest.mark.parametrize("engine", ENGINES)
def test_local(engine: str) -> None:
    federated = federation(two(), Local(), engine)
    federated.step()
    assert parameter(federated, 0, "weight") == [1.0, -1.0]
    assert parameter(federated, 1, "weight") == [-2.0, 2.0]
    federated.step()
    # a: the logits of x = 2 are (2, -2), p0 = 1 / (1 + e^-4), and w0 moves by (1 - p0) 2
    away = 2 * (1 - 1 / (1 + exp(-4)))
    assert parameter(federated, 0, "weight") == pytest.approx([1 + away, -1 - away], rel=1e-5)
    federated.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_fedavg(engine: str) -> None:
    federated = federation(two(), FedAvg(), engine)
    federated.step()
    assert parameter(federated, 0, "weight") == [1.0, -1.0]  # adapted
    # weights 1 and 3: (1 * 1 + 3 * -2) / 4 = -1.25
    assert received(federated, "a") == received(federated, "b") == [-1.25, 1.25]
    federated.step()
    # a: logits (-2.5, 2.5), p0 = 1 / (1 + e^5), w0 = -1.25 + 2 (1 - p0)
    a = -1.25 + 2 * (1 - 1 / (1 + exp(5)))
    # b: logits (-5, 5), p0 = 1 / (1 + e^10), label 1: w0 = -1.25 - 4 p0
    b = -1.25 - 4 / (1 + exp(10))
    assert parameter(federated, 0, "weight") == pytest.approx([a, -a], rel=1e-5)
    assert parameter(federated, 1, "weight") == pytest.approx([b, -b], rel=1e-5)
    assert received(federated, "a")[0] == pytest.approx((a + 3 * b) / 4, rel=1e-5)
    federated.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_fedprox(engine: str) -> None:
    federated = federation(two(epochs=2), FedProx(mu=0.1), engine)
    federated.step()
    # the first step is FedAvg's, the anchor being where it starts: w = (1, -1). In the second, logits (2, -2),
    # p0 = 1 / (1 + e^-4), and the gradient of w0 is (p0 - 1) 2 + 0.1 (1 - 0).
    expected = 1 + 2 * (1 - 1 / (1 + exp(-4))) - 0.1
    assert parameter(federated, 0, "weight") == pytest.approx([expected, -expected], rel=1e-5)
    federated.close()


class TwoLayers(nn.Module):
    """z = head (base x), base from 0, head from (1, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Zero(1, 1)
        self.head = Zero(1, 2)
        with torch.no_grad():
            self.head.weight[0] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.base(x))
        return out


@pytest.mark.parametrize("engine", ENGINES)
def test_fedper(engine: str) -> None:
    federated = federation(two(TwoLayers), FedPer(), engine)
    federated.step()
    # z = 0, p = 1/2. d base = sum_c (p_c - [c = y]) head_c x: a: -1/2 * 2 = -1, b: 1/2 * 4 = 2. d head = 0 as base = 0.
    assert parameter(federated, 0, "base.weight") == [1.0]
    assert parameter(federated, 1, "base.weight") == [-2.0]
    federated.step()
    # base = (1 + 3 * -2) / 4 = -1.25 for both. a: z0 = -2.5, p0 = 1 / (1 + e^2.5); d head = (p0 - 1, 1 - p0) * -2.5
    p = 1 / (1 + exp(2.5))
    assert parameter(federated, 0, "head.weight") == pytest.approx([1 - 2.5 * (1 - p), 2.5 * (1 - p)], rel=1e-5)
    assert parameter(federated, 0, "base.weight") == pytest.approx([-1.25 + 2 * (1 - p)], rel=1e-5)
    # b: z0 = -5, p0 = 1 / (1 + e^5), label 1: d head = (p0, -p0) * -5
    q = 1 / (1 + exp(5))
    assert parameter(federated, 1, "head.weight") == pytest.approx([1 + 5 * q, -5 * q], rel=1e-5)
    assert {unit for circle_values in federated.server.all_values for unit in circle_values.units} == {
        "base"
    }  # no value of any head
    federated.close()


def test_partial_pulls() -> None:
    plan = fq.Plan({"model": UnitPlan([0, 0], [1, 1], [0.25, 1.0])})
    federated = federation(two(), Planned(plans=(plan,)))
    federated.step()
    # copies (1, -2), mean -0.5: a goes a quarter of the way from 1, b all of it
    assert received(federated, "a") == [0.625, -0.625]
    assert received(federated, "b") == [-0.5, 0.5]
    assert parameter(federated, 0, "weight") == [1.0, -1.0]  # nothing moved before the next round
    federated.step()
    p = 1 / (1 + exp(-2.5))  # a trains from 0.625: logits of x = 2 are (1.25, -1.25)
    assert parameter(federated, 0, "weight")[0] == pytest.approx(0.625 + 2 * (1 - p), rel=1e-5)


def test_a_loud_client_and_one_that_only_listens() -> None:
    plan = fq.Plan({"model": UnitPlan([0, 0], [2, 0], [0.0, 1.0])})
    federated = federation(two(), Planned(plans=(plan,)))
    federated.step()
    assert received(federated, "a") == [1.0, -1.0]  # pull 0: its own copy
    assert received(federated, "b") == [1.0, -1.0]  # only a is heard
    assert federated.server.traffic([0, 1]).up.tolist() == [[2], [0]]
    assert federated.server.traffic([0, 1]).down.tolist() == [[0], [2]]


def test_a_mixture_is_the_dense_formula() -> None:
    matrix = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [0.2, 0.3, 0.5]])
    plan = fq.Plan({"model": MixedUnit(matrix, [1.0, 0.5, 1.0])})
    federated = federation(three(), Planned(plans=(plan,)))
    federated.step()
    copies = torch.tensor([1.0, -2.0, 5.0])
    mixed = matrix @ copies
    expected = torch.stack([mixed[0], (mixed[1] - 2.0) / 2, mixed[2]])
    found = [received(federated, name)[0] for name in "abc"]
    assert found == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (mean, (1 * 1 - 3 * 2 + 2 * 5) / 6),
        (median, 1.0),  # of 1, -2, 5: weights do not count
        (TrimmedMean(0.34), 1.0),  # floor(0.34 * 3) = 1 goes at either end
    ],
)
def test_merges_through_the_loop(rule: Rule, expected: float) -> None:
    federated = federation(three(), rule=rule)
    federated.step()
    assert received(federated, "b")[0] == pytest.approx(expected, rel=1e-6)


def test_a_merge_that_could_guard_no_circle_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"^the merge 'krum' byzantine=1 keep=None bears a liar in circles of 5"):
        federation(three(), rule=Krum(1))
    lone = fq.Plan({"model": UnitPlan([0, 1, 2], [1, 1, 1])})
    federation(three(), Planned(plans=(lone,)), rule=Krum(1)).step()  # nothing is merged, so nothing is to be guarded


def test_who_does_not_take_part_stays_and_still_receives() -> None:
    federated = federation(two(share=0.5), seed=3)
    first = federated.step().participants
    assert len(first) == 1
    here, there = first[0], 1 - first[0]
    moved = [1.0, -1.0] if here == 0 else [-2.0, 2.0]
    assert parameter(federated, here, "weight") == moved
    assert parameter(federated, there, "weight") == [0.0, 0.0]
    # only one is heard, so the circle's value is its copy, whatever its weight
    assert received(federated, "a") == received(federated, "b") == moved


def test_a_circle_of_one_does_not_move() -> None:
    plan = fq.Plan({"model": UnitPlan([0, 1], [1, 1])})
    lone = federation(two(), Planned(plans=(plan,)))
    lone.step()  # circles of one member do not move: nothing is sent, nobody receives
    assert lone.server.traffic([0, 1]).total_up == lone.server.traffic([0, 1]).total_down == 0
    assert received(lone, "a") == [1.0, -1.0]


def test_reductions() -> None:
    def weights(method: Method, scenario: fq.Scenario) -> Tensor:
        federated = federation(scenario, method)
        for _ in range(2):
            federated.step(evaluate=False)
        return torch.cat([family_state.store.all().flatten() for family_state in federated.simulation.family_states])

    scenario = two(TwoLayers, lr=0.3, epochs=3)
    torch.testing.assert_close(weights(FedProx(mu=1e-9), scenario), weights(FedAvg(), scenario))
    one = fq.Scenario("one", [client("a", 2.0, 0, 3)], training=fq.Training(**ROUND))  # type: ignore[arg-type]
    assert torch.equal(weights(FedAvg(), one), weights(Local(), one))
    # sharing with pull 0 is local training
    held = everyone(["base", "head"], [1, 3], pull=0.0)
    assert torch.equal(weights(Planned(plans=(held,)), scenario), weights(Local(), scenario))
    # FedPer with everything private but an empty circle of one is local for one client
    lone = fq.Scenario("lone", [client("a", 2.0, 0, 3, TwoLayers)], training=fq.Training(**ROUND))  # type: ignore[arg-type]
    assert torch.equal(weights(FedPer(), lone), weights(Local(), lone))


def test_degenerate_settings_are_refused_aloud() -> None:
    with pytest.raises(ValueError, match="FedProx with mu=0 is FedAvg"):
        FedProx(mu=0)
    with pytest.raises(ValueError, match="push clients apart"):
        FedProx(mu=-1)
    with pytest.raises(ValueError, match="use the method 'fedavg'"):
        FedPer(personal=0)
    with pytest.raises(ValueError, match="client 'a' has 1 unit"):
        federation(two(), FedPer())
