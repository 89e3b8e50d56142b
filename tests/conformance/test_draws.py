"""What models draw: hashes that can be computed by hand, and that hang on neither engine, nor stack, nor thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from plain_loop import batches, first_model, scenario_of, tensors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fedquilt as fq
from fedquilt._util.randomness import key_of, streams

TRAINING = fq.Training(rounds=2, batch=4, lr=0.1)


def points(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 6, generator=generator)


def after(scenario: fq.Scenario, engine: str, rounds: int = 2) -> dict[str, dict[str, Tensor]]:
    """Every client's tensors after some rounds of training on its own."""
    federation = fq.Federation(scenario, fq.methods.Local(), engine=engine, device="cpu")
    for _ in range(rounds):
        federation.step()
    federation.close()
    return {client.name: tensors(federation.model(client.name)) for client in scenario.clients}


def same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    for client, own in one.items():
        for name, tensor in own.items():
            torch.testing.assert_close(other[client][name], tensor, atol=2e-6, rtol=1e-4)


def mask_by_hand(stream: int, call: int, shape: tuple[int, ...], p: float) -> Tensor:
    """Which places are kept, in Python's whole numbers, place by place."""
    low64, low32 = 2**64 - 1, 2**32 - 1

    def mixed(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & low64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & low64
        return z ^ (z >> 31)

    start = mixed((mixed(stream & low64) + call) & low64) & 0x7FFFFFFF
    kept = np.zeros(shape, dtype=bool)
    for place in np.ndindex(*shape):
        z = start
        for coordinate in place:
            z = (z + coordinate * 0x9E3779B) & low32
            z = ((z ^ (z >> 16)) * 0x45D9F3B) & low32
        z = ((z ^ (z >> 16)) * 0x45D9F3B) & low32
        signed = z - 2**32 if z >= 2**31 else z
        kept[place] = ((signed ^ (signed >> 16)) & (2**24 - 1)) >= round(p * 2**24)
    return torch.from_numpy(kept)


class Dropping(nn.Module):
    """Two layers of dropout, or two functions."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.drops = nn.ModuleList([nn.Dropout(0.4), nn.Dropout(0.25)] if layers else [])

    def forward(self, x: Tensor) -> Tensor:
        drops: list[Callable[[Tensor], Tensor]] = [*self.drops] or [
            lambda x: F.dropout(x, 0.4, self.training), lambda x: F.dropout(x, 0.25, self.training)
        ]  # fmt: skip
        scores: Tensor = self.head(drops[1](self.first(drops[0](x)).tanh()))
        return scores


def dropped_by_hand(scenario: fq.Scenario, rounds: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for client in scenario.clients:
        model = first_model(client.model)
        weights = list(model.parameters())
        for round_ in range(1, rounds + 1):
            stream = int(streams(np.array([key_of(0, client.name)], dtype=np.uint64), round_, 1)[0, 0])
            for step, index in enumerate(batches(client.name, client.samples, round_, scenario.training)):
                x, y = client.train.x[index], client.train.y[index]
                x = x * mask_by_hand(stream + step, 1, tuple(x.shape), 0.4) / 0.6
                inside = torch.tanh(x @ weights[0].T + weights[1])
                inside = inside * mask_by_hand(stream + step, 2, tuple(inside.shape), 0.25) / 0.75
                F.cross_entropy(inside @ weights[2].T + weights[3], y).backward()
                with torch.no_grad():
                    for weight in weights:
                        assert weight.grad is not None
                        weight.sub_(weight.grad, alpha=scenario.training.lr)
                        weight.grad = None
        found[client.name] = tensors(model)
    return found


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("layers", [True, False], ids=["layers", "functions"])
def test_dropout_is_what_a_loop_with_masks_by_hand_gives(layers: bool, engine: str) -> None:
    scenario = scenario_of(lambda: Dropping(layers), (9, 6), points, TRAINING)
    same(dropped_by_hand(scenario, 2), after(scenario, engine))


class Rarely(nn.Module):
    """Draws in some steps only: where the first sample's first number is over 1."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(F.dropout(x, 0.5) if float(x[0, 0]) > 1 else x)
        return scores


def test_a_step_that_draws_after_others_did_not_is_found_out() -> None:
    scenario = scenario_of(Rarely, (30, 20), points, TRAINING)
    alone: dict[str, dict[str, Tensor]] = {}
    for client in scenario.clients:  # by itself, a client trains in an engine that has not met a step that draws
        alone |= after(fq.Scenario("one", [client], TRAINING), "sequential")
    same(alone, after(scenario, "sequential"))


class Permuting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x[:, torch.randperm(6)] if self.training else x)
        return scores


@pytest.mark.parametrize("engine", ["vectorised", "parallel-stacks"])
def test_what_cannot_be_drawn_for_each_client_is_trained_one_by_one(engine: str) -> None:
    scenario = scenario_of(Permuting, (9, 6), points, TRAINING)
    with pytest.warns(RuntimeWarning, match="it draws random numbers in a way"):
        found = after(scenario, engine)
    same(after(scenario, "sequential"), found)


class Again(nn.Module):
    """A part with dropout that is run again for its gradients."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.drop = nn.Dropout(0.5) if layer else None

    def part(self, x: Tensor) -> Tensor:
        inside: Tensor = self.first(x)
        return F.dropout(inside, 0.5, self.training) if self.drop is None else self.drop(inside)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(checkpoint(self.part, x, use_reentrant=False))
        return scores


@pytest.mark.parametrize("layer", [True, False])
def test_dropout_in_a_checkpointed_part_is_refused(layer: bool) -> None:
    scenario = scenario_of(lambda: Again(layer), (9, 6), points, TRAINING)
    with pytest.raises(
        ValueError,
        match=r"clients 'c0', 'c1': .* leave layers that draw .* of what torch\.utils\.checkpoint runs again",
    ):
        after(scenario, "sequential")


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_runs_in_threads_do_not_meddle_with_one_another(engine: str) -> None:
    """Dropout, batch norm with padding, attention, and numbers from the generator that all threads have in common."""

    def noisy() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])
            return scores

    builders: list[Callable[[], nn.Module]] = [noisy, lambda: Dropping(False), Attending]
    if engine == "sequential":
        builders.append(Permuting)
    scenarios = [scenario_of(build, (22, 13), points, TRAINING) for build in builders] * 2
    expected = [after(scenario, engine) for scenario in scenarios]
    with ThreadPoolExecutor(len(scenarios)) as pool:
        found = list(pool.map(lambda scenario: after(scenario, engine), scenarios))
    for one, other in zip(expected, found, strict=True):
        same(one, other)
