"""Privacy of samples: steps by hand, engines that agree, noise of the promised length, and models that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("dp_accounting")

from privacy_help import learnable, run, shared, still, unrelated

import fedquilt as fq
from fedquilt.engines.sample_noise import SampleNoise
from fedquilt.interface.steps import Install, Step, Train
from fedquilt.methods import METHODS


class Line(nn.Linear):
    """One input, two classes, from zero: the gradient of a sample (x, y) is x (p - truth), with p = 1/2."""

    def __init__(self) -> None:
        super().__init__(1, 2, bias=False)
        nn.init.zeros_(self.weight)


def one_client(x: list[float], y: list[int], **training: Any) -> fq.Scenario:
    """Two clients with the same samples, all of them one batch."""
    data = (torch.tensor(x)[:, None], torch.tensor(y))
    clients = [fq.Client(f"c{i}", Line, data, data, data, labels=(0, 1)) for i in range(2)]
    return fq.Scenario("line", clients, fq.Training(rounds=1, epochs=1, batch=len(x), lr=1.0, **training))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_step_by_hand(engine: str) -> None:
    """Gradients x/2 (-1, 1) for the label 0, of lengths 0.4, 2 and 10 times sqrt(1/2); the clip is 1."""
    scenario = one_client([0.4, 2.0, 10.0], [0, 0, 1])
    result = run(scenario, privacy=fq.Privacy(noise=0.0, clip=1.0, level="sample"), engine=engine)
    each = torch.tensor([[-0.2, 0.2], [-1.0, 1.0], [5.0, -5.0]])
    clipped = each / each.norm(dim=1, keepdim=True).clamp(min=1.0)
    assert shared(result).tolist() == pytest.approx((-clipped.mean(0)).tolist(), abs=1e-6)


class Squared(Line):
    """The same of the square of x, which for 1e30 is beyond all numbers: so is the gradient, or it is none."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x * x)
        return y


@pytest.mark.parametrize("model", [Line, Squared])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_sample_whose_gradient_is_not_finite_adds_nothing_and_counts(engine: str, model: type[Line]) -> None:
    """Gradients x^2/2 (-1, 1) and beyond, with another number of samples on each client, so that one is padded."""
    counts = ([0.4, 1e30, 2.0], [2.0, 0.4])
    clients = []
    for i, x in enumerate(counts):
        data = (torch.tensor(x)[:, None], torch.zeros(len(x), dtype=torch.int64))
        clients.append(fq.Client(f"c{i}", model, data, data, data, labels=(0, 1)))
    scenario = fq.Scenario("beyond", clients, fq.Training(rounds=1, epochs=1, batch=3, lr=1.0))
    privacy = fq.Privacy(noise=0.0, clip=1.0, level="sample")
    federation = run(scenario, privacy=privacy, engine=engine).federation
    power = 2 if model is Squared else 1
    for number, x in enumerate(counts):
        lengths = [0.0 if value > 1e29 else min(1.0, value**power / 2**0.5) for value in x]
        moved = sum(lengths) / len(x) / 2**0.5
        weight = federation.simulation.model(number).weight.flatten()  # type: ignore[operator]
        assert weight.tolist() == pytest.approx([moved, -moved], abs=1e-6)
    assert int(federation.server.refused.sum()) == 0


gradients_of_samples = st.lists(
    st.lists(st.floats(width=32, allow_subnormal=False), min_size=3, max_size=3), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=300)
@given(gradients_of_samples, st.data())
def test_no_sample_moves_a_sum_by_more_than_the_clip(rows: list[list[float]], data: st.DataObject) -> None:
    """Whatever numbers its gradient has, and whatever the others'; in a stack of clients as by itself."""
    private, all_of_it = SampleNoise(0.5, 1.0), torch.tensor(rows)
    one = data.draw(st.integers(0, len(rows) - 1))
    mask = (torch.arange(len(rows)) != one).float()

    def sums(gradients: Tensor, mask: Tensor) -> Tensor:
        first, second = private.clipped([gradients[:, :1], gradients[:, 1:].unsqueeze(1)], mask)
        return torch.cat([first, second.flatten()])

    whole, without = sums(all_of_it, torch.ones(len(rows))), sums(all_of_it, mask)
    assert bool(whole.isfinite().all())
    assert float((whole - without).double().norm()) <= 0.5 * (1 + 1e-5)
    stacked = torch.func.vmap(sums)(torch.stack([all_of_it, all_of_it]), torch.stack([torch.ones(len(rows)), mask]))
    torch.testing.assert_close(stacked, torch.stack([whole, without]))


