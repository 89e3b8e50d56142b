"""Virtual time: what three unlike clients take, who is late, what arrives stale; all computed by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core.federation import Federation
from fedquilt.report.page_content import page_data
from fedquilt.scenarios.hardware import with_hardware

LR = 0.5
COUNTS = (4, 6, 8)


def samples(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(COUNTS[number], 2, generator=draw), torch.arange(COUNTS[number]) % 2


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def flat() -> nn.Module:
    return nn.Linear(2, 2)


def clients(model: Callable[[], nn.Module] = flat, **traits: Sequence[Any]) -> fq.Scenario:
    """Three clients of 4, 6 and 8 samples, and a model of 6 numbers, so 24 bytes."""
    made = [
        fq.Client(f"c{i}", model, samples(i), test=samples(i),
                  traits={name: values[i] for name, values in traits.items()})
        for i in range(3)
    ]  # fmt: skip
    return fq.Scenario("three", made, fq.Training(rounds=5, batch=8, lr=LR))


def federation(
    scenario: fq.Scenario, method: fq.Method | None = None, engine: str = "sequential", **how: Any
) -> Federation:
    return Federation(scenario, method or fq.methods.FedAvg(), scenario.training.but(how), engine=engine)


def value(of: Federation) -> Tensor:
    """The server's only value: weight (4), then bias (2)."""
    return torch.cat([values.value[0] for values in of.server.all_values]).clone()


def trained(number: int, start: Tensor) -> Tensor:
    """A client's step of SGD on all of its samples at once, without the library."""
    model = nn.Linear(2, 2)
    nn.utils.vector_to_parameters(start, model.parameters())
    x, y = samples(number)
    nn.functional.cross_entropy(model(x), y).backward()
    return torch.cat([(p - LR * p.grad).detach().flatten() for p in model.parameters() if p.grad is not None])


def test_seconds_are_receiving_training_and_sending() -> None:
    # 24 bytes each way at 24, 48 and 96 bytes a second, and 3 epochs of 4, 6 and 8 samples
    scenario = clients(speed=(6, 9, 2), bandwidth=("0.000024", "0.000048", "0.000096"))
    made = federation(scenario, epochs=3)
    assert made.clock is not None
    assert made.clock.seconds(made.server, [0, 1, 2]).tolist() == pytest.approx([2 + 2, 2 + 1, 12 + 0.5])
    assert [made.step().clock for _ in range(2)] == [12.5, 25.0]
    only = federation(clients(speed=(1, 3, 16)))
    assert only.clock is not None
    assert only.clock.seconds(only.server, [2, 1]).tolist() == [0.5, 2.0]


def test_who_is_late_is_left_out_and_stays_as_it_was() -> None:
    made = federation(clients(speed=(1, 1, 1)), deadline=6.5)
    start, before = value(made), made.simulation.family_states[0].store.take([2]).clone()
    report = made.step()
    assert (report.clock, report.participants, report.late) == (6.5, (0, 1), (2,))
    torch.testing.assert_close(value(made), (4 * trained(0, start) + 6 * trained(1, start)) / 10)
    assert report.traffic.bytes_up.tolist() == [24, 24, 0]
    assert report.traffic.bytes_down.tolist() == [24, 24, 24]  # what came too late had been received
    assert torch.equal(made.simulation.family_states[0].store.take([2]), before)
    assert made.step().clock == 13.0
    assert made.clock is not None
    assert made.clock.late == 2


def test_where_nobody_is_in_time_the_first_is_waited_for() -> None:
    made = federation(clients(speed=(1, 2, 4)), deadline=1)
    report = made.step()
    assert (report.clock, report.participants, report.late) == (2.0, (2,), (0, 1))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_stale_answers_are_moves_that_count_less(engine: str) -> None:
    # rounds of 2, 3 and 7 seconds; every round closes with the first that arrives, and whoever came with it
    made = federation(clients(speed=(4 / 2, 6 / 3, 8 / 7)), engine=engine, arrivals=1, staleness=0.5)
    v = [value(made)]
    told = []
    for _ in range(5):
        report = made.step()
        told.append((report.clock, report.participants))
        v.append(value(made))
    assert told == [(2.0, (0,)), (3.0, (1,)), (4.0, (0,)), (6.0, (0, 1)), (7.0, (2,))]
    once = 2**-0.5
    torch.testing.assert_close(v[1], trained(0, v[0]))
    torch.testing.assert_close(v[2], v[1] + once * (trained(1, v[0]) - v[0]))
    torch.testing.assert_close(v[3], v[2] + once * (trained(0, v[1]) - v[1]))
    late = v[3] + once * (trained(1, v[2]) - v[2])  # it had begun with round 3
    torch.testing.assert_close(v[4], (4 * trained(0, v[3]) + 6 * late) / 10)
    torch.testing.assert_close(v[5], v[4] + 5**-0.5 * (trained(2, v[0]) - v[0]))


