"""Small federations for tests of privacy: rounds that can be computed by hand, and a task that can be learnt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import beta
from torch import Tensor, nn

import fedquilt as fq

CONFIDENCE = 0.99  # of an audit


class TwoUnits(nn.Module):
    """Two linear layers side by side that start at zero: from a sample (x, y) both go the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.a.weight)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) + self.b(x)
        return y


def by_hand(samples: Sequence[tuple[float, int]], **training: Any) -> fq.Scenario:
    """A client for each sample; one step at the rate 1. Then each unit of a client goes x/2 up for the label."""
    clients = []
    for i, (x, y) in enumerate(samples):
        one = (torch.tensor([[x]]), torch.tensor([y]))
        clients.append(fq.Client(f"c{i}", TwoUnits, one, one, one, labels=(0, 1)))
    settings: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch": 1, "lr": 1.0} | training
    return fq.Scenario("by hand", clients, fq.Training(**settings))


def changes(samples: Sequence[tuple[float, int]]) -> Tensor:
    """(k, 4) how far each of these clients goes in one step from zero, both units: lr (1/2) x, up for its label."""
    up = torch.tensor([[0.5 * x * (1 if y == 0 else -1), 0.5 * x * (-1 if y == 0 else 1)] for x, y in samples])
    return torch.cat([up, up], dim=1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def learnable(clients: int = 8, uneven: bool = False, **training: Any) -> fq.Scenario:
    """Three classes in six numbers; clients of two cohorts."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for i in range(clients):
        n = 12 + (i % 3) * 5 if uneven else 16
        x, y = torch.randn(n + 16, 6, generator=draw), torch.randint(0, 3, (n + 16,), generator=draw)
        x[torch.arange(n + 16), y] += 2
        traits = {"device": f"d{i % 2}", "cohort": f"k{i % 2}"}
        made.append(
            fq.Client(f"c{i}", net, (x[:n], y[:n]), (x[n : n + 8], y[n : n + 8]), (x[n + 8 :], y[n + 8 :]), traits)
        )
    settings: dict[str, Any] = {"rounds": 3, "epochs": 2, "batch": 5, "lr": 0.1} | training
    return fq.Scenario("learnable", made, fq.Training(**settings))


def run(scenario: fq.Scenario, method: Any = "fedavg", privacy: fq.Privacy | None = None, **more: Any) -> fq.Run:
    """A run on the CPU, without its clients alone."""
    options: dict[str, Any] = {"engine": "sequential", "alone": False, "device": "cpu"} | more
    return fq.run(scenario, method, privacy=privacy, **options)


def shared(result: fq.Run) -> Tensor:
    """All values that the server holds, one after another, unit by unit."""
    held = {
        unit: values.column((unit, sig)) for values in result.federation.server.all_values for unit, sig in values.keys
    }
    return torch.cat([held[unit].flatten() for unit in sorted(held)])


def audited(with_it: Tensor, without: Tensor, delta: float) -> float:
    """A lower bound on epsilon, from scores: the threshold is chosen on one half and judged on the other."""

    def low(hits: int, n: int, share: float) -> float:
        return float(beta.ppf(1 - share, hits, n - hits + 1)) if hits else 0.0

    def high(hits: int, n: int, share: float) -> float:
        return float(beta.ppf(share, hits + 1, n - hits)) if hits < n else 1.0

    def bound(present: Tensor, absent: Tensor, at: float, share: float) -> float:
        caught, alarmed = int((present > at).sum()), int((absent > at).sum())
        right, wrong = low(caught, len(present), share), high(alarmed, len(absent), share)
        return math.log(max(1e-12, (right - delta) / wrong)) if right > delta else 0.0

    first, second = with_it[::2], with_it[1::2]
    other, last = without[::2], without[1::2]
    best = max(torch.cat([first, other]).tolist(), key=lambda at: bound(first, other, at, 0.9))
    return bound(second, last, best, (1 + CONFIDENCE) / 2)


class TwoWide(nn.Module):
    """Two layers of 1000 numbers side by side, from zero: on samples of zeros they do not move."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(500, 2, bias=False), nn.Linear(500, 2, bias=False)
        nn.init.zeros_(self.a.weight)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) + self.b(x)
        return y


def still(clients: int = 6, samples: int = 1, **training: Any) -> fq.Scenario:
    """Clients of two cohorts whose training goes nowhere, so that what they and the server move by is noise."""
    zeros = (torch.zeros(samples, 500), torch.zeros(samples, dtype=torch.int64))
    traits = [{"cohort": f"k{i % 2}", "device": "d"} for i in range(clients)]
    made = [fq.Client(f"c{i}", TwoWide, zeros, zeros, zeros, has, (0, 1)) for i, has in enumerate(traits)]
    settings: dict[str, Any] = {"rounds": 3, "epochs": 1, "batch": 1, "lr": 1.0} | training
    return fq.Scenario("still", made, fq.Training(**settings))


def unrelated(noises: Tensor) -> None:
    """Asserts that rows (n, size) of noise have nothing to do with each other."""
    apart = torch.corrcoef(noises.double()) - torch.eye(len(noises))
    assert float(apart.abs().max()) < 6 / noises.shape[1] ** 0.5
