"""On a GPU: the CPU's numbers, captured graphs, the same bits twice. Skipped where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from core_help import Builder, Picky, Task, mlp, points, rows_of, same, same_rows
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core.compressed import compressed
from fedquilt.core.family_state import blocks_of
from fedquilt.engines.engine import Samples
from fedquilt.interface.messages import Update
from fedquilt.methods import FedAvg, FedPer, FedProx, Method
from fedquilt.models.recurrent import LSTM
from fedquilt.results import final

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def exact() -> Any:
    """Full precision, so that a CPU is a fair judge."""
    names = [(torch.backends.cuda.matmul, "fp32_precision"), (torch.backends.cudnn.conv, "fp32_precision")]  # type: ignore[attr-defined]
    before = [getattr(*name) for name in names]
    for where, name in names:
        setattr(where, name, "ieee")
    yield
    for (where, name), value in zip(names, before, strict=True):
        setattr(where, name, value)


def trained(
    scenario: fq.Scenario, method: Method | None = None, device: str = "cuda", engine: str = "vectorised", **more: Any
) -> fq.Federation:
    federated = fq.Federation(scenario, method or FedAvg(), device=device, engine=engine, **more)
    for _ in range(scenario.training.rounds):
        federated.step(evaluate=False)
    return federated


def rows(federated: fq.Federation) -> Mapping[str, Tensor]:
    return {name: row.cpu() for name, row in rows_of(federated).items()}


def stages(federated: fq.Federation) -> list[Any]:
    engine: Any = next(iter(federated.simulation.family_states[0].engines.values()))
    return list(engine.stages.values())


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip


def signal_net() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 3))


MODELS: dict[str, tuple[Builder, dict[str, Any]]] = {
    "mlp": (mlp, {}),
    "conv2d": (conv_net, {"shape": (1, 5, 5)}),
    "conv1d": (signal_net, {"shape": (2, 6)}),
    "lstm": (lambda: nn.Sequential(LSTM(3, 4), nn.Linear(4, 3)), {"shape": (5, 3)}),
}


@pytest.mark.parametrize("sizes", [(6, 6, 6), (7, 7, 7), (5, 9, 1)], ids=["even", "short", "uneven"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_numbers_of_a_cpu(kind: str, sizes: tuple[int, ...]) -> None:
    model, more = MODELS[kind]
    scenario = points(model, sizes=sizes, training={"rounds": 4, "momentum": 0.9}, **more)
    ours = trained(scenario)
    same(rows(ours), rows(trained(scenario, device="cpu", engine="sequential")), atol=2e-4)
    (stage,) = stages(ours)
    assert stage.graph is not None  # captured
    assert stage.engine.whole == (len(set(sizes)) == 1)


@pytest.mark.parametrize(
    "how", [{}, {"momentum": 0.9, "nesterov": True}, {"optimiser": "adam"}, {"optimiser": "adamw"}]
)
def test_optimisers_in_graphs(how: dict[str, Any]) -> None:
    settings = {"rounds": 4, "lr": 0.01, "weight_decay": 0.1, "decay_at": (0.5,), "decay": 0.1} | how
    scenario = points(sizes=(6, 6, 6), training=settings)
    wanted = trained(scenario, FedProx(mu=0.1), device="cpu", engine="sequential")
    same(rows(trained(scenario, FedProx(mu=0.1))), rows(wanted), atol=1e-4)


def test_sequential_on_a_gpu() -> None:
    scenario = points(conv_net, shape=(1, 5, 5))
    wanted = trained(scenario, device="cpu", engine="sequential")
    same(rows(trained(scenario, engine="sequential")), rows(wanted), atol=2e-4)


@pytest.mark.parametrize("sizes", [(6, 6, 6), (7, 7, 7), (5, 9, 1)], ids=["even", "short", "uneven"])
@pytest.mark.parametrize("kind", ["mlp", "conv2d", "conv1d"])
def test_one_by_one_in_graphs(kind: str, sizes: tuple[int, ...]) -> None:
    model, more = MODELS[kind]
    scenario = points(model, sizes=sizes, training={"rounds": 4, "momentum": 0.9, "batch": 4}, **more)
    ours = trained(scenario, FedProx(mu=0.1), engine="captured")
    same(rows(ours), rows(trained(scenario, FedProx(mu=0.1), device="cpu", engine="sequential")), atol=2e-4)
    engine: Any = next(iter(ours.simulation.family_states[0].engines.values()))
    assert not engine.plain
    assert engine.graphs.keys() == {n for size in sizes for n in (min(size, 4), size % 4) if n}
    again = trained(scenario, FedProx(mu=0.1), engine="captured")
    assert all(torch.equal(one, other) for one, other in zip(rows(ours).values(), rows(again).values(), strict=True))


@pytest.mark.parametrize("sizes", [(6, 6, 6), (5, 9, 1)], ids=["even", "uneven"])
def test_samples_that_do_not_fit_on_a_gpu_come_batch_by_batch(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Samples, "to", lambda samples, device: samples)
    scenario = points(sizes=sizes, training={"rounds": 3})
    wanted = trained(scenario, device="cpu", engine="sequential")
    same(rows(trained(scenario)), rows(wanted), atol=1e-4)  # and nobody is told that the model is at fault


def test_families_and_partial_participation() -> None:
    builders = [partial(Task, 4, 6), partial(Task, 4, 9)] * 3
    scenario = points(builders, sizes=(5, 6, 8, 4, 7, 6), training={"share": 0.5, "rounds": 6})
    wanted = trained(scenario, FedPer(), device="cpu", engine="sequential")
    same(rows(trained(scenario, FedPer())), rows(wanted), atol=1e-4)


def test_new_shapes_make_new_graphs_and_old_ones_are_kept() -> None:
    federated = fq.Federation(points(sizes=(6, 6, 6, 6)), FedAvg(), device="cuda", engine="vectorised")
    for _ in range(3):
        for ids in ((0, 1, 2, 3), (0, 2)):
            federated.simulation.run(federated.server.instructions(ids))
    graphs = [stage.graph for stage in stages(federated)]
    assert len(graphs) == 2
    assert None not in graphs
    federated.simulation.run(federated.server.instructions((1, 3)))  # other clients, the same shape
    assert {id(stage.graph) for stage in stages(federated)} == {id(graph) for graph in graphs}


def test_evaluation_and_personal_models() -> None:
    scenario = points(conv_net, shape=(1, 5, 5))
    ours = fq.run(scenario, "fedper", device="cuda", engine="vectorised", alone=False)
    cpu = fq.run(scenario, "fedper", device="cpu", engine="sequential", alone=False)
    same_rows(ours.rows, cpu.rows, within=1e-3)  # convolutions on a GPU are at TF32
    model = ours.model("client-1")
    client = scenario.clients[1]
    row = final(ours.rows, "received", "test")[client.name]
    right = (model(client.test.x).argmax(1) == client.test.y).float().mean()  # an ordinary module, on the CPU
    assert float(right) == pytest.approx(row["accuracy"])


@pytest.mark.parametrize("sizes", [(6, 6, 6), (5, 9, 7)], ids=["even", "uneven"])
def test_the_same_bits_twice_with_dropout(sizes: tuple[int, ...]) -> None:
    def dropped() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))

    scenario = points(dropped, sizes=sizes, training={"rounds": 4})
    once, twice, other = (rows(trained(scenario, seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(row, twice[name]) for name, row in once.items())
    assert not any(torch.equal(row, other[name]) for name, row in once.items())


class Uncapturable(nn.Module):
    """Asks the device a question in the middle, which a graph cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize() if x.is_cuda else None
        out: Tensor = self.head(x)
        return out


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once() -> None:
    scenario = points(Uncapturable, sizes=(6, 6, 6), training={"rounds": 4})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        federated = trained(scenario)
    assert len([w for w in said if "cannot be captured as a CUDA graph" in str(w.message)]) == 1
    wanted = trained(scenario, device="cpu", engine="sequential")
    same(rows(federated), rows(wanted), atol=1e-4)


