"""Every client's model on everyone's test samples: as by hand, only what it takes, and nothing else changes."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from core_help import same_rows
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core import everyone
from fedquilt.methods import FedAvg

QUICK: dict[str, Any] = {"engine": "sequential", "alone": False}


def samples(n: int, wide: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, wide, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % classes


def client(name: str, seed: int, wide: int = 4, classes: int = 3, outputs: int = 3, tests: int = 10) -> fq.Client:
    """A client that shows some classes, with a model that could name so many."""
    make = partial(nn.Linear, wide, outputs)
    train, validation = samples(12, wide, classes, seed), samples(6, wide, classes, seed + 1)
    return fq.Client(name, make, train, validation, samples(tests, wide, classes, seed + 2))


def like() -> fq.Scenario:
    made = [client(f"c{i}", 10 * i, tests=5 + 3 * i) for i in range(3)]
    return fq.Scenario("like", made, fq.Training(rounds=3, batch=4, lr=0.1))


def on_everyone(run: fq.Run) -> list[dict[str, Any]]:
    return [row for row in run.rows if row["split"] == "everyone"]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", ["local", "ditto", "fedavg"])
def test_every_model_on_all_samples_as_by_hand(engine: str, method: str) -> None:
    scenario = like()
    run = fq.run(scenario, method, engine=engine, alone=False, everyone=True, readouts=("received",))
    x, y = (torch.cat([getattr(c.test, part) for c in scenario.clients]) for part in ("x", "y"))
    rows = on_everyone(run)
    assert [row["client"] for row in rows] == ["c0", "c1", "c2"]
    for row in rows:
        assert row["round"] == 3
        with torch.no_grad():
            scores = run.model(row["client"])(x)
        assert row["accuracy"] == pytest.approx(float((scores.argmax(1) == y).double().mean()))
        assert row["loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, y)), rel=1e-4)
        assert (row["samples"], row["left_out"]) == (24, 0)
    told = run.summary
    assert told["everyone_mean"] == pytest.approx(sum(row["accuracy"] for row in rows) / 3)
    assert "on everyone's test data" in str(run)


def test_what_a_model_cannot_take_is_left_out_and_counted() -> None:
    """Samples of another shape, and labels that it has no output for; labels it could name count, owned or not."""
    made = [
        client("narrow", 0, classes=2, outputs=2, tests=10),
        client("wide", 10, classes=4, outputs=4, tests=8),  # labels 0, 1, 2, 3, twice
        client("other", 20, wide=6, classes=3, outputs=4, tests=6),
    ]
    scenario = fq.Scenario("unlike", made, fq.Training(rounds=1, batch=4, lr=0.1))
    run = fq.run(scenario, "local", **QUICK, everyone=True, readouts=("received",))
    found = {row["client"]: (row["samples"], row["left_out"]) for row in on_everyone(run)}
    assert found == {"narrow": (14, 10), "wide": (18, 6), "other": (6, 18)}
    assert run.summary["everyone_left_out"] == pytest.approx(34 / 3)
    x = torch.cat([made[0].test.x, made[1].test.x])
    y = torch.cat([made[0].test.y, made[1].test.y])
    right = float((run.model("wide")(x).argmax(1) == y).double().mean())
    assert next(row for row in on_everyone(run) if row["client"] == "wide")["accuracy"] == pytest.approx(right)


def test_nothing_else_changes_and_it_is_looked_at_once() -> None:
    """Read-outs that ask models of earlier rounds have nothing to say of samples that these did not see."""
    how: dict[str, Any] = {**QUICK, "readouts": ("received", "adapted", "best-of-last-2", "fine-tuned-2", "vote")}
    plain, wide = fq.run(like(), "fedavg", **how), fq.run(like(), "fedavg", **how, everyone=True)
    same_rows(plain.rows, [row for row in wide.rows if row["split"] != "everyone"])
    assert {row["round"] for row in on_everyone(wide)} == {3}
    assert {row["readout"] for row in on_everyone(wide)} == {"received", "adapted", "fine-tuned-2", "vote"}
    assert not on_everyone(plain)
    assert "everyone_mean" not in plain.summary


def test_of_many_samples_the_same_are_drawn_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everyone, "_FEW", 7)
    monkeypatch.setattr(everyone, "_MANY", 7)
    scenario = like()
    run = fq.run(scenario, "fedavg", **QUICK, everyone=True, readouts=("received",))
    rows = on_everyone(run)
    assert [row["samples"] + row["left_out"] for row in rows] == [7, 7, 7]
    assert len({row["accuracy"] for row in rows}) == 1  # one model, the same samples
    places = everyone.Everyone(run.federation.simulation.clients, run.federation.terms).chosen
    assert sum(len(mine) for mine in places) == 7
    assert all(bool((mine < len(c.test)).all()) for mine, c in zip(places, scenario.clients, strict=True))


def test_models_that_look_at_the_batch_and_clients_without_tests() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))

    made = [fq.Client(f"c{i}", normed, samples(12, 4, 3, i), None, samples(6, 4, 3, 9 + i)) for i in range(2)]
    made.append(fq.Client("c2", normed, samples(12, 4, 3, 5)))
    run = fq.run(fq.Scenario("n", made, fq.Training(rounds=1, batch=4)), "fedavg", **QUICK, everyone=True)
    assert [row["samples"] for row in on_everyone(run) if row["readout"] == "received"] == [12, 12, 12]


def test_numbers_have_everyone_too() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    made = [fq.Client(f"c{i}", partial(nn.Linear, 3, 1), (x, x.sum(1) + 0.5), None, (x, x[:, i] + 0.5)) for i in (0, 1)]
    run = fq.run(fq.Scenario("r", made, fq.Training(rounds=1)), "fedavg", **QUICK, everyone=True)
    y = torch.cat([x[:, 0], x[:, 1]]) + 0.5
    with torch.no_grad():
        wrong = run.model("c0")(torch.cat([x, x]))[:, 0] - y
    (row,) = (r for r in on_everyone(run) if (r["client"], r["readout"]) == ("c0", "received"))
    assert row["rmse"] == pytest.approx(float((wrong**2).mean() ** 0.5), rel=1e-4)
    assert row["samples"] == 40


def test_tokens_have_everyone_too() -> None:
    def spells() -> nn.Module:
        return nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 6))

    x = torch.arange(24).view(6, 4) % 3
    targets = {"a": x, "b": x + 3}
    made = [fq.Client(name, spells, (x, y), None, (x, y)) for name, y in targets.items()]
    scenario = fq.Scenario("t", made, fq.Training(rounds=2, batch=3, lr=0.5), task="tokens")
    run = fq.run(scenario, "local", **QUICK, everyone=True, readouts=("received",))
    for row in on_everyone(run):
        said = run.model(row["client"])(torch.cat([x, x])).argmax(2)
        right = float((said == torch.cat(list(targets.values()))).double().mean())
        assert (row["accuracy"], row["left_out"]) == (pytest.approx(right), 0)


def test_a_run_on_disk_goes_on_with_it(tmp_path: Path) -> None:
    def stop(federation: fq.Federation, report: object) -> None:
        if federation.round == 2:
            raise RuntimeError("stopped")

    how: dict[str, Any] = {**QUICK, "everyone": True, "checkpoint_every": 1}
    whole = fq.run(like(), "fedavg", **how, out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stopped"):
        fq.run(like(), "fedavg", **how, out=tmp_path / "cut", callbacks=[stop])
    rest = fq.resume(tmp_path / "cut", like())
    assert tomllib.loads((tmp_path / "cut/run.toml").read_text())["everyone"] is True
    assert rest.summary["everyone_mean"] == whole.summary["everyone_mean"]
    files = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert files[0] == files[1]


def test_clients_on_devices_show_their_samples_to_nobody() -> None:
    scenario = like()
    there = fq.Federation(scenario, FedAvg(), engine="sequential").backend
    with pytest.raises(ValueError, match="show their test samples to nobody"):
        fq.Federation(scenario, FedAvg(), clients=there, everyone=True)
