"""The engine that replays graphs of one client after another, with graphs that are only functions: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_help import StandIn, points, rows_of, same
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core import local_training
from fedquilt.engines import captured
from fedquilt.engines.captured import Captured
from fedquilt.methods import Ditto, FedAvg, FedProx, Method, Scaffold


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_training, "captures", lambda device: True)
    monkeypatch.setattr(captured, "Graph", StandIn)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(4, 4, 3),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def trained(scenario: fq.Scenario, method: Method, engine: str) -> fq.Federation:
    federated = fq.Federation(scenario, method, device="cpu", engine=engine)
    for _ in range(scenario.training.rounds):
        federated.step(evaluate=False)
    return federated


def engine_of(federated: fq.Federation) -> Captured:
    (family,) = federated.simulation.family_states
    found: Any = next(iter(family.engines.values()))
    assert isinstance(found, Captured)
    return found


@pytest.mark.parametrize(
    ("method", "how"),
    [
        (FedAvg(), {"momentum": 0.9}),
        (FedProx(mu=0.3), {"optimiser": "adam", "lr": 0.01}),
        (Scaffold(), {"epochs": 2, "decay_at": (0.5,), "decay": 0.1}),
        (Ditto(lam=0.5), {"share": 0.5}),
    ],
    ids=["momentum", "start", "given", "twin"],
)
def test_the_same_numbers_as_one_by_one(method: Method, how: dict[str, Any]) -> None:
    scenario = points(conv_net, shape=(1, 5, 5), sizes=(7, 9, 4, 1), training={"rounds": 4, "batch": 3} | how)
    ours = trained(scenario, method, "captured")
    same(rows_of(ours), rows_of(trained(scenario, method, "sequential")), atol=1e-6)
    engine = engine_of(ours)
    assert engine.graphs.keys() == {3, 1}  # whole batches, and what is left of 7 and 4 and of 1
    assert all(graph.replays > 3 for graph in engine.graphs.values())  # type: ignore[attr-defined]
    ours.close()
    assert not engine.graphs


class Counting(nn.Module):
    """Puts a new tensor in the place of a buffer: a graph would write to memory that nobody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        out: Tensor = self.layer(x.flatten(1)) * (1 + 0.01 * self.steps)
        return out


class Deciding(nn.Module):
    """Goes another way in every second step, which a graph would not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.turn = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        out: Tensor = self.layer(x) * (1 + self.turn % 2)
        return out


class Drawing(nn.Module):
    """Draws by a function, which is intercepted in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.2, self.training)


@pytest.mark.filterwarnings("ignore:every client trains from a fresh copy")
@pytest.mark.parametrize("model", [Counting, Deciding, Drawing])
def test_what_a_graph_cannot_hold_trains_plainly(model: Callable[[], nn.Module]) -> None:
    scenario = points(model, sizes=(6, 6, 6), training={"rounds": 3, "batch": 3})
    ours = trained(scenario, FedAvg(), "captured")
    same(rows_of(ours), rows_of(trained(scenario, FedAvg(), "sequential")), atol=1e-6)
    assert not engine_of(ours).graphs


def test_it_is_refused_without_a_gpu_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_training, "captures", lambda device: device.type == "cuda")
    with pytest.raises(ValueError, match="for a GPU; take engine='auto'"):
        fq.run(points(), "fedavg", device="cpu", engine="captured", out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
