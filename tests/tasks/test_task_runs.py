"""Runs of every task: a round by hand, engines that agree, methods and read-outs that make sense with them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from task_help import MADE, federation
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core.federation import Federation
from fedquilt.methods import METHODS
from fedquilt.runs.rebuilding import make_readouts
from fedquilt.tasks import Metric, Regression
from fedquilt.testing import check_method

NEEDS_CLASSES = {"feddf", "feddl", "fedmn", "fedpac", "fedproto", "fedrod", "fml", "score-sharing"}
KINDS = tuple(MADE)


def test_a_round_of_fedavg_on_a_line_by_hand() -> None:
    """Two clients, one weight, one step on all samples: w <- w - lr d/dw mean (w x - y)^2, weighted by samples."""

    def line() -> nn.Module:
        net = nn.Linear(1, 1, bias=False)
        nn.init.constant_(net.weight, 0.5)
        return net

    one = fq.Client("one", line, ([[1.0], [2.0]], [2.0, 4.5]), test=([[3.0]], [6.0]))
    two = fq.Client("two", line, ([[1.0]], [-1.5]), test=([[2.0]], [-3.0]))
    scenario = fq.Scenario("line", [one, two], fq.Training(lr=0.1, batch=2, rounds=1))
    assert scenario.task == Regression()
    run = fq.run(scenario, "fedavg", engine="sequential", alone=False)
    # gradients: mean of 2 (0.5 - 2) 1 and 2 (1 - 4.5) 2 is -8.5; 2 (0.5 + 1.5) 1 is 4
    own = [0.5 + 0.85, 0.5 - 0.4]
    merged = (2 * own[0] + 1 * own[1]) / 3
    rows = {(row["client"], row["readout"]): row for row in run.rows if row["split"] == "test"}
    assert rows["one", "adapted"]["rmse"] == pytest.approx(abs(3 * own[0] - 6), rel=1e-6)
    assert rows["two", "received"]["rmse"] == pytest.approx(abs(2 * merged + 3), rel=1e-6)
    assert rows["two", "received"]["loss"] == pytest.approx((2 * merged + 3) ** 2, rel=1e-6)
    assert run.summary["rmse_mean"] == pytest.approx((abs(3 * merged - 6) + abs(2 * merged + 3)) / 2, rel=1e-6)
    assert run.predict("one", [[10.0]]).item() == pytest.approx(10 * merged, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree(kind: str) -> None:
    found = {
        engine: fq.run(federation(kind), "fedprox", engine=engine, alone=False).rows
        for engine in ("sequential", "vectorised", "parallel")
    }
    for engine in ("vectorised", "parallel"):
        for one, other in zip(found["sequential"], found[engine], strict=True):
            assert list(one) == list(other)
            for key, value in one.items():
                number = isinstance(value, float | list)
                same = pytest.approx(value, rel=1e-4, abs=1e-5) if number else value
                assert other[key] == same, (engine, key)


@pytest.mark.parametrize("kind", KINDS)
def test_something_is_learnt_and_sharing_with_ones_like_helps(kind: str) -> None:
    run = fq.run(federation(kind), "ifca", rounds=25, settings={"clusters": 2}, engine="vectorised", alone=False)
    task = run.federation.scenario.task
    assert task.metric.gain(run.summary[f"{task.lead}_mean"], run.chance[0]) > 0
    assert run.trouble is None
    first, last = (next(e.score for e in of if e.split == "test") for of in (run.evaluations, run.evaluations[-4:]))
    assert task.metric.gain(last, first) > 0


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NEEDS_CLASSES])
def test_methods_that_go_by_losses_take_numbers(method: str) -> None:
    run = fq.run(federation("regression"), method, rounds=3, engine="vectorised", alone=False)
    assert math.isfinite(run.summary["rmse_mean"])
    assert len(run.last_rows(run.readout)) == 4


def test_those_that_need_classes_are_known() -> None:
    assert {name for name, method in METHODS.items() if method.needs_classes} == NEEDS_CLASSES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("readout", ["vote", "averaged", "fine-tuned-chosen", "fine-tuned-2", "knn"])
def test_readouts_of_every_task(kind: str, readout: str) -> None:
    if (kind, readout) == ("tokens", "knn"):
        with pytest.raises(ValueError, match="the nearest samples, which say nothing about tokens"):
            fq.run(federation(kind), "fedavg", readouts=readout, alone=False)
        return
    run = fq.run(federation(kind), "fedavg", readouts=("received", "adapted", readout), alone=False)
    task = run.federation.scenario.task
    scores = {e.readout: e.score for e in run.evaluations if e.split == "validation" and e.round == 3}
    plain = [scores["received"], scores["adapted"]]
    if readout != "averaged":  # what is chosen on validation samples is not worse on them than the worse of both
        worse = min(plain) if task.metric.higher else max(plain)
        assert task.metric.gain(scores[make_readouts(readout)[0].name], worse) >= 0


def test_a_vote_about_numbers_is_a_mean_of_them() -> None:
    federated = Federation(federation("regression"), fq.methods.FedAvg(), engine="sequential")
    for _ in range(3):
        federated.step(evaluate=False)
    from fedquilt.core.evaluation import look_at
    from fedquilt.readouts import Vote

    look = look_at(federated.simulation, federated.server.instructions([0, 1, 2, 3]), last=True)
    vote = Vote()
    pi, said = vote.weights(look), vote.experts(look, "test")
    assert torch.allclose(pi.sum(1), torch.ones(4, dtype=pi.dtype))
    expected: Tensor = sum(pi[:, at, None, None] * each for at, each in enumerate(said.values()))  # type: ignore[assignment]
    assert torch.allclose(vote.predictions(look, "test"), expected)


def test_losses_and_metrics_of_ones_own() -> None:
    def pinball(outputs: Tensor, y: Tensor) -> Tensor:
        off = y - outputs
        return torch.maximum(0.9 * off, -0.1 * off).mean(1)

    covered = Metric("covered", function=lambda outputs, y: (outputs >= y).float().mean(1), percent=True)
    task = Regression(loss=pinball, metrics=(covered,), lead="covered")
    runs = [fq.run(federation("regression", task=task), "fedavg", rounds=20, engine=e, alone=False)
            for e in ("sequential", "vectorised")]  # fmt: skip
    scores = [run.summary["covered_mean"] for run in runs]
    assert scores[0] == pytest.approx(scores[1], abs=0.02)
    assert scores[0] > 0.7  # nine tenths are asked for
    client = runs[0].federation.scenario.clients[0]
    said = runs[0].predict("c0", client.test.x)
    row = next(row for row in runs[0].last_rows("received") if row["client"] == "c0")
    assert row["covered"] == pytest.approx(float((said >= client.test.y).float().mean()))
    assert row["loss"] == pytest.approx(float(pinball(said, client.test.y).mean()), rel=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_methods_pass_their_checks_with_numbers(method: str) -> None:
    checks = check_method(METHODS[method](), task="regression")
    assert {"engines", "resume", "newcomer", "network"} <= set(checks)


def test_a_run_goes_to_disk_and_back_and_names_its_metric(tmp_path: Path) -> None:
    from fedquilt.report.page_content import page_data
    from fedquilt.report.read_runs import read_run

    scenario = federation("regression")
    run = fq.run(scenario, "fedavg", out=tmp_path / "run", engine="sequential")
    assert "rmse" in str(run)
    assert "lower is better" in str(run)
    kept = read_run(tmp_path / "run")
    assert (kept.metric.name, kept.metric.higher) == ("rmse", False)
    assert kept.series["received", "test"].score[-1].tolist() == [row["rmse"] for row in run.last_rows("received")]
    page = page_data([tmp_path / "run"])["scenarios"][0]
    assert page["metric"]["name"] == "rmse"
    headings = page["views"][0]["table"]["headings"]
    assert headings[1] == "rmse"
    assert not any("accuracy" in str(heading) for heading in headings)
    alone = {row["client"]: row["rmse"] for row in run.alone.last_rows("received")} if run.alone else {}
    gains = [alone[row["client"]] - row["rmse"] for row in run.last_rows("received")]
    assert run.summary["gain_over_alone"] == pytest.approx(sum(gains) / len(gains))
    with pytest.raises(ValueError, match="the data of scenario 'regression' are not those"):
        fq.onboard(tmp_path / "run", scenario.clients[0], scenario=federation("regression", task=Regression("huber")))


def test_a_model_that_ends_in_a_softmax_is_told_of() -> None:
    def ended(*last: nn.Module) -> list[fq.Client]:
        return [fq.Client("a", lambda: nn.Sequential(nn.Linear(1, 2), *last), ([[0.0], [1.0]], [0, 1]))]

    with pytest.warns(UserWarning, match="are probabilities, and cross-entropy takes scores: leave out the softmax"):
        fq.run(fq.Scenario("s", ended(nn.Softmax(1))), "local", rounds=1, engine="sequential", alone=False)
    fq.run(fq.Scenario("s", ended(nn.ReLU())), "local", rounds=1, engine="sequential", alone=False)
