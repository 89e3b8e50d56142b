"""All engines give the same numbers, and these are the numbers of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from core_help import ENGINES, Builder, Picky, Task, federation, mlp, plain_fedavg, points, rows_after, rows_of, same
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.engines.engine import Engine, TrainingJob
from fedquilt.engines.objective import Batch, Learner, Objective, task_loss
from fedquilt.engines.parallel import can_fork
from fedquilt.interface.me import Me
from fedquilt.interface.steps import Install, Step, Train
from fedquilt.layers.draws import drawing
from fedquilt.layers.dropout import swap_dropout
from fedquilt.methods import FedAvg, FedPer, FedProx, Local
from fedquilt.models.recurrent import LSTM

OTHERS = ("vectorised", "parallel", "parallel-stacks")

OPTIMISERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.5, "weight_decay": 0.1},
    "adam": {"optimiser": "adam", "lr": 0.01},
    "adam-decay": {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)},
    "adamw": {"optimiser": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


# --- against plain PyTorch -------------------------------------------------------------------------------------------


def as_in_a_plain_loop(scenario: fq.Scenario, rounds: int, atol: float, rtol: float) -> None:
    plain = plain_fedavg(scenario, rounds=rounds)
    for engine in ("sequential", "vectorised"):
        federated = federation(scenario, engine=engine)
        for _ in range(rounds):
            federated.step(evaluate=False)
        layout = federated.simulation.family_states[0].family.layout
        for name, row in rows_of(federated).items():
            torch.testing.assert_close(row, layout.row(plain[name]), atol=atol, rtol=rtol)


@pytest.mark.parametrize("sizes", [(6, 6, 6), (7, 7, 7), (5, 9, 1)], ids=["even", "short", "uneven"])
@pytest.mark.parametrize("how", OPTIMISERS)
def test_numbers_of_a_plain_loop(how: str, sizes: tuple[int, ...]) -> None:
    scenario = points(sizes=sizes, training=OPTIMISERS[how])
    as_in_a_plain_loop(scenario, rounds=2, atol=2e-5, rtol=1e-4)


def norm_net() -> nn.Module:
    # without a bias below batch norm: its gradient is rounding noise, which Adam would blow up
    return nn.Sequential(nn.Conv1d(2, 4, 3, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def test_batch_norm_of_a_plain_loop() -> None:
    scenario = points(norm_net, sizes=(6, 8, 11), shape=(2, 6), training={"momentum": 0.9})
    as_in_a_plain_loop(scenario, rounds=3, atol=5e-5, rtol=1e-3)


# --- engines among each other ----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = nn.GRU(3, 4, batch_first=True) if kind == "gru" else LSTM(3, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        out: Tensor = self.head(y[0][:, -1] if isinstance(y, tuple) else y)
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        y = self.norm(y + self.attend(y, y, y, need_weights=False)[0])
        out: Tensor = self.head(y.mean(1))
        return out


class Tied(nn.Module):
    """The same matrix twice: its gradient has two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4, 4)
        self.up = nn.Linear(4, 4, bias=False)
        self.up.weight = self.down.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.up(torch.tanh(self.down(x))))
        return out


