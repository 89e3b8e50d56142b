"""What a family is: clients of unlike models are never taken for one, and what is each client's own stays its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.client import Split
from fedquilt.core.family_state import blocks_of
from fedquilt.core.simulation import Simulation
from fedquilt.core.terms import Terms
from fedquilt.deploy.server.stubs import stub_client
from fedquilt.deploy.transport.agreed import read_member, write_member
from fedquilt.interface.messages import Update, Updates

Builder = Callable[[], nn.Module]
ENGINES = ("sequential", "vectorised", "parallel", "parallel-stacks")


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % 3


def federation(
    builders: Sequence[Builder], method: fq.methods.Method | None = None, engine: str = "sequential",
    sizes: Sequence[int] = (), training: fq.Training | None = None, **more: Any,
) -> fq.Federation:  # fmt: skip
    sizes = sizes or [12] * len(builders)
    made = [
        fq.Client(f"c{i}", build, data(n, i), test=data(10, 50 + i), labels=(0, 1, 2))
        for i, (build, n) in enumerate(zip(builders, sizes, strict=True))
    ]
    training = training or fq.Training(rounds=3, batch=100, lr=0.5)
    return fq.Federation(
        fq.Scenario("s", made), method or fq.methods.Local(), training, engine=engine, device="cpu", **more
    )


def trained_by_hand(module: nn.Module, x: Tensor, y: Tensor, rounds: int, lr: float) -> nn.Module:
    """Full batches, so that their order does not matter."""
    module = module.train()
    for _ in range(rounds):
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(lr * parameter.grad)
    return module.eval()


class Masked(nn.Module):
    """Knows some labels only: the others have the score -inf."""

    mask: Tensor

    def __init__(self, own: Sequence[int]) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 3)
        mask = torch.full((3,), -torch.inf)
        mask[list(own)] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(x) + self.mask
        return scores


class Setting:
    """Settings that cannot be told from their print."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Setting"


class Scaled(nn.Module):
    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.scores, self.setting = nn.Linear(6, 3), setting

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(x) * self.setting.factor
        return scores


def hooked(factor: float) -> nn.Module:
    """Gradients of the first layer times a factor."""
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))

    def scale(module: nn.Module, inward: Any, outward: Any) -> Any:
        return (inward[0] * factor,)

    net[1].register_full_backward_hook(scale)
    return net


