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

# Promises that are not kept yet: their tests are expected to fail, and a test that does not must leave this list.
OPEN: list[str] = [
    "changing batch mean-vectorised",
    "changing batch mean-parallel-stacks",
    "batch mean and a buffer of big numbers-vectorised-uneven",
    "batch mean and a buffer of big numbers-parallel-stacks-uneven",
    "batch norm over a folded batch-vectorised-uneven",
    "batch norm over a folded batch-parallel-stacks-uneven",
    "batch norm over two halves-vectorised-uneven",
    "batch norm over two halves-parallel-stacks-uneven",
    "state outside: random-sequential-even",
    "state outside: random-sequential-uneven",
    "state outside: random-vectorised-even",
    "state outside: random-vectorised-uneven",
    "state outside: random-parallel-uneven",
    "state outside: random-parallel-stacks-uneven",
    "state outside: numpy-sequential-even",
    "state outside: numpy-sequential-uneven",
    "state outside: numpy-vectorised-even",
    "state outside: numpy-vectorised-uneven",
    "state outside: numpy-parallel-uneven",
    "state outside: numpy-parallel-stacks-uneven",
    "state outside: list-sequential-uneven",
    "state outside: list-vectorised-even",
    "state outside: list-vectorised-uneven",
    "state outside: list-parallel-uneven",
    "state outside: list-parallel-stacks-uneven",
    "state outside: dict-sequential-uneven",
    "state outside: dict-vectorised-even",
    "state outside: dict-vectorised-uneven",
    "state outside: dict-parallel-uneven",
    "state outside: dict-parallel-stacks-uneven",
    "state outside: np.int64-sequential-uneven",
    "state outside: np.int64-vectorised-even",
    "state outside: np.int64-vectorised-uneven",
    "state outside: np.int64-parallel-uneven",
    "state outside: np.int64-parallel-stacks-uneven",
    "state outside: int-sequential-uneven",
    "state outside: int-vectorised-even",
    "state outside: int-vectorised-uneven",
    "state outside: int-parallel-uneven",
    "state outside: int-parallel-stacks-uneven",
    "state outside: plain tensor-sequential-even",
    "state outside: plain tensor-sequential-uneven",
    "state outside: plain tensor-vectorised-even",
    "state outside: plain tensor-vectorised-uneven",
    "state outside: plain tensor-parallel-uneven",
    "state outside: plain tensor-parallel-stacks-uneven",
    "state outside: generator-sequential-even",
    "state outside: generator-sequential-uneven",
    "state outside: generator-vectorised-even",
    "state outside: generator-vectorised-uneven",
    "state outside: generator-parallel-uneven",
    "state outside: generator-parallel-stacks-uneven",
]


def asked() -> Iterator[Any]:
    """Which tests there are: clients of one size only where engines differ in how they treat them."""
    for name, case in CASES.items():
        for engine in ENGINES:
            for sizes in ("even", "uneven"):
                if sizes == "even" and (engine.startswith("parallel") or case.promise == "refused"):
                    continue
                if case.promise == "refused" and engine.startswith("parallel"):
                    continue
                test = f"{name}-{engine}-{sizes}"
                marks = [pytest.mark.xfail(strict=True)] if test in OPEN else []
                yield pytest.param(name, engine, sizes == "even", id=test, marks=marks)


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
        for crew in federation.fleet.crews:
            for client, row in zip(crew.clients, crew.rest.all().cpu(), strict=True):
                parameters, buffers = crew.family.layout.split(row)
                found[client.name] = parameters | buffers
        return found, federation.fleet.engines
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
            fq.Federation(scenario, fq.methods.FedAvg(), engine=engine, device=device).fleet.check()
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
        if case.promise != "refused":
            for engine in ("sequential", "vectorised"):
                for sizes in ("even", "uneven"):
                    yield pytest.param(name, engine, sizes == "even", id=f"{name}-{engine}-{sizes}")


@pytest.mark.parametrize(("name", "engine", "even"), [*asked()])
def test_a_model_is_trained_as_promised(name: str, engine: str, even: bool) -> None:
    case = CASES[name]
    check(name, engine, even, "cpu", case.rounds, case.atol)


@pytest.fixture
def exact() -> Iterator[None]:
    """Full precision on a GPU, so that a CPU is a fair judge."""
    names = [(torch.backends.cuda.matmul, "fp32_precision"), (torch.backends.cudnn.conv, "fp32_precision")]  # type: ignore[attr-defined]
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
def test_clients_that_change_are_trained_as_promised(name: str, engine: str, request: pytest.FixtureRequest) -> None:
    """Clients of one size, of which one has more samples and the other fewer from the second round on."""
    case = CASES[name]
    if f"changing {name}-{engine}" in OPEN:
        request.applymarker(pytest.mark.xfail(strict=True))
    before, after = scenario_for(case, even=True), scenario_for(replace(case, sizes=(14, 7)), even=False)
    clients = tuple(
        replace(client, changes={2: fq.Change(train=(later.train.x, later.train.y))})
        for client, later in zip(before.clients, after.clients, strict=True)
    )
    scenario = replace(before, clients=clients)
    with told(case.promise, engine != "sequential", case.says):
        found, _ = trained(scenario, 2, engine)
    compare(found, fedavg(scenario, 2), case.atol)
