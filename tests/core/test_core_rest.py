"""Clients at rest: no memory for who never took part, and nobody's row is written by somebody else's training."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from core_help import federation, mlp, points, rows_of
from torch import Tensor, nn

from fedquilt._util import shared_memory
from fedquilt._util.randomness import key_of
from fedquilt._util.shared_memory import _NO_RESERVE, common_zeros, is_common
from fedquilt.core import row_store
from fedquilt.core.row_store import RowStore
from fedquilt.engines.engine import Samples, TrainingJob, TrainingSpec
from fedquilt.engines.objective import task_loss
from fedquilt.engines.parallel import can_fork
from fedquilt.engines.select import ENGINES
from fedquilt.engines.settings import Training
from fedquilt.families.layout import Layout
from fedquilt.families.units import cut
from fedquilt.runs.checkpoint import federation_state


def resident() -> int:
    """Bytes of memory this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is looked up in /proc")
@pytest.mark.skipif(_NO_RESERVE == 0, reason="this system sets memory aside that nobody uses")
def test_who_never_took_part_costs_no_memory() -> None:
    before = resident()
    rest = RowStore(torch.ones(1, 1_000_000), [0] * 25_000)  # 100 gigabytes, were it all written
    rest.put([3, 17_000], torch.full((2, 1_000_000), 2.0))
    assert rest.take([2, 3])[:, 0].tolist() == [1.0, 2.0]
    assert resident() - before < 100 * 2**20


def test_everyone_s_rows_are_the_first_until_they_are_put_back() -> None:
    rest = RowStore(torch.tensor([[1.0], [2.0]]), [0, 1, 0])
    assert rest.take([2, 1]).tolist() == [[1.0], [2.0]]
    rest.put([1], torch.tensor([[7.0]]))
    assert rest.fresh == {0, 2}
    rest.all()[2] = 5.0
    assert rest.take([0, 1, 2]).tolist() == [[1.0], [7.0], [5.0]]


def test_many_rows_rest_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    file_of = shared_memory._file_of

    def noted(size: int) -> mmap.mmap:
        made.append(size)
        return file_of(size)

    monkeypatch.setattr(shared_memory, "_file_of", noted)
    monkeypatch.setattr(row_store, "_IN_MEMORY", 63)
    RowStore(torch.ones(1, 3), [0] * 5)  # 60 bytes
    assert not made
    rest = RowStore(torch.ones(1, 4), [0] * 4)
    assert made == [64]
    rest.put([2, 0], torch.tensor([[7.0] * 4, [5.0] * 4]))
    assert rest.take([0, 1, 2, 3])[:, 3].tolist() == [5.0, 1.0, 7.0, 1.0]
    assert is_common(rest.store)


@pytest.mark.parametrize("engine", ["vectorised", "parallel-stacks"])
def test_samples_that_are_many_are_copied_as_clients_train(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit what a table of all samples gives, with clients of unlike sizes and some of them in a round."""
    scenario = points(mlp, sizes=(4, 9, 5, 7, 4, 6), training={"share": 0.5, "rounds": 3, "batch": 3})
    found = []
    for most in (2**27, 0):
        monkeypatch.setattr("fedquilt.engines.engine._TABLE_BYTES", most)
        federated = federation(scenario, engine=engine)
        for _ in range(3):
            federated.step(evaluate=False)
        samples = federated.simulation.family_states[0].samples
        assert ("x" in vars(samples)) == (most > 0)
        found.append(rows_of(federated))
        federated.close()
    for name, row in found[0].items():
        assert torch.equal(row, found[1][name])


def test_a_checkpoint_holds_only_those_who_took_part() -> None:
    federated = federation(points(mlp, sizes=(4,) * 10, training={"share": 0.2, "rounds": 3}))
    federated.step(evaluate=False)
    tensors: dict[str, Tensor] = {}
    federation_state(federated, tensors)
    assert tensors["seen/0"].tolist() == sorted(federated.sample_clients(1))
    assert len(tensors["rows/0"]) == 2
    federated.close()


def recipe() -> TrainingSpec:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    parts = tuple((torch.randn(3, 2), torch.randint(0, 2, (3,))) for _ in range(2))
    samples = Samples(parts, (0, 1), (3, 3), (key_of(0), key_of(1)))
    training = Training(lr=0.5, batch=2)
    return TrainingSpec(net, Layout(net, cut(net)), samples, training, task_loss(), torch.device("cpu"))


@pytest.mark.skipif(not can_fork(), reason="this system cannot fork")
@pytest.mark.parametrize("kind", ["parallel", "parallel-stacks"])
def test_workers_write_to_rows_where_they_rest_and_to_no_others(kind: str) -> None:
    how = recipe()
    engine, oracle = ENGINES[kind](how), ENGINES["sequential"](how)
    first = how.layout.row(how.template).repeat(2, 1)
    home, wanted = common_zeros((2, 6)), first.clone()
    home.copy_(first)
    assert is_common(home)
    assert not is_common(first)
    other = first.clone()
    for round_ in (1, 2):
        engine.train(TrainingJob(home, (0, 1), round_, 0.5))
        oracle.train(TrainingJob(wanted, (0, 1), round_, 0.5))
        torch.testing.assert_close(home, wanted)
        here = home.clone()
        engine.train(
            TrainingJob(other, (0, 1), round_, 0.5)
        )  # the same clients elsewhere, as when a copy is fine-tuned
        assert torch.equal(home, here)
    torch.testing.assert_close(other, wanted)
    engine.close()


@pytest.mark.parametrize("kind", ["sequential", "vectorised", *(["parallel", "parallel-stacks"] if can_fork() else [])])
def test_rates_of_nought_and_others(kind: str) -> None:
    """Client 0 rests; client 1 learns its weight at twice the rate, and its bias not at all."""
    how = recipe()
    engine = ENGINES[kind](how)
    first = how.layout.row(how.template).repeat(2, 1)
    rows, scale = first.clone(), torch.zeros(2, 6)
    scale[1, :4] = 2.0
    engine.train(TrainingJob(rows, (0, 1), 1, 0.5, scale))
    engine.close()
    assert torch.equal(rows[0], first[0])
    assert torch.equal(rows[1, 4:], first[1, 4:])
    plain = first.clone()
    alone = ENGINES["sequential"](how)
    frozen = torch.ones(2, 6)
    frozen[:, 4:] = 0.0
    alone.train(TrainingJob(plain, (0, 1), 1, 1.0, frozen))  # twice the rate of 0.5
    torch.testing.assert_close(rows[1], plain[1])


def test_rows_of_a_federation_rest_in_common_memory() -> None:
    federated = federation(points(mlp, sizes=(4, 4)))
    federated.step(evaluate=False)
    assert is_common(federated.simulation.family_states[0].store.all())
    assert len(rows_of(federated)) == 2
    federated.close()