class Replaced(nn.Module):
    """A buffer that is replaced, not written in place, and one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.centre: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.mean(0).detach()
            self.seen = self.seen + 1
        out: Tensor = self.head(x - self.centre)
        return out


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    net[0].weight.requires_grad_(False)
    return net


class OwnNorm(nn.BatchNorm1d):
    """A batch norm by another name."""


MODELS: dict[str, tuple[Builder, dict[str, Any]]] = {
    "batch-norm": (norm_net, {"shape": (2, 6), "sizes": (4, 9, 7)}),  # 4 and 7: a last batch of one sample
    "own-norm": (lambda: nn.Sequential(nn.Linear(4, 5, bias=False), OwnNorm(5), nn.Tanh(), nn.Linear(5, 3)), {}),
    "no-statistics": (
        lambda: nn.Sequential(
            nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)
        ),
        {},
    ),
    "average-norm": (
        lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)),
        {},
    ),
    "conv-group-norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        ),
        {"shape": (1, 6, 6)},
    ),
    "gru": (partial(Recurrent, "gru"), {"shape": (5, 3)}),
    "lstm": (partial(Recurrent, "lstm"), {"shape": (5, 3)}),
    "attention": (Attention, {"shape": (5,), "words": 10}),
    "tied": (Tied, {}),
    "frozen": (frozen, {"training": {"weight_decay": 0.1, "momentum": 0.5}}),
}


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("kind", MODELS)
def test_engines_agree_on_models(kind: str, engine: str) -> None:
    model, more = MODELS[kind]
    scenario = points(model, **more)
    same(rows_after(scenario, engine=engine), rows_after(scenario), atol=5e-5)


@pytest.mark.parametrize("kind", ["attention", "encoder", "batch-norm"])
def test_engines_evaluate_alike(kind: str) -> None:
    def encoder() -> nn.Module:  # in eval mode it has a fast path of its own
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3))

    model, more = (encoder, {"shape": (3, 4)}) if kind == "encoder" else MODELS[kind]
    found = {}
    for engine in ("sequential", "vectorised"):
        federated = federation(points(model, **more), engine=engine)
        found[engine] = federated.step().evaluations
        federated.close()
    for one, other in zip(found["sequential"], found["vectorised"], strict=True):
        assert (one.readout, one.split) == (other.readout, other.split)
        assert torch.equal(one.counts, other.counts)


@pytest.mark.parametrize("engine", OTHERS)
def test_engines_agree_on_batch_norm_under_adam(engine: str) -> None:
    scenario = points(norm_net, sizes=(4, 6, 9), shape=(2, 6), training={"optimiser": "adam", "lr": 0.003})
    same(rows_after(scenario, engine=engine), rows_after(scenario), atol=3e-4)


def test_replaced_buffers_are_each_clients_own() -> None:
    scenario = points(Replaced, sizes=(6, 6, 6))
    rows = {engine: rows_after(scenario, Local(), engine) for engine in ENGINES}
    same(rows["vectorised"], rows["sequential"])
    same(rows["parallel"], rows["sequential"])
    seen = [row[-1].item() for row in rows["sequential"].values()]
    assert seen == [8.0, 8.0, 8.0]  # 2 rounds of 2 epochs of 2 batches
    assert len({row[-3].item() for row in rows["sequential"].values()}) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_parameters_rest(engine: str) -> None:
    scenario = points(frozen, training={"weight_decay": 0.1, "momentum": 0.9})
    federated = federation(scenario, engine=engine)
    layout, rows = (
        federated.simulation.family_states[0].family.layout,
        federated.simulation.family_states[0].store.all(),
    )
    before, learnt = federated.model("client-0").get_parameter("0.weight"), layout.tensor(rows, "2.weight").clone()
    federated.step(evaluate=False)
    after = federated.model("client-0").get_parameter("0.weight")
    assert torch.equal(after, before)
    assert not torch.equal(layout.tensor(rows, "2.weight"), learnt)
    assert not after.requires_grad
    federated.close()


@pytest.mark.parametrize("engine", OTHERS)
def test_a_proximal_term_and_schedules(engine: str) -> None:
    scenario = points(training={"rounds": 4, "decay_at": (0.5, 0.75), "decay": 0.1, "lr": 0.2})
    same(rows_after(scenario, FedProx(mu=0.3), engine, 4), rows_after(scenario, FedProx(mu=0.3), rounds=4))
    assert scenario.training.rate(2) == 0.2
    assert scenario.training.rate(3) == pytest.approx(0.02)
    assert scenario.training.rate(4) == pytest.approx(0.002)


@dataclass(frozen=True)
class Rated(FedAvg):
    """Units at different rates on different clients, and a target of one's own: what a step is given."""

    name: ClassVar[str] = "rated"

    def local(self) -> tuple[Step, ...]:
        def towards(me: Learner, batch: Batch) -> Tensor:
            assert me.epoch is not None
            gap = me.parameters["2.weight"] - me.given["target"]
            return 0.1 * (1 + me.epoch) * gap.square().sum()

        def given(me: Me) -> dict[str, Tensor]:
            return {"target": me.model.values["2.weight"] + me.samples}

        def rates(me: Me) -> dict[str, Tensor]:
            return {"0": (me.samples - 5) / 4, "2": me.number(1.0)}

        return Install(), Train(task_loss() + Objective((towards,)), given=given, rates=rates)