def test_a_deadline_closes_a_round_and_drops_nobody_where_answers_may_be_late() -> None:
    made = federation(clients(speed=(4 / 2, 6 / 3, 8 / 7)), arrivals=3, deadline=4)
    assert [(r.clock, r.participants) for r in (made.step() for _ in range(3))] == [
        (4.0, (0, 1)), (7.0, (0, 1, 2)), (11.0, (0, 1)),
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedprox", "fedrep"])
@pytest.mark.parametrize("share", [1.0, 0.67])
def test_with_equal_times_it_is_the_same_as_waiting_for_all(method: str, share: float) -> None:
    like = clients(deep, speed=[count / 3 for count in COUNTS])
    more: dict[str, Any] = {"settings": {"mu": 0.1} if method == "fedprox" else None, "alone": False}
    wait, go = (
        fq.run(like, method, 4, training={"share": share, "arrivals": arrivals}, engine="sequential", **more)
        for arrivals in (0, 1)
    )
    assert go.rows == wait.rows
    assert go.bytes_up == wait.bytes_up
    assert go.summary["virtual_seconds"] == wait.summary["virtual_seconds"]
    assert go.summary["virtual_seconds"] == (11 if method == "fedrep" else 1) * 12.0  # ten epochs of the head before
    for i in range(3):
        ours, theirs = go.model(f"c{i}").state_dict(), wait.model(f"c{i}").state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_clocks_cost_nothing_and_change_nothing_where_all_are_waited_for() -> None:
    plain, timed = (fq.run(s, "fedavg", 2, alone=False) for s in (clients(), clients(speed=(1, 2, 3))))
    assert plain.rows == timed.rows
    assert "virtual_seconds" not in plain.summary
    assert plain.federation.clock is None
    assert clients(speed=("fast", "slow", "slow")).clients[0].traits == {"speed": "fast"}
    assert federation(clients(speed=("fast", "slow", "slow"))).clock is None  # a trait like others


@pytest.mark.parametrize("training", [{"arrivals": 1}, {"deadline": 3.5}])
def test_a_run_that_is_interrupted_goes_on_with_who_is_at_work(training: dict[str, Any], tmp_path: Path) -> None:
    def run(folder: str, stop: int = 0) -> None:
        def end(federation: Federation, report: Any) -> None:
            if report.round == stop:
                raise KeyboardInterrupt

        fq.run(clients(deep, speed=(2, 2, 1)), "fedper", 6, training=training, alone=False, out=tmp_path / folder,
               checkpoint_every=1, engine="sequential", callbacks=[end])  # fmt: skip

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("cut", stop=3)
    fq.resume(tmp_path / "cut", clients(deep, speed=(2, 2, 1)))
    for name in ("metrics.jsonl", "traffic.jsonl"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_who_trains_alone_is_never_late() -> None:
    run = fq.run(clients(speed=(1, 2, 100)), "fedavg", 2, training={"deadline": 3.0})
    assert run.alone is not None
    assert run.summary["late_updates"] == 2
    assert run.alone.summary["late_updates"] == 0


@pytest.mark.parametrize(
    ("method", "traits", "training", "told"),
    [
        ("fedavg", {}, {"deadline": 3}, "deadline is in virtual seconds; have every client declare"),
        ("fedavg", {"speed": (1, 2, "slow")}, {"arrivals": 1}, "arrivals is in virtual seconds"),
        ("fedavg", {"speed": (1, 2, 3)}, {"arrivals": 4}, "arrivals=4, but 3 clients are at work at once"),
        ("scaffold", {"speed": (1, 2, 3)}, {"arrivals": 1}, "the server of the method 'scaffold' keeps step"),
        ("ifca", {"speed": (1, 2, 3)}, {"arrivals": 1}, "the server of the method 'ifca' keeps step"),
        ("fedavg", {"speed": (1, 2, 3)}, {"deadline": -1}, "deadline=-1 must be a number from 0 up"),
    ],
)
def test_refused_before_work(method: str, traits: dict[str, Any], training: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fq.run(clients(**traits), method, 1, training=training)


def test_the_page_has_virtual_time(tmp_path: Path) -> None:
    for name, made in (("timed", clients(speed=(4 / 2, 6 / 3, 8 / 7))), ("plain", clients())):
        fq.run(made, "fedavg", 2, alone=False, out=tmp_path / name)
    (timed,), (plain,) = (page_data([tmp_path / n])["scenarios"][0]["views"][0]["methods"] for n in ("timed", "plain"))
    assert (timed["clock"], plain["clock"]) == ([7.0, 14.0], None)


def test_hardware_that_is_drawn_is_in_its_range() -> None:
    made = with_hardware(clients(), speed=(2, 50), bandwidth=(3, 3), seed=4)
    drawn = [float(client.traits["speed"]) for client in made.clients]
    assert len(set(drawn)) == 3
    assert all(2 <= speed <= 50 for speed in drawn)
    assert {client.traits["bandwidth"] for client in made.clients} == {"3"}
    with pytest.raises(ValueError, match="is no range"):
        with_hardware(clients(), speed=(5, 2))
