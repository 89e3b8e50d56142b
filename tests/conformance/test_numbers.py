"""What went wrong once: gradients misread, samples written on, hooks lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pytest
import torch
from plain_loop import scenario_of, train
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.families.copies import copy_of

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


class Pruned(nn.Module):
    """Keeps some weights at zero by a hook; which ones is in a buffer, and so the client's own."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("kept", (torch.arange(30) % 3 > 0).float().view(5, 6))
        self.first.weight.data *= self.kept
        self.first.weight.register_hook(lambda gradient: gradient * self.kept)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.first(x).tanh())
        return scores


def pruned_clients(build: Callable[[], nn.Module] = Pruned) -> fq.Scenario:
    draw = torch.Generator().manual_seed(1)
    clients = [
        fq.Client(f"c{i}", build, (torch.randn(n, 6, generator=draw), torch.arange(n) % 3))
        for i, n in enumerate((9, 6))
    ]
    return fq.Scenario("pruned", clients, fq.Training(rounds=2, batch=4, lr=0.1))


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_of_parameters_are_kept(engine: str) -> None:
    scenario = pruned_clients()
    federation = fq.Federation(scenario, fq.methods.Local(), engine=engine, device="cpu")
    plain = {client.name: copy_of(federation.model(client.name)).train() for client in scenario.clients}
    stacks = engine in ("vectorised", "parallel-stacks")
    with pytest.warns(RuntimeWarning, match=r"'first\.weight' has a hook") if stacks else nullcontext():
        for _ in range(2):
            federation.step(evaluate=False)
    federation.close()
    for client in scenario.clients:
        for round_ in (1, 2):
            train(plain[client.name], client, round_, scenario.training)
        found = federation.model(client.name)
        assert found.first.weight[found.kept == 0].abs().max() == 0  # type: ignore[index, union-attr]
        for one, other in zip(plain[client.name].parameters(), found.parameters(), strict=True):
            torch.testing.assert_close(other, one, atol=2e-6, rtol=1e-5)


def test_hooks_that_a_client_has_for_itself_make_a_family_of_their_own() -> None:
    def halved(factor: float) -> nn.Module:
        model = nn.Linear(6, 3)
        model.weight.register_hook(lambda gradient: gradient * factor)
        return model

    scenario = pruned_clients()
    clients = [replace(client, model=partial(halved, i + 1.0)) for i, client in enumerate(scenario.clients)]
    federation = fq.Federation(replace(scenario, clients=tuple(clients)), fq.methods.Local(), device="cpu")
    assert len(federation.simulation.family_states) == 2


def test_a_copy_of_a_module_looks_at_itself() -> None:
    """Hooks and functions that close over a module see the copy, as do its parts in their defaults and in lists."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
            pair = [self.scale, self.other]

            def times(x: Tensor, other: Tensor = self.other) -> Tensor:
                return x * self.scale * other * pair[0]

            self.times = times
            self.register_forward_hook(lambda module, given, out: out + self.scale)

        def forward(self, x: Tensor) -> Tensor:
            return self.times(x)

    first = Looking()
    twin = copy_of(first)
    with torch.no_grad():
        first.scale.fill_(100.0)
        twin.other.fill_(3.0)
    assert twin(torch.ones(1)).item() == 1 * 3 * 1 + 1
    twin(torch.ones(1)).backward()
    assert twin.scale.grad is not None
    assert first.scale.grad is None


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "parallel"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adamw"])
def test_a_layer_that_is_not_used_does_not_decay(engine: str, optimiser: str) -> None:
    """PyTorch's optimisers leave alone what a loss does not depend on."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    training = fq.Training(rounds=2, batch=4, lr=0.1, weight_decay=0.1, optimiser=optimiser)  # type: ignore[arg-type]
    scenario = scenario_of(Spare, (9, 6), lambda n, generator: torch.randn(n, 6, generator=generator), training)
    federation = fq.Federation(scenario, fq.methods.Local(), engine=engine, device="cpu")
    before = federation.model("c0").get_parameter("spare.weight").clone()
    moved = federation.model("c0").get_parameter("used.weight").clone()
    for _ in range(2):
        federation.step(evaluate=False)
    after = federation.model("c0")
    federation.close()
    assert torch.equal(after.get_parameter("spare.weight"), before)
    assert not torch.equal(after.get_parameter("used.weight"), moved)