@pytest.mark.parametrize("engine", OTHERS)
def test_rates_of_units_and_extras(engine: str) -> None:
    scenario = points(training={"momentum": 0.9})
    same(rows_after(scenario, Rated(), engine), rows_after(scenario, Rated()))
    federated = federation(scenario, Rated(), engine)
    layout, rows = (
        federated.simulation.family_states[0].family.layout,
        federated.simulation.family_states[0].store.all(),
    )
    before = layout.tensor(rows, "0.weight").clone()
    federated.step(evaluate=False)
    assert torch.equal(layout.tensor(rows, "0.weight")[0], before[0])  # client 0, with 5 samples: rate 0
    assert not torch.equal(layout.tensor(rows, "0.weight")[1], before[1])
    federated.close()


@pytest.mark.parametrize("engine", OTHERS)
def test_several_families_with_a_unit_in_common(engine: str) -> None:
    builders = [partial(Task, 4, 6), partial(Task, 4, 9), partial(Task, 4, 6), partial(Task, 4, 9)]
    scenario = points(builders, sizes=(5, 6, 8, 4))
    federated = federation(scenario, FedAvg())
    assert [family_state.family.ids for family_state in federated.simulation.family_states] == [(0, 2), (1, 3)]
    federated.step(evaluate=False)
    heads = [federated.model(f"client-{i}").get_parameter("head.weight") for i in range(4)]
    assert all(torch.equal(head, heads[0]) for head in heads)  # one circle over both families
    same(rows_after(scenario, FedAvg(), engine), rows_after(scenario, FedAvg()))


@pytest.mark.parametrize("engine", OTHERS)
def test_partial_participation(engine: str) -> None:
    scenario = points(sizes=(5, 9, 7, 3, 6), training={"share": 0.4, "rounds": 4})
    same(rows_after(scenario, FedPer(), engine, 4), rows_after(scenario, FedPer(), rounds=4))


def test_steps_that_a_client_does_not_take_cannot_hurt_it() -> None:
    """The short client is done while the other goes on; at what it reached, its loss is infinite."""
    x = torch.tensor([[3e38, 0.0, 0.0, 0.0]])
    short = fq.Client("short", partial(nn.Linear, 4, 3), (x, [0]), labels=[0, 1, 2])
    long = points(sizes=(7,)).clients[0]
    scenario = fq.Scenario("s", [short, long], training=fq.Training(batch=1, lr=1.0), label_names=list("abc"))
    rows = {engine: rows_after(scenario, Local(), engine, 1)["short"] for engine in ("sequential", "vectorised")}
    torch.testing.assert_close(rows["vectorised"], rows["sequential"], equal_nan=True)
    assert bool(torch.isfinite(rows["vectorised"]).all())