def test_what_cannot_be_stacked_falls_back() -> None:
    stacked, captured = "cannot be stacked, so it is trained with the engine 'captured'", "a step cannot be captured"
    with pytest.warns(RuntimeWarning, match=stacked), pytest.warns(RuntimeWarning, match=captured):
        federated = trained(points(Picky))
    assert federated.simulation.engines == ["captured"]


def test_clients_at_once_and_bad_updates() -> None:
    scenario = points(sizes=(5, 9, 7, 3))
    whole = rows(trained(scenario, FedPer()))
    same(rows(trained(scenario, FedPer(), clients_at_once=2)), whole, atol=1e-4)
    x = scenario.clients[0].train.x * 1e38
    bad = fq.Client("bad", mlp, (x, scenario.clients[0].train.y))
    mixed = fq.Scenario("m", [bad, *scenario.clients[1:]], training=scenario.training, label_names=scenario.label_names)
    federated = trained(mixed)
    assert all(bool(torch.isfinite(p).all()) for p in federated.model("client-1").parameters())


@pytest.mark.parametrize("compress", [fq.Compression("int8", "float16"), fq.Compression("topk", kept=0.1)])
def test_codes_are_made_without_waiting(compress: fq.Compression) -> None:
    """And say what a CPU's say, but where a change is half-way between two."""
    scenario = points(conv_net, sizes=(6, 6, 6), shape=(1, 5, 5), training={"rounds": 2, "share": 0.7})
    ours, theirs = (trained(scenario, device=device, compress=compress) for device in ("cuda", "cpu"))
    same(rows(ours), rows(theirs), atol=2e-3)
    family_state = ours.simulation.family_states[0]
    layout, down = family_state.family.layout, ours.server.instructions((0, 1, 2))
    everything = {unit.name: torch.ones(3, dtype=torch.bool) for unit in layout.units}
    up = Update(3, (0, 1, 2), blocks_of(family_state.family, family_state.store.all(), everything))
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that mode warns that it may miss some
        torch.cuda.set_sync_debug_mode("error")
    try:
        compressed(up, down, layout, compress, family_state.store.store)
    finally:
        torch.cuda.set_sync_debug_mode("default")
