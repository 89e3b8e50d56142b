"""The steps of a round by themselves: what they see, what they write, what they send, and what they are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from core_help import ENGINES, federation, mlp, points, rows_after, rows_of, same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.steps import Do, Install, Send, Step, Train, but_last, last
from fedquilt.methods import FedAvg, State
from fedquilt.sharing import Plan, nobody

Program = tuple[Step, ...]


@dataclass(frozen=True)
class Programmed(FedAvg):
    """FedAvg whose clients do what is given here."""

    name: ClassVar[str] = "programmed"
    program: Callable[[], Program] = field(default=lambda: (Install(), Train()))
    state: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the shapes of what clients keep

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        return Parts(model, state={name: torch.zeros(*shape) for name, shape in self.state.items()})

    def local(self) -> Program:
        return self.program()

    def plan(self, state: State, roster: Roster) -> Plan:
        return super().plan(state, roster).but(nobody(list(self.state), len(roster)).units) if self.state else (
            super().plan(state, roster)
        )  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_chooses_what_it_sends(engine: str) -> None:
    """Who has few samples keeps its head back: it is neither sent, nor merged, nor counted."""

    def choose(me: Me) -> dict[str, Tensor]:
        return {"2": me.samples > 6}

    method = Programmed(program=lambda: (Install(), Train(), Send(choose)))
    fed = federation(points(sizes=(5, 9, 7)), method, engine)
    down = fed.server.instructions([0, 1, 2])
    up = fed.simulation.run(down)
    senders = {u: None if b.places is None else b.places.tolist() for b in up.blocks for u in b.units}
    assert senders == {"0": None, "2": [1, 2]}
    fed.close()
    fed = federation(points(sizes=(5, 9, 7)), method, engine)
    report = fed.step(evaluate=False)
    sizes = {unit: int(size[0]) for unit, size in fed.server.sizes.items()}
    assert report.traffic.up.tolist() == [[sizes["0"], 0], [sizes["0"], sizes["2"]], [sizes["0"], sizes["2"]]]
    rows, layout = rows_of(fed), fed.simulation.family_states[0].family.layout
    heads = [layout.take(row[None], "2")[0] for row in rows.values()]
    held = fed.server.held("2", torch.tensor([0]))[0]
    torch.testing.assert_close(held, (9 * heads[1] + 7 * heads[2]) / 16)
    fed.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_writes_state_that_lasts_and_reports_what_it_names(engine: str) -> None:
    def count(me: Me) -> dict[str, Tensor]:
        return {"rounds": me.values["rounds"] + 1, "steps": me.steps, "seen": me.told.get("x", me.number(me.round))}

    method = Programmed(
        program=lambda: (Install(), Train(), Do(count, reports=("steps", "seen"))), state={"rounds": (2, 3)}
    )
    fed = federation(points(sizes=(5, 9, 7)), method, engine)  # batches of 3, two epochs
    for round_ in (1, 2):
        up = fed.simulation.run(fed.server.instructions([0, 1, 2]))
        assert up.reports["steps"].tolist() == [4, 6, 6]
        assert up.reports["seen"].tolist() == [1, 1, 1]  # the server was not told of a round yet
        layout = fed.simulation.family_states[0].family.layout
        rows = torch.stack(list(rows_of(fed).values()))
        assert torch.equal(layout.take(rows, "rounds"), torch.full((3, 6), float(round_)))
    fed.close()


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_phases_train_what_they_name_and_nothing_else(engine: str) -> None:
    method = Programmed(program=lambda: (Install(), Train(units=last(1), epochs=3), Train(units=but_last(1), lr=0.5)))
    scenario = points(training={"momentum": 0.9})
    same(rows_after(scenario, method, engine), rows_after(scenario, method))
    head = Programmed(program=lambda: (Install(), Train(units="2")))
    fed = federation(scenario, head, engine)
    before = {name: row.clone() for name, row in rows_of(fed).items()}
    fed.step(evaluate=False)
    layout = fed.simulation.family_states[0].family.layout
    for name, row in rows_of(fed).items():
        assert torch.equal(layout.take(row[None], "0"), layout.take(before[name][None], "0"))
        assert not torch.equal(layout.take(row[None], "2"), layout.take(before[name][None], "2"))
    fed.close()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_of_what_does_not_train_rest(engine: str) -> None:
    fed = federation(points(normed), Programmed(program=lambda: (Install(), Train(units=last(1)))), engine)
    fed.step(evaluate=False)
    for client in fed.scenario.clients:
        assert float(fed.model(client.name).get_buffer("1.running_mean").abs().sum()) == 0
    fed.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_objective_knows_which_samples_it_sees(engine: str) -> None:
    """Weights by sample, learnt from the place of each sample among the client's own: padding has none."""

    def weighed(me: Learner, batch: Batch) -> Tensor:
        assert batch.index is not None
        losses = nn.functional.cross_entropy(me.model(batch.x), batch.y, reduction="none")
        return batch.mean(losses * me.given["weights"][batch.index])

    def given(me: Me) -> dict[str, Tensor]:
        return {"weights": torch.arange(9.0, device=me.samples.device)}

    scenario = points(sizes=(5, 9, 7))
    places = {tuple(x.tolist()): i for client in scenario.clients for i, x in enumerate(client.train.x)}

    def by_hand(me: Learner, batch: Batch) -> Tensor:
        index = torch.tensor([places[tuple(x.tolist())] for x in batch.x])
        losses = nn.functional.cross_entropy(me.model(batch.x), batch.y, reduction="none")
        return batch.mean(losses * me.given["weights"][index])

    method = Programmed(program=lambda: (Install(), Train(Objective((weighed,), needs_index=True), given=given)))
    first = Programmed(program=lambda: (Install(), Train(Objective((by_hand,)), given=given)))
    same(rows_after(scenario, method, engine), rows_after(scenario, first))