def redefined(activation: Callable[[Tensor], Tensor]) -> Builder:
    """A class that is declared anew under its old name, as a cell of a notebook that is run again does."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.head(activation(self.base(x)))
        return out

    def init(self: Any) -> None:
        nn.Module.__init__(self)
        self.base, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    made = type("Redefined", (nn.Module,), {"__init__": init, "forward": forward, "__module__": __name__})
    globals()["Redefined"] = made
    build: Builder = made
    return build


UNLIKE: dict[str, tuple[Builder, Builder]] = {
    "settings in slots": (partial(Scaled, Setting(1.0)), partial(Scaled, Setting(3.0))),
    "backward hooks": (partial(hooked, 1.0), partial(hooked, 3.0)),
    "redefined classes": (redefined(torch.tanh), redefined(torch.relu)),
}


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_unlike_models_are_no_family(name: str, engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # hooks cannot be stacked
        fed = federation(UNLIKE[name], engine=engine)
        assert len(fed.simulation.family_states) == 2
        first = [copy.deepcopy(fed.model(f"c{i}")).state_dict() for i in range(2)]
        for _ in range(3):
            fed.step(evaluate=False)
    for i, build in enumerate(UNLIKE[name]):
        module = build()
        module.load_state_dict(first[i])
        expected = trained_by_hand(module, *data(12, i), 3, 0.5)
        for one, other in zip(expected.parameters(), fed.model(f"c{i}").parameters(), strict=True):
            torch.testing.assert_close(one, other)
    fed.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [fq.methods.Local(), fq.methods.FedAvg()])
def test_masks_of_labels_are_each_clients_own(method: fq.methods.Method, engine: str) -> None:
    owned = [(0, 1, 2), (0, 1, 2), (0, 1)]
    made = [
        fq.Client(f"c{i}", partial(Masked, own), (x[y < len(own)], y[y < len(own)]), test=(x, y), labels=(0, 1, 2))
        for i, own in enumerate(owned)
        for x, y in [data(12, i)]
    ]
    fed = fq.Federation(
        fq.Scenario("s", made), method, fq.Training(rounds=2, batch=100, lr=0.5), engine=engine, device="cpu"
    )
    assert len(fed.simulation.family_states) == 1  # they differ by numbers that lie in their rows
    start = fed.model("c0").state_dict()
    evaluations = [e for _ in range(2) for e in fed.step().evaluations]
    for i, own in enumerate(owned):
        model = fed.model(f"c{i}")
        assert torch.isfinite(model.get_buffer("mask")).nonzero()[:, 0].tolist() == list(own)
        scored = [e for e in evaluations if e.split == "test" and e.readout == "received"][-1]
        right = model(made[i].test.x).argmax(1) == made[i].test.y
        assert scored.rows()[i]["accuracy"] == pytest.approx(float(right.float().mean()))
        if isinstance(method, fq.methods.Local):
            module = Masked(own)
            module.load_state_dict(start | {"mask": module.mask})
            expected = trained_by_hand(module, made[i].train.x, made[i].train.y, 2, 0.5)
            torch.testing.assert_close(expected.state_dict(), model.state_dict())
    fed.close()


class Sensors(nn.Module):
    """Takes some of the features, normalises them, and prunes its weights: three constants of a client's own."""

    index: Tensor
    mean: Tensor
    pruned: Tensor

    def __init__(self, index: Sequence[int], mean: float) -> None:
        super().__init__()
        self.scores, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("index", torch.tensor(index))
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("pruned", (torch.arange(9) % (index[0] + 2) == 0).view(3, 3))
        self.register_buffer("code", torch.tensor(2**40 + 1))  # no row could hold it

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scores.weight.masked_fill(self.pruned, 0.0)
        scores: Tensor = self.norm(F.linear(x[:, self.index] - self.mean, weight, self.scores.bias))
        return scores