# --- what a result does not depend on --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_how_many_are_trained_at_once(engine: str) -> None:
    scenario = points(norm_net, sizes=(5, 9, 7, 3), shape=(2, 6), training={"epochs": 1})
    whole = rows_after(scenario, FedPer(), engine)
    for number in (1, 3):
        same(rows_after(scenario, FedPer(), engine, clients_at_once=number), whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_who_else_takes_part(engine: str) -> None:
    scenario = points(sizes=(5, 9, 7, 3))
    few = fq.Scenario("few", scenario.clients[1:3], training=scenario.training, label_names=scenario.label_names)
    all_of_them, these = rows_after(scenario, Local(), engine), rows_after(few, Local(), engine)
    same({name: all_of_them[name] for name in these}, these, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_order_of_clients(engine: str) -> None:
    scenario = points(sizes=(5, 9, 7))
    turned = fq.Scenario("t", scenario.clients[::-1], training=scenario.training, label_names=scenario.label_names)
    same(rows_after(scenario, engine=engine), rows_after(turned, engine=engine), atol=2e-6)


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [mlp, dropped], ids=["plain", "dropout"])
def test_the_same_bits_twice_and_others_for_another_seed(engine: str, model: Builder) -> None:
    scenario = points(model, training={"rounds": 4})
    once = rows_after(scenario, engine=engine, rounds=4)  # enough steps for a traced program
    torch.manual_seed(99)  # the ambient generator must not matter, nor be moved
    ambient = torch.get_rng_state()
    twice = rows_after(scenario, engine=engine, rounds=4)
    assert all(torch.equal(row, twice[name]) for name, row in once.items())
    assert torch.equal(torch.get_rng_state(), ambient)
    other = rows_after(scenario, engine=engine, rounds=4, seed=1)
    assert not any(torch.equal(row, other[name]) for name, row in once.items())


def test_dropout_drops_differently_for_clients_steps_and_rounds() -> None:
    class Peek(nn.Module):
        """The loss is a mask's sum, so a weight moves by what was kept."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 64))
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.drop(torch.ones(len(x), 64)), self.weight)

    scenario = points(Peek, sizes=(3, 3), training={"epochs": 1})
    for engine in ENGINES:
        federated = federation(scenario, Local(), engine)
        moves = []
        before = {name: torch.zeros(192) for name in ("client-0", "client-1")}
        for _ in range(2):
            federated.step(evaluate=False)
            now = rows_of(federated)
            moves += [tuple((now[name] - before[name] != 0).tolist()) for name in before]
            before = now
        assert len(set(moves)) == 4
        federated.close()


class Dropping(nn.Module):
    """Dropout of channels and of numbers, one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels, self.drop = nn.Conv1d(1, 6, 2), nn.Dropout1d(0.3), nn.Dropout(0.4)
        self.head = nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.drop(self.channels(self.conv(self.drop(x[:, None]))).flatten(1)))
        return scores


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (5, 9, 7, 1)], ids=["even", "uneven"])
@pytest.mark.parametrize("model", [dropped, Dropping])
def test_dropout_depends_on_neither_the_engine_nor_who_else_is_in_a_stack(
    model: Builder, sizes: tuple[int, ...]
) -> None:
    scenario = points(model, sizes=sizes)
    expected = rows_after(scenario, engine="sequential", rounds=4)
    for engine in ENGINES:
        same(rows_after(scenario, engine=engine, rounds=4), expected, atol=2e-5)
    for at_once in (1, 2, 3):
        same(rows_after(scenario, engine="vectorised", rounds=4, clients_at_once=at_once), expected, atol=2e-5)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_share_it_should_and_the_mean(p: float) -> None:
    layer = nn.Sequential(nn.Dropout(p))
    swap_dropout(layer)
    seen = []
    for stream in range(20):
        with drawing(torch.tensor(stream)):
            seen += [layer(torch.ones(50, 200)) for _ in range(2)]
    kept = torch.stack(seen) > 0
    assert float(kept.float().mean()) == pytest.approx(1 - p, abs=0.003)  # 400,000 draws
    for axis in ((0, 1), (0, 2)):  # no sample and no place is favoured
        assert float((kept.float().mean(axis) - (1 - p)).abs().max()) < 0.06
    if 0 < p < 1:
        assert float(torch.stack(seen)[kept].max()) == pytest.approx(1 / (1 - p))
        agree = (kept[0] == kept[1:]).float().mean((1, 2))  # other calls and other streams have nothing in common
        assert float((agree - p**2 - (1 - p) ** 2).abs().max()) < 0.03


def test_seven_rounds_of_traced_steps() -> None:
    """Longer than it takes until a step is traced, with extras, masks and an anchor, and the last batches short."""
    scenario = points(sizes=(5, 9, 7), training={"rounds": 7, "momentum": 0.9})
    for method in (Rated(), FedProx(mu=0.1)):
        same(rows_after(scenario, method, "vectorised", 7), rows_after(scenario, method, rounds=7), atol=5e-5)


def test_ever_new_companies_of_uneven_clients_share_their_memory() -> None:
    scenario = points(sizes=tuple(range(3, 15)), training={"share": 0.25, "rounds": 12})
    federated = federation(scenario, engine="vectorised")
    for _ in range(12):
        federated.step(evaluate=False)
    engine: Any = next(iter(federated.simulation.family_states[0].engines.values()))
    assert len(engine.stages) == 1
    same(rows_of(federated), rows_after(scenario, rounds=12))


def test_stages_are_let_go_when_they_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = points(sizes=(6, 6, 6, 6))
    federated = federation(scenario, Local(), engine="vectorised")
    monkeypatch.setattr("fedquilt.engines.vectorised.memory_budget", lambda device: 1)
    for ids in ((0, 1, 2, 3), (0, 1), (2,), (0, 1)):
        federated.simulation.run(federated.server.instructions(ids))
    engine: Any = next(iter(federated.simulation.family_states[0].engines.values()))
    assert len(engine.stages) == 1


# --- falling back ----------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_stacked_falls_back_and_says_so_once() -> None:
    scenario = points(Picky, training={"rounds": 3})
    federated = federation(scenario, engine="vectorised")
    with pytest.warns(RuntimeWarning, match="cannot be stacked, so it is trained with the engine") as said:
        federated.run()
    assert len([w for w in said if "stacked" in str(w.message)]) == 1
    assert federated.simulation.engines in (["parallel"], ["sequential"])
    same(rows_of(federated), rows_after(scenario, rounds=3))
    federated.close()


