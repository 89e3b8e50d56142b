"""What is frozen: no column where all clients have it in common, in nobody's mail, and the same bits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.client import Split
from fedquilt.families.kinds import Kinds
from fedquilt.families.units import cut
from fedquilt.runs.checkpoint import federation_state, restore_federation

ENGINES = ("sequential", "vectorised", "parallel")


class Frozen(nn.Module):
    """A trained convolution and norm that rest, with numbers of their own for each `base`, and a head that learns."""

    def __init__(self, base: int = 0, freeze: bool = True) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(base)
        self.body = nn.Sequential(nn.Conv1d(1, 3, 3), nn.GroupNorm(3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5))
        for parameter in self.body.parameters():
            nn.init.normal_(parameter, generator=draw)
        self.body.requires_grad_(not freeze)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x[:, None]))
        return out


def scenario(models: list[Callable[[], nn.Module]], rounds: int = 3) -> fq.Scenario:
    draw = torch.Generator().manual_seed(1)

    def samples(count: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(count) % 3
        x = torch.randn(count, 6, generator=draw)
        x[:, 0] += 2.0 * y
        return x, y

    clients = [fq.Client(f"c{i}", m, samples(9 + i), samples(6), samples(6)) for i, m in enumerate(models)]
    training = fq.Training(rounds=rounds, epochs=2, batch=4, lr=0.1, momentum=0.9, weight_decay=0.1)
    return fq.Scenario("frozen", clients, training, label_names=("a", "b", "c"))


def federation(of: fq.Scenario, engine: str = "sequential", method: fq.Method | None = None) -> fq.Federation:
    return fq.Federation(of, method or fq.methods.FedAvg(), device="cpu", engine=engine)


def bits(module: nn.Module) -> dict[str, bytes]:
    body = module.get_submodule("body").named_parameters()
    return {name: value.detach().numpy().tobytes() for name, value in body}


def head(fed: fq.Federation, client: str) -> Tensor:
    return fed.model(client).get_parameter("head.weight").detach()


HEAD = 5 * 3 + 3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_common_base_is_no_column_and_stays(engine: str) -> None:
    fed = federation(scenario([Frozen] * 3), engine)
    family_state = fed.simulation.family_states[0]
    assert family_state.store.all().shape == (3, HEAD)
    before = head(fed, "c0")
    reports = [fed.step() for _ in range(3)]
    assert reports[0].traffic.total_up == reports[0].traffic.total_down == 3 * 4 * HEAD
    assert reports[0].plan["body.0"].circle.tolist() == [-1] * 3  # type: ignore[union-attr]
    assert not torch.equal(head(fed, "c0"), before)
    for name in ("c0", "c1", "c2"):
        assert bits(fed.model(name)) == bits(Frozen())
    fed.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_bases_that_differ_are_each_clients_own(engine: str) -> None:
    of = scenario([partial(Frozen, 0), partial(Frozen, 1), partial(Frozen, 0)])
    fed = federation(of, engine)
    assert len(fed.simulation.family_states) == 1  # one program for all
    assert fed.simulation.family_states[0].store.all().shape[1] > HEAD
    report = fed.step()
    assert report.traffic.total_up == 3 * 4 * HEAD
    fed.step()
    for name, base in (("c0", 0), ("c1", 1), ("c2", 0)):
        assert bits(fed.model(name)) == bits(Frozen(base))
    heads = [head(fed, name) for name in ("c0", "c1")]
    assert torch.equal(*heads)  # what learns is shared over bases
    fed.close()


def test_engines_agree_and_training_is_that_of_a_plain_loop() -> None:
    of = scenario([partial(Frozen, 0), partial(Frozen, 1), partial(Frozen, 0)])
    found = []
    for engine in ENGINES:
        fed = federation(of, engine, fq.methods.FedProx(mu=0.3))
        for _ in range(3):
            fed.step(evaluate=False)
        found.append(head(fed, "c1"))
        fed.close()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-5, rtol=1e-4)
    whole = fq.Training(rounds=1, epochs=1, batch=100, lr=0.5)
    plain = fq.Scenario("plain", of.clients, whole, label_names=of.label_names)
    fed = federation(plain)
    expected = []
    for client in plain.clients:
        model = fed.model(client.name)
        loss = nn.functional.cross_entropy(model(client.train.x), client.train.y)
        weight = model.get_parameter("head.weight")
        (slope,) = torch.autograd.grad(loss, [weight])
        expected.append(len(client.train) * (weight - 0.5 * slope).detach())
    fed.step(evaluate=False)
    mean = torch.stack(expected).sum(0) / sum(len(client.train) for client in plain.clients)
    torch.testing.assert_close(head(fed, "c0"), mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "ditto", "pfedme", "per-fedavg", "apfl", "fednova", "fedrep"])
def test_methods_that_count_parameters_count_what_learns(method: str) -> None:
    of = scenario([Frozen] * 3)
    how = of.training.but({"momentum": 0.0, "weight_decay": 0.0, "epochs": 1})
    found = []
    for engine in ("sequential", "vectorised"):
        fed = fq.Federation(of, fq.methods.METHODS[method](), how, device="cpu", engine=engine)
        for _ in range(2):
            fed.step()
        assert bits(fed.model("c2")) == bits(Frozen())
        found.append(head(fed, "c2"))
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)


def test_a_checkpoint_and_a_saved_model_have_the_same_bits(tmp_path: Path) -> None:
    of = scenario([partial(Frozen, 0), partial(Frozen, 0), partial(Frozen, 1)])
    whole, first, second = (federation(of) for _ in range(3))
    for _ in range(3):
        whole.step()
    first.step()
    tensors: dict[str, Tensor] = {}
    text = federation_state(first, tensors)
    restore_federation(second, {name: tensor.clone() for name, tensor in tensors.items()}, text)
    second.step()
    second.step()
    for name, base in (("c0", 0), ("c1", 0), ("c2", 1)):
        assert bits(second.model(name)) == bits(whole.model(name)) == bits(Frozen(base))
        assert torch.equal(head(second, name), head(whole, name))
    run = fq.run(of, "fedavg", out=tmp_path / "run", alone=False, engine="sequential", device="cpu")
    assert len(list((tmp_path / "run" / "models").glob("frozen-*"))) == 2  # of three clients
    for name, base in (("c0", 0), ("c1", 0), ("c2", 1)):
        loaded = fq.load_model(tmp_path / "run", name, trust=True)
        assert bits(loaded) == bits(run.model(name)) == bits(Frozen(base))
        assert torch.equal(loaded.get_parameter("head.weight"), run.model(name).get_parameter("head.weight"))


@pytest.mark.parametrize("base", [0, 7])
def test_a_newcomer_brings_its_base_along(tmp_path: Path, base: int) -> None:
    of = scenario([partial(Frozen, 0)] * 3)
    fq.run(of, "fedavg", out=tmp_path / "run", alone=False, engine="sequential", device="cpu")
    new = fq.Client("new", partial(Frozen, base), of.clients[0].train, of.clients[0].validation, of.clients[0].test)
    joined = fq.onboard(tmp_path / "run", new, scenario=of, trust=True)
    assert bits(joined.model) == bits(Frozen(base))


class Teacher(nn.Module):
    """A frozen copy of the layer that learns, which follows it: its own writes are its clients' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.student(x) + self.teacher(x)
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        return out


