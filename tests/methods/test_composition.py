"""Parts of different methods together: FedDL's plans with best-of-both, ModFL's modules with FedDL's affinity."""

from __future__ import annotations

import json
from functools import partial
from typing import ClassVar

import pytest
import torch
from layered import CHANNELS, CORNERS, layered
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.methods.feddl import FedDL
from fedquilt.methods.modfl import ModFL
from fedquilt.readouts import BestOfLast
from fedquilt.runs.checkpoint import federation_state, restore_federation
from fedquilt.sharing.grouping import Linkage

NAMES = {"north": torch.tensor([0, 1, 2, 3]), "south": torch.tensor([1, 2, 3, 0])}
BY_AFFINITY = {"configuration": "device", "operation": "affinity"}
BOTH: list[Linkage] = ["component", "average"]


def circles(plan: fq.Plan, unit: str) -> list[int]:
    unit_plan = plan[unit]
    assert isinstance(unit_plan, fq.UnitPlan)
    return unit_plan.circle.tolist()


def test_feddl_with_best_of_both() -> None:
    readouts = ["received", "adapted", "best-of-both"]
    result = fq.run(
        layered(rounds=7), "feddl", engine="sequential", alone=False, readouts=readouts, evaluate_every=7, device="cpu"
    )
    assert circles(result.plan, "0") == [0] * 6 + [6] * 6  # the read-outs changed nothing in what is shared
    counts = {(e.readout, e.split): e.counts for e in result.evaluations}
    for split in ("validation", "test"):
        received, adapted, both = (counts[readout, split] for readout in readouts)
        assert torch.equal(received.sum(2), both.sum(2))  # the same samples
        right = [c.diagonal(dim1=1, dim2=2).sum(1) for c in (received, adapted, both)]
        assert not torch.equal(right[0], right[1])  # pulls below 1 and a private head: both models differ
    seen = {e.readout: e.score for e in result.evaluations if e.split == "validation"}
    assert seen["best-of-both"] > max(seen["received"], seen["adapted"]) - 0.02


class Generation(nn.Module):
    """Devices of two generations: the same channels, a longer configuration module on the new one."""

    units: ClassVar[dict[str, list[str]]] = {"configuration": ["configuration"], "operation": ["operation"]}

    def __init__(self, generation: str) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(CHANNELS, 6), nn.Tanh()]
        if generation == "new":
            layers = [nn.Linear(CHANNELS, 10), nn.Tanh(), nn.Linear(10, 6), nn.Tanh()]
        self.configuration = nn.Sequential(*layers)
        self.operation = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.operation(self.configuration(x))
        return out


def generations(common: bool = True, samples: int = 16) -> fq.Scenario:
    """Three clients of every generation and cohort, and samples on the server that both generations can read."""
    random = torch.Generator().manual_seed(0)

    def draw(cohort: str, count: int) -> tuple[Tensor, Tensor]:
        corner = torch.randint(4, (count,), generator=random)
        x = torch.randn(count, CHANNELS, generator=random)
        x[:, :3] = CORNERS[corner] + 0.6 * x[:, :3]
        return x, NAMES[cohort][corner]

    clients = [
        fq.Client(f"{device}-{cohort}-{i}", partial(Generation, device), draw(cohort, samples), draw(cohort, 10),
                  draw(cohort, 80), {"device": device, "cohort": cohort})
        for device in ("old", "new") for cohort in NAMES for i in range(3)
    ]  # fmt: skip
    given = draw("north", 150) if common else None
    return fq.Scenario("generations", clients, fq.Training(rounds=8, epochs=8, batch=8, lr=0.2), common=given)


def run(method: fq.Method, scenario: fq.Scenario | None = None) -> fq.Run:
    return fq.run(scenario or generations(), method, engine="sequential", alone=False, evaluate_every=8, device="cpu")


@pytest.mark.parametrize("linkage", BOTH)
def test_modfl_with_operation_circles_by_affinity(linkage: Linkage) -> None:
    result = run(ModFL(by=BY_AFFINITY, linkage=linkage))
    # Nobody said who is in which cohort, and cohorts hold clients of both generations.
    found = circles(result.plan, "operation")
    assert [circle == found[0] for circle in found] == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert circles(result.plan, "configuration") == [0] * 6 + [1] * 6
    assert result.summary["adjusted_rand"] == {"operation": 1.0}
    if linkage == "component":  # it finds the cohorts too, some rounds later
        return
    declared, private = run(ModFL()), run(ModFL(by={**BY_AFFINITY, "operation": "private"}))
    assert result.summary["accuracy_mean"] > private.summary["accuracy_mean"]
    assert result.summary["accuracy_mean"] > declared.summary["accuracy_mean"] - 0.03


def test_whole_models_are_sent_only_where_they_are_looked_at() -> None:
    by = {"configuration": "private", "operation": "affinity"}
    federation = fq.Federation(generations(), ModFL(by=by, every=3), engine="sequential", device="cpu")
    sends = []
    for _ in range(5):
        sends.append(bool(federation.server.plan.sends("configuration").all()))
        federation.step(evaluate=False)
    assert sends == [True, False, False, True, False]


def test_models_that_cannot_read_the_common_samples_are_named() -> None:
    whole = generations()
    narrow = fq.Scenario("narrow", whole.clients, whole.training, common=(torch.zeros(5, 3), torch.zeros(5)))
    with pytest.raises(ValueError, match=r"^the model of client 'old-north-0' cannot be run on the server's samples"):
        run(ModFL(by=BY_AFFINITY), narrow)
    with pytest.raises(ValueError, match=r"circles by affinity compare models on samples that the server holds"):
        run(ModFL(by=BY_AFFINITY), generations(common=False))


@pytest.mark.parametrize(
    "method",
    [
        FedDL(interval=1, regroup_every=1),
        ModFL(by={"configuration": "device", "operation": "found"}),
        ModFL(by=BY_AFFINITY),
    ],
)
def test_a_checkpoint_holds_what_they_remember(method: fq.Method) -> None:
    """Three rounds, a copy by way of JSON and tensors, three rounds: the same bits as six rounds, read-outs too."""
    scenario = generations()
    if isinstance(method, FedDL):
        scenario = fq.Scenario("one generation", scenario.clients[:6], scenario.training, common=scenario.common)
    how = scenario.training.but({"epochs": 1, "rounds": 6, "share": 0.7})

    def made() -> fq.Federation:
        return fq.Federation(scenario, method, how, engine="sequential", readouts=[BestOfLast(3)], device="cpu")

    whole, first, second = made(), made(), made()
    reports = [whole.step() for _ in range(6)]
    for _ in range(3):
        first.step()
    tensors: dict[str, Tensor] = {}
    text = json.loads(json.dumps(federation_state(first, tensors)))
    restore_federation(second, {name: tensor.clone() for name, tensor in tensors.items()}, text)
    for report in reports[3:]:
        again = second.step()
        assert again.plan == report.plan
        for one, other in zip(again.evaluations, report.evaluations, strict=True):
            assert torch.equal(one.counts, other.counts)
    for family_state, copy in zip(whole.simulation.family_states, second.simulation.family_states, strict=True):
        assert torch.equal(family_state.store.all(), copy.store.all())
