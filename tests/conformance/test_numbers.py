"""What went wrong once: gradients misread, samples written on, hooks lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from plain_loop import train
from torch import Tensor, nn

import fedquilt as fq

ENGINES = ("sequential", "vectorised", "parallel", "parallel-stacks")


class PermutedConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.conv(x.permute(0, 3, 1, 2)).mean((2, 3)))
        return scores


class Expanded(nn.Module):
    """The gradient of `p` is one number, read at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.head = nn.Parameter(torch.ones(6, 5)), nn.Linear(5 * 5 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x.flatten(1)) * self.p.sum()
        return scores


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.einsum("bhwi,oi->bhwo", x, self.w).mean((1, 2)))
        return scores


class Conjugate(nn.Module):
    """The gradient of `turn` is the imaginary part of a conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.head = nn.Parameter(torch.ones(1)), nn.Linear(5 * 5 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.complex(torch.ones_like(self.turn), self.turn).conj() * 1j
        scores: Tensor = self.head(x.flatten(1)) * turned.real * turned.imag
        return scores


LAYOUTS: list[Callable[[], nn.Module]] = [PermutedConvolution, Expanded, Einsum, Conjugate]


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("build", LAYOUTS)
def test_gradients_are_read_right_however_they_lie_in_memory(
    build: Callable[[], nn.Module], optimiser: Literal["sgd", "adam"]
) -> None:
    x, y = torch.randn(8, 5, 5, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    training = fq.Training(rounds=1, batch=8, lr=0.1, optimiser=optimiser)
    scenario = fq.Scenario("layouts", [fq.Client(name, build, (x, y)) for name in "ab"], training)
    federation = fq.Federation(scenario, fq.methods.Local(), engine="sequential", device="cpu")
    plain = copy.deepcopy(federation.model("a")).train()
    federation.step(evaluate=False)
    train(plain, scenario.clients[0], 1, training)
    for one, other in zip(plain.parameters(), federation.model("a").parameters(), strict=True):
        torch.testing.assert_close(other, one, atol=2e-6, rtol=1e-5)


class WritesOnItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x.sub_(0.5).div_(0.25))
        return scores


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_stay_as_they_are_where_a_model_writes_on_its_input(engine: str) -> None:
    draw = np.random.default_rng(0)
    given = [draw.normal(size=(20, 6)).astype(np.float32) for _ in range(4)]
    before = copy.deepcopy(given)
    clients = [
        fq.Client(f"c{i}", WritesOnItsInput, (given[i], np.arange(20) % 3), test=(given[i + 2], np.arange(20) % 3))
        for i in range(2)
    ]
    run = fq.run(
        fq.Scenario("writing", clients, fq.Training(rounds=2, batch=8, lr=0.05)), "local", engine=engine, alone=False
    )
    for now, was in zip(given, before, strict=True):
        np.testing.assert_array_equal(now, was)
    scores = run.model("c0")(torch.from_numpy(before[2])).argmax(1)
    right = (scores == torch.arange(20) % 3).float().mean().item()
    rows = [row for row in run.rows if row["client"] == "c0" and row["round"] == 2]
    assert {round(row["accuracy"], 4) for row in rows} == {round(right, 4)}