def test_a_frozen_parameter_that_its_model_writes_is_a_column() -> None:
    fed = federation(scenario([Teacher] * 2))
    layout = fed.simulation.family_states[0].family.layout
    assert "teacher.weight" in layout.places
    assert "teacher.bias" not in layout.places  # that one nothing writes
    before = fed.model("c0").get_parameter("teacher.weight").clone()
    report = fed.step()
    assert report.traffic.total_up == 2 * 4 * (18 + 3 + 18)
    assert not torch.equal(fed.model("c0").get_parameter("teacher.weight"), before)


def test_a_model_that_thaws_what_it_wrote_nothing_to_is_refused() -> None:
    class Late(Frozen):
        calls = itertools.count()

        def forward(self, x: Tensor) -> Tensor:
            if self.training and next(Late.calls) > 20:
                with torch.no_grad():
                    self.get_parameter("body.0.weight").mul_(0.5)
            return super().forward(x)

    fed = federation(scenario([Late]))
    with pytest.raises(ValueError, match=r"parameter 'body\.0\.weight' is written now, and was not in the trial"):
        fed.run()


def test_units_know_what_learns() -> None:
    units = {unit.name: unit for unit in cut(Frozen())}
    assert units["body.0"].parameters == ()
    assert units["body.0"].buffers == ("body.0.weight", "body.0.bias")
    assert units["head"].parameters == ("head.weight", "head.bias")
    kinds, data = Kinds(), Split(torch.randn(4, 6), torch.zeros(4).long())
    one, same, other = (kinds.of(Frozen(base), cut, data) for base in (0, 0, 1))
    assert one.kind is same.kind is other.kind
    assert one.constants == same.constants != other.constants  # kept once where they are the same
