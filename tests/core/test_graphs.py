"""Captured training, on a machine without a GPU: a stand-in that does a graph's work when it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from core_help import StandIn
from torch import nn

from fedquilt._util.randomness import key_of
from fedquilt.engines import stage, vectorised
from fedquilt.engines.engine import Samples, TrainingJob, TrainingSpec
from fedquilt.engines.objective import proximal, task_loss
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.settings import Training
from fedquilt.engines.vectorised import Vectorised
from fedquilt.families.layout import Layout
from fedquilt.families.units import cut

made = StandIn.made


def recipe(counts: list[int], training: Training) -> TrainingSpec:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    keys = tuple(key_of(0, i) for i in range(len(counts)))
    x, y = torch.randn(sum(counts), 4), torch.randint(0, 3, (sum(counts),))
    parts = tuple(zip(x.split(counts), y.split(counts), strict=True))
    samples = Samples(parts, tuple(range(len(counts))), tuple(counts), keys)
    return TrainingSpec(net, Layout(net, cut(net)), samples, training, task_loss() + proximal(0.1), torch.device("cpu"))


@pytest.mark.parametrize("counts", [[8, 8, 8], [10, 10, 10], [5, 9, 14]])
def test_replayed_training_is_training(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "Graph", StandIn)
    monkeypatch.setattr(stage, "captures", lambda device: True)
    monkeypatch.setattr(vectorised, "captures", lambda device: True)
    made.clear()
    how = recipe(counts, Training(lr=0.1, momentum=0.9, batch=4, epochs=2))
    ours, oracle = Vectorised(how), Sequential(how)
    first = how.layout.row(how.template).repeat(3, 1)
    a, b = first.clone(), first.clone()
    for round_ in range(1, 5):
        found = ours.train(TrainingJob(a, (0, 1, 2), round_, 0.1))
        wanted = oracle.train(TrainingJob(b, (0, 1, 2), round_, 0.1))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(made) == 1  # captured once, in the second round, and kept
    even = len(set(counts)) == 1
    steps = 2 * -(-max(counts) // 4)
    assert made[0].replays == (3 if even else 3 * steps)  # a whole round at once, or a step at a time


def test_a_new_shape_is_captured_anew_and_the_old_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "Graph", StandIn)
    monkeypatch.setattr(stage, "captures", lambda device: True)
    monkeypatch.setattr(vectorised, "captures", lambda device: True)
    made.clear()
    how = recipe([8, 8, 8], Training(lr=0.1, batch=4))
    ours = Vectorised(how)
    first = how.layout.row(how.template).repeat(3, 1)
    for round_ in range(1, 4):
        ours.train(TrainingJob(first.clone(), (0, 1, 2), round_, 0.1))
        ours.train(TrainingJob(first[:2].clone(), (0, 2), round_, 0.1))
    assert [graph.replays for graph in made] == [2, 2]


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(body: Callable[[], None], device: torch.device) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(stage, "Graph", refuse)
    monkeypatch.setattr(stage, "captures", lambda device: True)
    monkeypatch.setattr(vectorised, "captures", lambda device: True)
    how = recipe([8, 8, 8], Training(lr=0.1, batch=4))
    ours, oracle = Vectorised(how), Sequential(how)
    a = how.layout.row(how.template).repeat(3, 1)
    b = a.clone()
    ours.train(TrainingJob(a, (0, 1, 2), 1, 0.1))
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        ours.train(TrainingJob(a, (0, 1, 2), 2, 0.1))
    ours.train(TrainingJob(a, (0, 1, 2), 3, 0.1))  # no second warning: warnings are errors here
    for round_ in range(1, 4):
        oracle.train(TrainingJob(b, (0, 1, 2), round_, 0.1))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rows_at_home_are_trained_where_they_lie_and_others_leave_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "Graph", StandIn)
    monkeypatch.setattr(stage, "captures", lambda device: True)
    monkeypatch.setattr(vectorised, "captures", lambda device: True)
    made.clear()
    how = recipe([8, 8, 8], Training(lr=0.1, batch=4))
    ours, oracle = Vectorised(how), Sequential(how)
    home = how.layout.row(how.template).repeat(3, 1)
    wanted = home.clone()
    for round_ in range(1, 5):
        ours.train(TrainingJob(home, (0, 1, 2), round_, 0.1, home=True))
        oracle.train(TrainingJob(wanted, (0, 1, 2), round_, 0.1))
        torch.testing.assert_close(home, wanted, rtol=1e-4, atol=1e-5)
        before, copy = home.clone(), home.clone()
        ours.train(TrainingJob(copy, (0, 1, 2), round_ + 1, 0.1))  # as a read-out fine-tunes
        assert torch.equal(home, before)
        assert not torch.equal(copy, before)
    assert [graph.replays for graph in made] == [3, 3]  # one for home, one for everywhere else


def test_a_traced_step_has_the_bits_of_one_that_is_not() -> None:
    how = recipe([5, 9, 14], Training(lr=0.1, momentum=0.9, batch=4, epochs=2))
    first = how.layout.row(how.template).repeat(3, 1)
    found = []
    for trace_after in (1, 10**9):
        rows, engine = first.clone(), Vectorised(replace(how, trace_after=trace_after))
        for round_ in (1, 2):
            engine.train(TrainingJob(rows, (0, 1, 2), round_, 0.1))
        assert all(bool(stage.programs) == (trace_after == 1) for stage in engine.stages.values())
        found.append(rows)
    assert torch.equal(*found)
