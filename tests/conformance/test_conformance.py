"""Every model of the table on every engine, beside a plain PyTorch loop that shares no code with the engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from model_table import CASES, Case, Promise
from plain_loop import fedavg, scenario_of
from torch import Tensor

import fedquilt as fq

ENGINES = ("sequential", "vectorised", "parallel", "parallel-stacks")
EVEN = (8, 8)

# PyTorch stacks a few operations by a loop of its own, and says that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*weight_norm:FutureWarning")


def asked() -> Iterator[Any]:
    """Which tests there are: clients of one size only where engines differ in how they treat them."""
    for name, case in CASES.items():
        for engine in ENGINES:
            for sizes in ("even", "uneven"):
                if sizes == "even" and (engine.startswith("parallel") or case.promise == "refused"):
                    continue
                if case.promise == "refused" and engine.startswith("parallel"):
                    continue
                yield pytest.param(name, engine, sizes == "even", id=f"{name}-{engine}-{sizes}")


def scenario_for(case: Case, even: bool) -> fq.Scenario:
    def draw(n: int, generator: torch.Generator) -> Tensor:
        if case.words:
            return torch.randint(0, case.words, (n, *case.shape), generator=generator)
        return torch.randn(n, *case.shape, generator=generator)

    training = fq.Training(rounds=case.rounds, batch=4, lr=0.1, momentum=0.5)
    return scenario_of(case.build, EVEN if even else case.sizes, draw, training)


def trained(scenario: fq.Scenario, rounds: int, engine: str, device: str = "cpu") -> tuple[Any, list[str]]:
    """Every client's parameters and buffers after its last local training, and the engines that trained them."""
    federation = fq.Federation(scenario, fq.methods.FedAvg(), engine=engine, device=device)
    try:
        for _ in range(rounds):
            federation.step(evaluate=False)
        found = {}
        for family_state in federation.simulation.family_states:
            for client, row in zip(family_state.clients, family_state.store.all().cpu(), strict=True):
                parameters, buffers = family_state.family.layout.split(row)
                found[client.name] = parameters | buffers
        return found, federation.simulation.engines
    finally:
        federation.close()


@cache
def expected(name: str, even: bool, rounds: int) -> dict[str, dict[str, Tensor]]:
    case = CASES[name]
    scenario = scenario_for(case, even)
    if case.by_hand:
        return fedavg(scenario, rounds)
    found: dict[str, dict[str, Tensor]] = trained(scenario, rounds, "sequential")[0]
    return found


def told(promise: Promise, stacks: bool, says: str) -> AbstractContextManager[object]:
    """A model that keeps something of its own is told of in every engine, others only where they would be stacked."""
    if promise == "apart":
        return pytest.warns(RuntimeWarning, match=says if stacks else "every client trains from a fresh copy")
    return pytest.warns(RuntimeWarning, match=says) if promise == "one by one" and stacks else nullcontext()


def compare(found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]], atol: float) -> None:
    assert found.keys() == wanted.keys()
    for client, own in found.items():
        for name, tensor in own.items():
            reference = wanted[client][name]
            torch.testing.assert_close(
                tensor.to(reference.dtype), reference, atol=atol, rtol=20 * atol, msg=lambda m, n=name: f"{n}: {m}"  # type: ignore[misc]
            )  # fmt: skip


def check(name: str, engine: str, even: bool, device: str, rounds: int, atol: float) -> None:
    case = CASES[name]
    scenario = scenario_for(case, even)
    if case.promise == "refused":
        with pytest.raises(ValueError, match=case.says):
            fq.Federation(scenario, fq.methods.FedAvg(), engine=engine, device=device).simulation.check()
        return
    promise = case.even or case.promise if even else case.promise
    stacks = engine in ("vectorised", "parallel-stacks")
    with told(promise, stacks, case.says):
        found, engines = trained(scenario, rounds, engine, device)
    if promise == "stacked":
        assert engines == [engine]
    compare(found, expected(name, even, rounds), atol)


def asked_on_a_gpu() -> Iterator[Any]:
    """The engines of a GPU, with both kinds of sizes: graphs are captured in other ways there."""
    for name, case in CASES.items():
        if case.promise != "refused" and case.gpu:
            for engine in ("sequential", "captured", "vectorised"):
                for sizes in ("even", "uneven"):
                    yield pytest.param(name, engine, sizes == "even", id=f"{name}-{engine}-{sizes}")


@pytest.mark.parametrize(("name", "engine", "even"), [*asked()])
def test_a_model_is_trained_as_promised(name: str, engine: str, even: bool) -> None:
    case = CASES[name]
    check(name, engine, even, "cpu", case.rounds, case.atol)


@pytest.fixture
def exact() -> Iterator[None]:
    """Full precision on a GPU, so that a CPU is a fair judge."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # type: ignore[attr-defined]
    names = [(place, "fp32_precision") for place in places]
    before = [getattr(*name) for name in names]
    for where, name in names:
        setattr(where, name, "ieee")
    yield
    for (where, name), value in zip(names, before, strict=True):
        setattr(where, name, value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("exact")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a step that cannot be captured says so
@pytest.mark.filterwarnings("ignore:RNN module weights")  # they lie in rows, not in one chunk as cuDNN likes them
@pytest.mark.parametrize(("name", "engine", "even"), [*asked_on_a_gpu()])
def test_a_gpu_gives_the_same_numbers(name: str, engine: str, even: bool) -> None:
    """Three rounds: the second is captured, the third replayed."""
    case = CASES[name]
    rounds = case.rounds if case.rounds == 1 else 3
    found, _ = trained(scenario_for(case, even), rounds, engine, "cuda")
    compare(found, expected(name, even, rounds), max(case.atol, 1e-4))


TRACED = (
    "MLP", "batch norm", "conv2d", "embedding", "attention", "einsum of three", "dropout", "dropout as a function",
    "attention with dropout, time first", "GRU with dropout",
)  # fmt: skip


@pytest.mark.parametrize("name", TRACED)
def test_a_step_that_is_traced_stays_the_same(name: str) -> None:
    """Local training long enough for its steps to be traced."""
    case = CASES[name]
    scenario = scenario_for(case, even=False)
    scenario = replace(scenario, training=replace(scenario.training, epochs=6, lr=0.02))
    expected = fedavg(scenario, 1) if case.by_hand else trained(scenario, 1, "sequential")[0]
    compare(trained(scenario, 1, "vectorised")[0], expected, 2e-5)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "parallel-stacks"])
@pytest.mark.parametrize("name", ["MLP", "batch norm", "batch mean"])
def test_clients_that_change_are_trained_as_promised(name: str, engine: str) -> None:
    """Clients of one size, of which one has more samples and the other fewer from the second round on."""
    case = CASES[name]
    before, after = scenario_for(case, even=True), scenario_for(replace(case, sizes=(14, 7)), even=False)
    clients = tuple(
        replace(client, changes={2: fq.Change(train=(later.train.x, later.train.y))})
        for client, later in zip(before.clients, after.clients, strict=True)
    )
    scenario = replace(before, clients=clients)
    with told(case.promise, engine != "sequential", case.says):
        found, _ = trained(scenario, 2, engine)
    compare(found, fedavg(scenario, 2), case.atol)
