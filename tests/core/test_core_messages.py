"""What passes between clients and server: private units never, bytes as the plan says, bad updates left out."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from core_help import ENGINES, Planned, Tap, Task, Zero, federation, mlp, points, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.client import Split
from fedquilt.interface.messages import Roster, UnitValues, Update, Updates
from fedquilt.methods import FedAvg, FedPer, Local, Method, State
from fedquilt.sharing import MixedUnit, Plan, UnitPlan, everyone, nobody


@dataclass(frozen=True)
class Watched(FedPer):
    """FedPer whose server half notes all it is handed."""

    name: ClassVar[str] = "watched"
    handed: list[Updates] = field(default_factory=list, compare=False)

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        self.handed.append(copy.deepcopy(Updates(updates.round, updates.ups)))
        return super().learn(state, updates, roster)


@pytest.mark.parametrize("engine", ENGINES)
def test_private_units_never_reach_the_server(engine: str) -> None:
    method = Watched()
    federated = federation(points(), method, engine)
    tap = Tap(federated)
    for _ in range(2):
        federated.step(evaluate=False)
    rows = rows_of(federated)
    federated.close()
    layout = federated.simulation.family_states[0].family.layout
    heads = torch.stack([layout.take(row[None], "2")[0] for row in rows.values()])
    assert len(heads.unique(dim=0)) == 3  # each its own
    assert len(tap.ups) == len(method.handed) == 2
    for up in (*tap.ups, *(up for sent in method.handed for up in sent.ups)):
        assert [block.units for block in up.blocks] == [("0",)]
        assert up.reports == {}
        for block in up.blocks:
            assert block.value.shape == (3, layout.size("0"))
    for sent in method.handed:
        assert sent.units == ["0"]
        assert sent.value("2")[0].numel() == 0
    # no number of a head is among what was sent last
    sent_numbers = set(tap.ups[-1].blocks[0].value.flatten().tolist())
    assert not sent_numbers & set(heads.flatten().tolist())


def test_alone_nothing_passes() -> None:
    federated = federation(points(), Local())
    tap = Tap(federated)
    federated.step()
    assert tap.ups[0].blocks == () == tap.downs[0].blocks
    assert tap.downs[0].send == {}


def test_some_clients_private_some_not() -> None:
    """Of a unit that two of three clients share, the third's copy stays home."""
    plan = Plan({"0": UnitPlan([0, -1, 0]), "2": UnitPlan([-1, 5, 5])})
    federated = federation(points(), Planned(plans=(plan,)))
    tap = Tap(federated)
    federated.step()
    blocks = {block.units: block for block in tap.ups[0].blocks}
    assert blocks["0",].places is not None
    assert blocks["0",].places.tolist() == [0, 2]
    assert blocks["2",].places is not None
    assert blocks["2",].places.tolist() == [1, 2]


def moved(tap: Tap) -> tuple[int, int]:
    """Bytes in the messages, of clients that receive or send."""
    up = sum(4 * block.value.numel() for up in tap.ups for block in up.blocks)
    down = 0
    for message in tap.downs:
        for block, pull in zip(message.blocks, message.pulls, strict=True):
            clients = len(message.ids) if pull is None else int((pull > 0).sum())
            down += 4 * clients * sum(block.sizes)
    return up, down


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_traffic_is_what_the_messages_hold(data: st.DataObject) -> None:
    vector = st.lists(st.integers(-1, 2), min_size=4, max_size=4)
    weights = st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=4, max_size=4)
    pulls = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4)
    asked = st.lists(st.booleans(), min_size=4, max_size=4)
    plans = []
    for _ in range(2):
        units = {unit: UnitPlan(data.draw(vector), data.draw(weights), data.draw(pulls)) for unit in ("0", "2")}
        plans.append(Plan(units, {unit: data.draw(asked) for unit in units}))
    share = data.draw(st.sampled_from([0.5, 1.0]))
    scenario = points(sizes=(3, 4, 3, 5), training={"share": share, "epochs": 1})
    federated = federation(scenario, Planned(plans=tuple(plans)))
    for _ in range(3):
        tap = Tap(federated)
        valued = all(bool(circle_values.known.all()) for circle_values in federated.server.all_values)
        report = federated.step(evaluate=False)
        up, down = moved(tap)
        assert up == report.traffic.total_up
        # a new circle that nobody was heard in has no value to send yet; the plan alone cannot know that
        assert down == report.traffic.total_down if valued else down <= report.traffic.total_down


def test_traffic_of_several_families() -> None:
    builders = [lambda: Task(4, 6), lambda: Task(4, 9), lambda: Task(4, 6)]
    federated = federation(points(builders), FedAvg())
    tap = Tap(federated)
    report = federated.step(evaluate=False)
    assert moved(tap) == (report.traffic.total_up, report.traffic.total_down)
    # bases: 4*6+6 + 6*5+5 = 65 for two, of which the third client's kind is alone; heads 5*3+3 = 18 for three
    assert report.traffic.by_unit() == {"base": (4 * 2 * 65, 4 * 2 * 65), "head": (4 * 3 * 18, 4 * 3 * 18)}


# --- bad updates -----------------------------------------------------------------------------------------------------


