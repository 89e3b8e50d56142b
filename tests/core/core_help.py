"""Small federations and a plain PyTorch loop to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt._util.randomness import key_of, streams
from fedquilt.engines.schedule import orders
from fedquilt.interface.messages import Instructions, Roster, Update, Updates
from fedquilt.methods import FedAvg, Method, State
from fedquilt.results import Row
from fedquilt.sharing import Plan

ENGINES = ("sequential", "vectorised", "parallel", "parallel-stacks")
Builder = Callable[[], nn.Module]


class Zero(nn.Linear):
    """A linear layer without bias that starts at zero, so that a round can be computed by hand."""

    def __init__(self, inputs: int = 1, outputs: int = 2) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.zeros_(self.weight)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class Task(nn.Module):
    """Another base on the same head."""

    def __init__(self, inputs: int, wide: int) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.base = nn.Sequential(nn.Linear(inputs, wide), nn.Tanh(), nn.Linear(wide, 5))
        self.units = {"base": ["base"], "head": ["head"]}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.base(x))
        return out


def points(
    model: Builder | Sequence[Builder] = mlp,
    sizes: Sequence[int] = (5, 9, 7),
    shape: Sequence[int] = (4,),
    classes: int = 3,
    words: int = 0,
    training: Mapping[str, Any] | None = None,
    **more: Any,
) -> fq.Scenario:
    """Clients with random samples (whole numbers below `words`, if given), as many as there are sizes."""
    draw = torch.Generator().manual_seed(7)
    builders = list(model) if isinstance(model, Sequence) else [model] * len(sizes)
    clients = []
    for i, size in enumerate(sizes):
        splits = []
        for n in (size, 4, 6):
            kind = (n, *shape)
            x = torch.randint(0, words, kind, generator=draw) if words else torch.randn(kind, generator=draw)
            splits.append((x, torch.randint(0, classes, (n,), generator=draw)))
        train, validation, test = splits
        traits = {"device": f"gen{i % 2}"}
        clients.append(fq.Client(f"client-{i}", builders[i], train, validation, test, traits))
    how = {"rounds": 2, "epochs": 2, "batch": 3, "lr": 0.05} | dict(training or {})
    names = [str(c) for c in range(classes)]
    return fq.Scenario("points", clients, training=fq.Training(**how), label_names=names, **more)


def federation(
    scenario: fq.Scenario, method: Method | None = None, engine: str = "sequential", **more: Any
) -> fq.Federation:
    return fq.Federation(scenario, method or FedAvg(), device="cpu", engine=engine, **more)


def rows_after(
    scenario: fq.Scenario, method: Method | None = None, engine: str = "sequential", rounds: int = 2, **more: Any
) -> dict[str, Tensor]:
    """Every client's row after some rounds, by name."""
    federated = federation(scenario, method, engine, **more)
    try:
        for _ in range(rounds):
            federated.step(evaluate=False)
        assert set(federated.simulation.engines) == {engine}
        return rows_of(federated)
    finally:
        federated.close()


def rows_of(federated: fq.Federation) -> dict[str, Tensor]:
    found = {}
    for family_state in federated.simulation.family_states:
        for client, row in zip(family_state.clients, family_state.store.all(), strict=True):
            found[client.name] = row.clone()
    return found


def parameter(federated: fq.Federation, client: int, name: str) -> list[float]:
    """A parameter of a client as it is now, flat."""
    index, at = federated.simulation.home[client]
    family_state = federated.simulation.family_states[index]
    numbers: list[float] = family_state.family.layout.tensor(family_state.store.all(), name)[at].flatten().tolist()
    return numbers


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], atol: float = 2e-5) -> None:
    assert one.keys() == other.keys()
    for name, row in one.items():
        torch.testing.assert_close(row, other[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]


def plain_fedavg(scenario: fq.Scenario, rounds: int, seed: int = 0) -> dict[str, nn.Module]:
    """FedAvg as a plain loop with torch.optim: every client's model after its last local training."""
    t = scenario.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_of("model", seed))
        shared = scenario.clients[0].model()
    models: dict[str, nn.Module] = {}
    for round_ in range(1, rounds + 1):
        for client in scenario.clients:
            model = copy.deepcopy(shared).train()
            kind: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[t.optimiser]
            own = {"momentum": t.momentum, "nesterov": t.nesterov} if t.optimiser == "sgd" else {"betas": t.betas}
            optimiser = kind(model.parameters(), lr=t.rate(round_), weight_decay=t.weight_decay, **own)
            n = client.samples
            key = np.array([key_of(seed, client.name)], dtype=np.uint64)
            order = orders(torch.from_numpy(streams(key, round_, t.epochs)), torch.tensor([n]), n)[0]  # (epochs, n)
            for epoch in order:
                for index in epoch.split(t.batch):
                    optimiser.zero_grad()
                    F.cross_entropy(model(client.train.x[index]), client.train.y[index]).backward()
                    optimiser.step()
            models[client.name] = model
        total = sum(client.samples for client in scenario.clients)
        mean = {
            name: sum(models[c.name].state_dict()[name].double() * c.samples / total for c in scenario.clients)
            for name in shared.state_dict()
        }
        shared = copy.deepcopy(shared)
        with torch.no_grad():
            for name, value in shared.state_dict().items():
                value.copy_(mean[name])
    return models


@dataclass(frozen=True)
class Planned(Method):
    """A method that follows plans written beforehand: one for each round, the last one for all that come."""

    name: ClassVar[str] = "planned"
    plans: tuple[Plan, ...] = ()

    def begin(self, roster: Roster) -> State:
        return {"round": 0}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        return {"round": updates.round}

    def plan(self, state: State, roster: Roster) -> Plan:
        return self.plans[min(int(state["round"]), len(self.plans) - 1)]

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        return state


@dataclass
class Tap:
    """Everything that passes between a federation's server and its clients, copied."""

    downs: list[Instructions] = field(default_factory=list)
    ups: list[Update] = field(default_factory=list)

    def __init__(self, federated: fq.Federation) -> None:
        self.downs, self.ups = [], []
        run = federated.simulation.run

        def tapped(down: Instructions) -> Update:
            self.downs.append(copy.deepcopy(down))
            up = run(down)
            self.ups.append(copy.deepcopy(up))
            return up

        federated.simulation.run = tapped  # type: ignore[method-assign]


def same_rows(ours: Sequence[Row], theirs: Sequence[Row], within: float = 1e-6) -> None:
    """Rows of results are the same; losses, which are sums of floats, nearly."""
    losses = ("loss", "training_loss")
    for one, other in zip(ours, theirs, strict=True):
        assert {k: v for k, v in one.items() if k not in losses} == {k: v for k, v in other.items() if k not in losses}
        for key in losses:
            assert one[key] == (None if other[key] is None else pytest.approx(other[key], rel=within))


class Picky(nn.Module):
    """Looks at values in Python, which a stack cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out * 2 if float(out.detach().sum()) > 1e9 else out


class StandIn:
    """In the place of a CUDA graph: does nothing when it is captured, and everything when it is replayed, with what is
    in memory then. `made` are all of them since they were last cleared."""

    made: ClassVar[list[StandIn]] = []
    bytes = 0

    def __init__(self, body: Callable[[], None], device: torch.device, pool: object = None) -> None:
        self.body, self.replays = body, 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.body()