def test_a_model_that_workers_cannot_stack_is_trained_one_by_one() -> None:
    scenario = points(Picky)
    federated = federation(scenario, engine="parallel-stacks")
    with pytest.warns(RuntimeWarning, match="cannot be stacked, so it is trained with the engine 'parallel': ") as said:
        federated.step(evaluate=False)
    assert "Traceback" not in str(said[0].message)  # a worker's trouble in one line
    federated.close()


def trial(
    monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float], stack: int, cores: int = 2, rounds: int = 100
) -> list[str]:
    """The engines that `auto` tries for a family, and at last the one it takes."""
    tried: list[str] = []

    def instead(engine: Engine, job: TrainingJob, repeats: int, **clock: object) -> float:
        tried.append(engine.name)
        engine.close()
        return seconds[engine.name]

    monkeypatch.setattr("fedquilt.engines.select._seconds", instead)
    monkeypatch.setattr("fedquilt.engines.select.cores", lambda: cores)
    monkeypatch.setattr("fedquilt.engines.select.how_many_a_worker", lambda recipe, extras: stack)
    federated = federation(points(training={"rounds": rounds}), engine="auto")
    federated.step(evaluate=False)
    tried += federated.simulation.engines
    federated.close()
    return tried


@pytest.mark.skipif(not can_fork(), reason="this system cannot fork")
def test_auto_tries_what_may_be_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"vectorised": 1.0, "parallel-stacks": 1.1, "parallel": 2.0, "sequential": 3.0}
    all_three = ["vectorised", "vectorised", "parallel-stacks", "parallel"]  # first a step, then a trial of each
    # A trial is kind to stacks in the user's own process: they must be clearly faster.
    assert trial(monkeypatch, seconds, stack=8) == [*all_three, "parallel-stacks"]
    assert trial(monkeypatch, {**seconds, "vectorised": 0.5}, stack=8) == [*all_three, "vectorised"]
    assert trial(monkeypatch, {**seconds, "parallel": 0.5}, stack=8) == [*all_three, "parallel"]
    assert trial(monkeypatch, seconds, stack=1) == ["parallel"]  # too big to stack: nothing to try
    three_clients = ["vectorised", "vectorised", "parallel", "vectorised"]
    assert trial(monkeypatch, seconds, stack=1, cores=4) == three_clients
    assert trial(monkeypatch, seconds, stack=8, cores=1) == ["vectorised", "vectorised", "sequential", "vectorised"]


@pytest.mark.skipif(not can_fork(), reason="this system cannot fork")
def test_what_is_soon_done_is_not_worth_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients take up to six steps of a millisecond each in a round."""
    seconds = {"vectorised": 0.001, "parallel-stacks": 0.0001, "parallel": 0.0001}
    assert trial(monkeypatch, seconds, stack=8, rounds=160) == ["vectorised", "vectorised", "vectorised"]
    assert trial(monkeypatch, seconds, stack=8, rounds=170)[1:] == [*seconds, "parallel-stacks"]


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no engine 'vectorized'; did you mean 'vectorised'"):
        federation(points(), engine="vectorized").step()


def test_auto_records_what_it_chose() -> None:
    run = fq.run(points(), "fedavg", engine="auto", device="cpu", alone=False)
    assert run.summary["engine"] in ENGINES


def test_a_batch_larger_than_the_client() -> None:
    scenario = points(sizes=(2, 5, 3), training={"batch": 64})
    plain = plain_fedavg(scenario, rounds=2)
    for engine in ENGINES:
        found = rows_after(scenario, engine=engine)
        for name, row in found.items():
            wanted = torch.cat([p.detach().flatten() for p in plain[name].parameters()])
            torch.testing.assert_close(row, wanted, atol=1e-5, rtol=1e-4)


def test_losses_are_the_mean_over_steps() -> None:
    scenario = points(sizes=(5, 9, 7))
    losses: dict[str, Tensor | None] = {}
    for engine in ENGINES:
        federated = federation(scenario, engine=engine)
        assert (
            federated.simulation.run(federated.server.instructions([0, 1, 2])).reports == {}
        )  # they do not leave the clients
        losses[engine] = federated.simulation.family_states[0].loss
        federated.close()
    for engine in OTHERS:
        torch.testing.assert_close(losses[engine], losses["sequential"], atol=1e-5, rtol=1e-4)