def exploding(lr: float = 1e30) -> fq.Scenario:
    """Client b's samples are so large that its first step ends in infinity."""
    clients = [
        fq.Client("a", Zero, ([[1.0]], [0]), test=([[1.0]], [0]), labels=[0, 1]),
        fq.Client("b", Zero, ([[3e38], [-3e38]], [0, 0]), test=([[1.0]], [1]), labels=[0, 1]),
        fq.Client("c", Zero, ([[2.0]], [1]), test=([[2.0]], [1]), labels=[0, 1]),
    ]
    return fq.Scenario("exploding", clients, training=fq.Training(rounds=3, batch=1, lr=lr))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_that_is_not_finite_is_left_out_counted_and_told(engine: str) -> None:
    federated = federation(exploding(lr=1.0), FedAvg(), engine)
    report = federated.step()
    assert not torch.isfinite(rows_of(federated)["b"]).all()
    # a: (1/2, -1/2), c: (-1, 1), one sample each: the mean is (-1/4, 1/4), as if b were not there
    for name in "abc":
        assert next(federated.model(name).parameters()).flatten().tolist() == [-0.25, 0.25]
    assert report.refused == 1
    assert federated.server.refused.tolist() == [0, 1, 0]
    report = federated.step()
    assert federated.server.refused.tolist() == [0, 2, 0]
    for name in "abc":
        assert torch.isfinite(next(federated.model(name).parameters())).all()
    federated.close()


def test_one_bad_update_counts_once_however_many_units_it_has() -> None:
    def two() -> nn.Module:
        top = Zero(1, 2)
        nn.init.ones_(top.weight[:1])
        return nn.Sequential(Zero(1, 1), top)

    base = exploding(1.0)
    clients = [fq.Client(c.name, two, c.train, None, c.test, labels=[0, 1]) for c in base.clients]
    plan = Plan({"0": UnitPlan([0, 0, 0]), "1": UnitPlan([0, 0, 0], [1, 2, 3])})  # two plans, two merges
    federated = federation(fq.Scenario("two", clients, training=base.training), Planned(plans=(plan,)))
    for _ in range(3):  # nobody asks in between
        federated.step(evaluate=False)
    assert federated.server.refused.tolist()[1] == 3


def test_a_circle_of_bad_updates_keeps_its_value() -> None:
    base = exploding(1.0)
    both = [base.clients[1], fq.Client("d", Zero, base.clients[1].train, labels=[0, 1])]
    federated = federation(fq.Scenario("both", both, training=base.training), FedAvg())
    federated.step()
    assert next(federated.model("b").parameters()).flatten().tolist() == [0.0, 0.0]
    assert federated.server.refused.tolist() == [1, 1]


def test_a_run_says_how_many_were_refused() -> None:
    run = fq.run(exploding(1.0), "fedavg", engine="sequential", device="cpu", alone=False)
    assert run.summary["refused_updates"] == 3
    assert run.summary["accuracy_mean"] is not None


# --- messages themselves ---------------------------------------------------------------------------------------------


def test_columns_of_a_block() -> None:
    value = torch.arange(12.0).view(2, 6)
    block = UnitValues(("a", "b", "c"), (1, 2, 3), None, value)
    found = block.columns(("b", "c"))
    assert found is not None
    assert torch.equal(found, value[:, 1:])
    assert block.columns(("a", "c")) is None  # not together
    assert block.columns(("b", "a")) is None
    assert block.columns(("z",)) is None
    up = Update(
        1, (4, 7), (UnitValues(("a",), (1,), torch.tensor([1]), value[:1, :1]),), {"seen": torch.tensor([1.0, 2.0])}
    )
    part = up.part(["a"])
    assert part is not None
    assert part[0].tolist() == [7]
    sent = Updates(1, (up,))
    assert sent.ids.tolist() == [4, 7]
    assert sent.report("seen")[1].tolist() == [1.0, 2.0]
    with pytest.raises(KeyError, match="no client reported 'loss' in round 1"):
        sent.report("loss")
    with pytest.raises(ValueError, match="no architectures"):
        sent.probabilities(Split(torch.zeros(1, 1), torch.zeros(1)))


@dataclass(frozen=True)
class Asking(Method):
    """Asks some clients for whole models and looks at their outputs."""

    name: ClassVar[str] = "asking"
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list, compare=False)

    def plan(self, state: State, roster: Roster) -> Plan:
        plan = everyone(["0"], roster.samples) | nobody(["2"], len(roster))
        return plan.but(asked={"0": [1, 1, 0], "2": [1, 1, 0]})

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        assert roster.common is not None
        self.seen.append(updates.probabilities(roster.common))
        return state


def test_the_server_runs_whole_models_that_were_sent() -> None:
    scenario = points(common=(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), [0] * 5))
    method = Asking()
    federated = federation(scenario, method)
    federated.step(evaluate=False)
    ids, found = method.seen[0]
    assert ids.tolist() == [0, 1]  # client 2 sent its base only
    assert isinstance(scenario.common, Split)
    for i, outputs in zip(ids.tolist(), found, strict=True):
        row = rows_of(federated)[f"client-{i}"]
        model = federated.simulation.family_states[0].family.model(row)
        torch.testing.assert_close(outputs, model(scenario.common.x).softmax(1))


def test_mixtures_send_only_what_somebody_needs() -> None:
    plan = Plan({"0": MixedUnit([[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]]), "2": nobody(["2"], 3)["2"]})
    federated = federation(points(mlp), Planned(plans=(plan,)))
    tap = Tap(federated)
    report = federated.step(evaluate=False)
    size = federated.simulation.family_states[0].family.layout.size("0")
    assert report.traffic.up[:, 0].tolist() == [size, size, 0]
    assert report.traffic.down[:, 0].tolist() == [size, 0, 0]
    assert moved(tap) == (report.traffic.total_up, report.traffic.total_down)
