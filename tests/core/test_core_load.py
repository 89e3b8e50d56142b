"""Memory that must not grow with what others have: tables of samples, stacks, counts, and models built in a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from core_help import same_rows
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core import family_state
from fedquilt.methods import FedAvg
from fedquilt.tasks.confusion import accuracy, confusion, f_by_class, margins


def data(n: int, seed: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % classes


def federation(
    sizes: Sequence[int], tests: Sequence[int], build: Callable[[], nn.Module], engine: str = "vectorised"
) -> fq.Federation:
    made = [
        fq.Client(f"c{i}", build, data(n, i), data(m // 2, 40 + i), data(m, 80 + i), labels=range(3))
        for i, (n, m) in enumerate(zip(sizes, tests, strict=True))
    ]
    training = fq.Training(rounds=3, batch=8, lr=0.1)
    return fq.Federation(
        fq.Scenario("s", made), FedAvg(), training, engine=engine, device="cpu",
        readouts=[fq.readouts.Received(), fq.readouts.BestOfLast(2)],
    )  # fmt: skip


def test_clients_are_looked_at_beside_those_of_like_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = (3, 500, 4, 0, 2, 480)
    whole = federation((8,) * 6, tests, partial(nn.Linear, 4, 3))
    expected = [whole.step().evaluations for _ in range(3)]
    assert [len(ids) for ids in whole.simulation.groups()] == [6]
    monkeypatch.setattr(family_state, "_LITTLE", 2**10)
    fed = federation((8,) * 6, tests, partial(nn.Linear, 4, 3))
    found = [fed.step().evaluations for _ in range(3)]
    assert sorted(fed.simulation.groups()) == [(0, 2, 3, 4), (1, 5)]
    assert sum(table.x.numel() for table in fed.simulation.family_states[0].tables.values()) <= 2 * 4 * sum(
        n + n // 2 for n in tests
    )
    for one, other in zip(found, expected, strict=True):
        same_rows([row for e in one for row in e.rows()], [row for e in other for row in e.rows()])
        for evaluation in one:
            assert evaluation.clients == tuple(f"c{i}" for i in range(6))


def test_the_biggest_client_says_how_many_are_stacked() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 3))

    found = []
    for sizes in ((1, 8, 8), (8, 8, 1)):
        fed = federation(sizes, (2, 2, 2), wide)
        fed.step(evaluate=False)
        found.append(fed.simulation.family_states[0].at_once)
    assert found[0] == found[1]


def test_counts_take_no_more_than_samples() -> None:
    classes = 100_000
    truth, predicted = torch.tensor([[5, 99_999, 5], [0, 0, 0]]), torch.tensor([[5, 7, 6], [0, 1, 2]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    counts = confusion(predicted, truth, mask, classes)
    assert counts.values().tolist() == [1, 1, 1, 1, 1]
    assert accuracy(counts).tolist() == [1 / 3, 1 / 2]
    assert f_by_class(counts)[0, [5, 6, 7, 99_999]].tolist() == [2 / 3, 0.0, 0.0, 0.0]
    assert [m[0, 5].item() for m in margins(counts)] == [2, 1, 1]


def test_accuracies_are_doubles() -> None:
    counts = confusion(torch.zeros(1, 10).long(), torch.tensor([[0] * 3 + [1] * 7]), torch.ones(1, 10), 2)
    assert accuracy(counts).tolist() == [0.3]


def test_labels_that_are_no_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="client 'a' has label 1000000000; labels are classes, numbered from 0 up"):
        fq.Client("a", partial(nn.Linear, 4, 3), data(3, 0), labels=(0, 1, 2, 10**9))
    later = {2: fq.Change(labels=(0, 10**9))}
    with pytest.raises(ValueError, match="client 'a' has label 1000000000"):
        fq.Client("a", partial(nn.Linear, 4, 3), data(3, 0), changes=later)