def averaged_by_hand(models: list[nn.Module], start: dict[str, Tensor], rounds: int, lr: float) -> None:
    """FedAvg of parameters and running statistics, with equal weights; constants stay where they are."""
    shared = [key for key in start if key.split(".")[0] in ("scores", "norm")]
    for model in models:
        model.load_state_dict({key: start[key] for key in shared}, strict=False)
    for _ in range(rounds):
        for i, model in enumerate(models):
            trained_by_hand(model, *data(12, i), 1, lr)
        average = {k: torch.stack([m.state_dict()[k].double() for m in models]).mean(0) for k in shared}
        for model in models:
            model.load_state_dict({k: v.to(start[k].dtype) for k, v in average.items()}, strict=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_constant_buffers_of_a_shared_unit_stay_home(engine: str) -> None:
    inside, means = [(0, 2, 4), (1, 3, 5), (0, 1, 2)], [0.0, 1.5, -0.5]
    builders = [partial(Sensors, index, mean) for index, mean in zip(inside, means, strict=True)]
    fed = federation(builders, fq.methods.FedAvg(), engine)
    assert len(fed.simulation.family_states) == 1
    start = fed.model("c0").state_dict()
    report = [fed.step(evaluate=False) for _ in range(3)][-1]
    # what travels: weights, biases, scales and shifts, and the statistics of the norm
    assert int(report.traffic.up[0].sum()) == 9 + 3 + 3 + 3 + 3 + 3 + 1
    models: list[nn.Module] = [build() for build in builders]
    averaged_by_hand(models, start, 3, 0.5)
    for i, model in enumerate(models):
        found = fed.model(f"c{i}").state_dict()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
    fed.close()


class Peak(nn.Module):
    """Keeps the greatest number it has seen, which is -inf at first."""

    peak: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 3)
        self.register_buffer("peak", torch.tensor(-torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.peak = torch.maximum(self.peak, x.detach().amax())
        scores: Tensor = self.scores(x) / self.peak.clamp(min=1.0)
        return scores


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_buffers_that_are_not_finite_at_first_are_each_clients_own(engine: str) -> None:
    fed = federation([Peak, Peak, Peak], fq.methods.FedAvg(), engine)
    assert [fed.step(evaluate=False).refused for _ in range(2)] == [0, 0]
    for i in range(3):
        assert float(fed.model(f"c{i}").get_buffer("peak")) == float(data(12, i)[0].amax())


class Late(nn.Module):
    """Writes a buffer when it has seen enough."""

    seen: Tensor
    gone: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("gone", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            if self.seen > 2:
                self.gone += 1
        scores: Tensor = self.scores(x)
        return scores


def test_a_buffer_that_turns_out_not_to_be_constant_is_refused() -> None:
    fed = federation([Late, Late])
    for _ in range(2):
        fed.step(evaluate=False)
    with pytest.raises(ValueError, match="in round 3: RuntimeError: buffer 'gone' is written now, and was not in the"):
        fed.step(evaluate=False)


BUILT: list[int] = []


def counted(width: int) -> nn.Module:
    BUILT.append(width)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def test_builders_with_the_same_arguments_are_one() -> None:
    def made_here(width: int) -> Builder:
        return lambda: counted(width)

    BUILT.clear()
    fed = federation([partial(counted, 4), partial(counted, 4), made_here(4), made_here(4), partial(counted, 5)])
    assert [family_state.family.ids for family_state in fed.simulation.family_states] == [(0, 1, 2, 3), (4,)]
    assert BUILT == [4, 4, 5]
    rest = fed.simulation.family_states[0].store
    assert rest.first.shape[0] == 1  # all four start alike: one row is kept


def test_clients_that_start_apart_keep_their_own_first_rows() -> None:
    def seeded(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(6, 3)

    fed = federation([partial(seeded, seed) for seed in (1, 2, 1)])
    assert len(fed.simulation.family_states) == 1
    assert fed.simulation.family_states[0].store.first.shape[0] == 2
    for i, seed in enumerate((1, 2, 1)):
        torch.testing.assert_close(fed.model(f"c{i}").state_dict(), seeded(seed).state_dict())


def test_a_shadow_has_the_units_that_its_client_declares() -> None:
    x, y = data(6, 0)
    client = fq.Client("a", partial(Sensors, (0, 2, 4), 1.0), (x, y), labels=(0, 1, 2))
    terms = Terms(fq.methods.FedAvg(), fq.Training(), 3)
    member = read_member(write_member(Simulation([client], terms).members()[0]))
    assert member.constant == ("index", "mean", "pruned", "code")
    there = Simulation([stub_client(member, lambda start: client.model if start == 0 else None, {})], terms).members()[
        0
    ]
    assert (there.units, there.constant) == (member.units, member.constant)


def test_what_the_server_looks_at_has_the_clients_own_constants() -> None:
    builders = [partial(Sensors, index, 0.5) for index in ((0, 2, 4), (1, 3, 5))]
    fed = federation(builders, fq.methods.FedAvg())
    x, y = data(5, 9)
    expected = [fed.model(f"c{i}")(x).softmax(1) for i in range(2)]
    units = {unit: torch.ones(2, dtype=torch.bool) for unit in fed.server.roster.units}
    layout = fed.simulation.family_states[0].family.layout
    up = Update(
        1,
        (0, 1),
        blocks_of(fed.simulation.family_states[0].family, fed.simulation.family_states[0].store.take([0, 1]), units),
    )
    assert layout.travels < layout.width
    _, found = Updates(1, (up,), fed.simulation.sent_models).probabilities(Split(x, y))
    torch.testing.assert_close(found, torch.stack(expected))