def test_a_step_may_wait_and_train_on_what_all_hold() -> None:
    common = (torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), [0, 1, 2, 0, 1, 2])
    late = Programmed(program=lambda: (Install(), Train(data="common", from_round=2), Train()))
    plain = Programmed()
    scenario = points(common=common)
    same(rows_after(scenario, late, rounds=1), rows_after(scenario, plain, rounds=1), atol=0)
    one, other = rows_after(scenario, late, rounds=2), rows_after(scenario, plain, rounds=2)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ValueError, match="trains on samples that all clients hold, and there are none; give the"):
        rows_after(points(), late, rounds=2)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_draws_depend_on_the_client_the_round_and_the_purpose_alone(engine: str) -> None:
    drawn: dict[tuple[int, str], Tensor] = {}

    def draw(me: Me) -> dict[str, Tensor]:
        return {"one": me.draw("one", 3), "again": me.draw("one", 3), "other": me.draw("other", 3)}

    method = Programmed(program=lambda: (Install(), Train(), Do(draw, reports=("one", "again", "other"))))
    for ids in ((0, 1, 2), (1,)):
        fed = federation(points(), method, engine)
        for round_ in (1, 2):
            down = fed.server.instructions(ids)
            up = fed.simulation.run(down)
            assert torch.equal(up.reports["one"], up.reports["again"])
            assert not torch.equal(up.reports["one"], up.reports["other"])
            fed.server.merge([up])
            for at, i in enumerate(ids):
                mine = drawn.setdefault((i, f"{round_}"), up.reports["one"][at])
                assert torch.equal(mine, up.reports["one"][at])
    numbers = torch.cat(list(drawn.values()))
    assert len(numbers.unique()) == len(numbers)


def test_what_makes_no_sense_is_refused() -> None:
    def step(program: Callable[[], Program], **more: Any) -> None:
        federation(points(), Programmed(program=program, **more)).step(evaluate=False)

    with pytest.raises(KeyError, match=r"a step writes 'nothing', which no unit or state is called; there are 0, 2"):
        step(lambda: (Do(lambda me: {"nothing": me.samples}),))
    with pytest.raises(ValueError, match=r"'programmed' trains none of the units 0, 2 of client 'client-0'"):
        step(lambda: (Train(units="conv*"),))
    with pytest.raises(ValueError, match="clients train on their own samples"):
        Train(data="test")
    with pytest.raises(ValueError, match="training for 0 epochs trains nothing"):
        Train(epochs=0)
    with pytest.raises(ValueError, match="a client that holds a, b predicts with one of them, not 'c'"):
        Parts({"a": mlp(), "b": mlp()}, predicts="c")
    with pytest.raises(ValueError, match="'state' cannot be the name of a part"):
        Parts({"state": mlp()}, predicts="state").module()
    assert [unit.name for unit in Parts(mlp(), state={"c": torch.zeros(1)}).cut()] == ["0", "2", "c"]


class Products(TorchDispatchMode):
    """Notes how many numbers each product of matrices has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.sizes.append(found.numel())
        return found


@pytest.mark.parametrize("data", ["train", "public"])
def test_a_step_sees_no_more_clients_at_once_than_there_is_room_for(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a stack may have far more samples than a batch, and all of them are run through its model."""
    hidden, samples = 6, 500
    common = (torch.randn(samples, 4), torch.arange(samples) % 3) if data == "public" else None
    sizes = [6, 9, 4, 8] if common else [samples, samples - 90, 3, 400]

    def look(me: Me) -> dict[str, Tensor]:
        x, mask = (me.data.x, me.data.mask) if me.data is not None else (me.public, None)
        assert x is not None
        logits = me.model(x) if mask is None else me.model(x) * mask[:, None]
        return {"seen": logits.sum(0)}

    method = Programmed(program=lambda: (Install(), Train(), Do(look, data=data)), state={"seen": (3,)})

    def seen() -> tuple[Tensor, int]:
        fed = federation(points(sizes=sizes, common=common), method, "vectorised")
        fed.step(evaluate=False)  # finds out how much room there is
        with Products() as products:
            fed.step(evaluate=False)
        row = torch.stack([row[-3:] for row in rows_of(fed).values()])
        fed.close()
        return row, max(products.sizes)

    whole, most = seen()
    assert most == len(sizes) * samples * hidden
    batches = -(-2 * samples // 3)  # of three samples: as many samples as two clients have
    monkeypatch.setattr("fedquilt.core.local_training.how_many_at_once", lambda *_: batches)
    parts, two = seen()
    assert two == 2 * samples * hidden
    torch.testing.assert_close(parts, whole)
    assert whole.abs().min() > 0
