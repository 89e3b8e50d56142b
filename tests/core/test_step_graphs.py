"""What steps compute is captured and replayed: with a stand-in for graphs on any machine, and on a GPU with graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from core_help import StandIn, rows_of, same
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.authoring import ClientInfo, Do, Install, Me, Parts, Plan, Roster, Send, State, Step, Train, nobody
from fedquilt.engines.cuda_graph import Graph
from fedquilt.interface import me, step_graphs
from fedquilt.methods import METHODS, FedAvg, Method, Scaffold
from fedquilt.testing import small_scenario

SETTINGS: dict[str, dict[str, Any]] = {
    "fedmn": {"blocks": (2, 2), "width": 6},
    "feddl": {"interval": 0},
    "feddf": {"steps": 5},
    "fedrep": {"head_epochs": 2},
}
made = StandIn.made


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(step_graphs, "Graph", StandIn)
    monkeypatch.setattr(me, "captures", lambda device: True)


@dataclass(frozen=True)
class Counting(FedAvg):
    """Clients add up how far they went, times a number of the round where that is wanted."""

    name: ClassVar[str] = "counting"
    of_a_round: bool = False

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        return Parts(model, state={"far": torch.zeros(1)})

    def local(self) -> tuple[Step, ...]:
        return Install(), Train(), Do(self.add, data="train", reports=("mean",))

    def add(self, me: Me) -> Mapping[str, Tensor]:
        assert me.data is not None
        way = (me.values.parameters() - me.received.parameters()).norm() + me.draw("noise", 1).sum()
        far = me.values["far"] + way * (me.round if self.of_a_round else me.number(2.0))
        return {"far": far, "mean": me.data.mean(me.data.x.sum(1))}

    def plan(self, state: State, roster: Roster) -> Plan:
        return super().plan(state, roster).but(nobody(["far"], len(roster)).units)


def run(method: Method, device: str = "cpu", engine: str = "vectorised", **training: Any) -> fq.Federation:
    scenario = small_scenario(share=training.pop("share", 1.0))
    scenario = replace(scenario, training=scenario.training.but({"rounds": 5, **training}))
    fed = fq.Federation(scenario, method, device=device, engine=engine, readouts=())
    for _ in range(scenario.training.rounds):
        fed.step(evaluate=False)
    return fed


def computes(name: str) -> bool:
    """Whether a method's steps do more than train and install."""
    return any(
        isinstance(step, Do | Send) or (isinstance(step, Train) and (step.given or step.rates) is not None)
        for step in METHODS[name]().local()
    )


@pytest.mark.parametrize("name", [name for name in METHODS if computes(name)])
def test_every_method_has_the_numbers_of_steps_that_are_not_captured(name: str, captured: None) -> None:
    few: dict[str, Any] = {"rounds": 3, "epochs": 1}
    method = METHODS[name](**SETTINGS.get(name, {}))
    with pytest.MonkeyPatch.context() as plainly:
        plainly.setattr(me, "captures", lambda device: False)
        wanted = rows_of(run(method, **few))
        assert not made
    for client, row in rows_of(run(method, **few)).items():
        assert torch.equal(row, wanted[client]), client


@pytest.mark.parametrize("training", [{}, {"share": 0.5}])
def test_the_second_round_captures_and_it_and_later_ones_replay(training: dict[str, Any], captured: None) -> None:
    fed = run(Counting(), **training)
    assert [graph.replays for graph in made] == [4]
    assert fed.simulation.family_states[0].graphs.captured == 1
    same(rows_of(fed), rows_of(run(Counting(), engine="sequential", **training)), atol=1e-5)
    fed.close()
    assert fed.simulation.family_states[0].graphs.captured == 0


def test_what_asks_for_the_round_is_done_anew_in_each(captured: None) -> None:
    fed = run(Counting(of_a_round=True))
    assert not made
    same(rows_of(fed), rows_of(run(Counting(of_a_round=True), engine="sequential")), atol=1e-5)


def test_what_asks_for_the_rate_is_captured_anew_where_it_falls(captured: None) -> None:
    how: dict[str, Any] = {"decay": 0.5, "decay_at": (0.5,)}  # the rate is another one from the fourth round on
    fed = run(Scaffold(), **how)
    same(rows_of(fed), rows_of(run(Scaffold(), engine="sequential", **how)), atol=1e-5)
    assert 4 > max(graph.replays for graph in made) > 0


def test_what_cannot_be_captured_is_done_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(body: Callable[[], None], device: torch.device) -> None:
        asked.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graphs, "Graph", refuse)
    monkeypatch.setattr(me, "captures", lambda device: True)
    fed = run(Counting())
    assert asked == [1]  # tried once
    same(rows_of(fed), rows_of(run(Counting(), engine="sequential")), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", [Counting(), Scaffold()], ids=["counting", "scaffold"])
def test_on_a_gpu_steps_are_replayed_with_the_numbers_of_a_cpu(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []
    replay = Graph.replay

    def counted(graph: Graph) -> None:
        replays.append(1)
        replay(graph)

    monkeypatch.setattr(Graph, "replay", counted)
    ours = run(method, device="cuda")
    graphs = ours.simulation.family_states[0].graphs
    assert graphs.captured >= 1
    wanted = rows_of(run(method, engine="sequential"))
    for name, row in rows_of(ours).items():
        torch.testing.assert_close(row.cpu(), wanted[name], atol=2e-4, rtol=1e-3)
    steps = len([step for step in ours.simulation.steps if isinstance(step, Do | Train)])
    assert len(replays) >= 4 * steps  # from the second round on: of what is trained, and of what is computed