def small_conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(24, 3),
    )  # fmt: skip


@pytest.mark.parametrize("model", [None, small_conv])
@pytest.mark.parametrize("uneven", [False, True])
def test_engines_agree(model: Any, uneven: bool) -> None:
    plain = learnable(4, uneven=uneven, rounds=2)
    clients = [fq.Client(c.name, model or c.model, c.train, c.validation, c.test, c.traits) for c in plain.clients]
    scenario = fq.Scenario("both", clients, plain.training)
    privacy = fq.Privacy(noise=0.7, clip=0.5, level="sample")
    here, there = (run(scenario, privacy=privacy, engine=engine) for engine in ("sequential", "vectorised"))
    assert "vectorised" in there.summary["engine"]
    assert torch.allclose(shared(here), shared(there), rtol=1e-3, atol=1e-5)
    bare = run(scenario, privacy=fq.Privacy(noise=0.0, clip=1e6, level="sample"), engine="vectorised")
    if model is None:  # nothing is clipped and nothing drawn: plain training
        assert torch.allclose(shared(bare), shared(run(scenario, engine="sequential")), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_noise_has_the_promised_length(engine: str) -> None:
    """Samples of zeros have no gradient: what is left of a step is z C over the batch, in each of 2000 numbers."""
    zeros = (torch.zeros(4, 1000), torch.zeros(4, dtype=torch.int64))
    clients = [fq.Client(f"c{i}", Wide, zeros, zeros, zeros, labels=(0, 1)) for i in range(2)]
    scenario = fq.Scenario("zeros", clients, fq.Training(rounds=1, epochs=1, batch=4, lr=1.0))
    privacy = fq.Privacy(noise=3.0, clip=0.5, level="sample")
    federation = run(scenario, privacy=privacy, engine=engine).federation
    rows = torch.stack([federation.simulation.model(i).weight.flatten() for i in range(2)]).detach()  # type: ignore[operator]
    assert float(rows.std()) == pytest.approx(3.0 * 0.5 / 4, rel=0.05)
    assert abs(float(torch.corrcoef(rows)[0, 1])) < 0.1  # clients draw each for itself


class Twice(fq.methods.FedAvg):
    """FedAvg whose clients train twice a round."""

    def local(self) -> tuple[Step, ...]:
        return Install(), Train(), Train()


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_noise_of_one_step_says_nothing_of_anothers(engine: str) -> None:
    """Six steps a training, twice a round, have noise of their own: together it is as much longer as 12 are one."""
    privacy = fq.Privacy(noise=3.0, clip=0.5, level="sample")
    scenario = still(3, samples=4, epochs=3, batch=2, rounds=2)
    federation = fq.Federation(scenario, Twice(), engine=engine, device="cpu", privacy=privacy)
    found = []
    for _ in range(2):
        before = federation.server.all_values[0].value.clone()
        federation.step(evaluate=False)
        found += list(federation.simulation.family_states[0].store.all() - before)
    noises = torch.stack(found).view(-1, 1000)
    assert len(noises) == 2 * 3 * 2  # rounds, clients, units
    unrelated(noises)
    assert float(noises.std()) == pytest.approx(3.0 * 0.5 / 2 * 12**0.5, rel=0.05)


class Wide(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1000, 2, bias=False)
        nn.init.zeros_(self.weight)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.body(x)))
        return y


def test_models_that_mix_samples_are_refused() -> None:
    plain = learnable(4)
    clients = [fq.Client(c.name, Mixing, c.train, c.validation, c.test, c.traits) for c in plain.clients]
    with pytest.raises(ValueError, match="has a BatchNorm1d, by which a sample's gradient depends on the others"):
        run(fq.Scenario("mixing", clients, plain.training), privacy=fq.Privacy(noise=1.0, level="sample"))


@pytest.mark.parametrize("name", ["apfl", "fedrod", "ifca", "auto", "fedem", "fedala", "fedproto", "fedfomo"])
def test_methods_that_look_at_samples_beside_training_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"does not go with dp\.level=sample"):
        run(learnable(4), METHODS[name](), fq.Privacy(noise=1.0, level="sample"))


@pytest.mark.parametrize("name", ["fedper", "fedrep", "ditto", "fedprox", "scaffold", "fedadam", "clustered"])
def test_others_compose(name: str) -> None:
    result = run(learnable(4, rounds=1), METHODS[name](), fq.Privacy(epsilon=50, level="sample"))
    assert "for each training sample" in result.summary["privacy"]
