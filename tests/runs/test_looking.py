"""Looking at a run: in words, as a data frame, as curves, in a notebook; predictions; and whether it learnt."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.attacks import SignFlip
from fedquilt.engines.settings import Training
from fedquilt.results import Row
from fedquilt.runs.diagnosis import trouble

CLASSES = 3


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def scenario(lr: float, shuffled: bool = False, clients: int = 4) -> fq.Scenario:
    """Three classes that a line tells apart, or, where labels are shuffled, that nothing does."""
    draw = np.random.default_rng(0)
    made = []
    for number in range(clients):
        y = np.arange(120) % CLASSES
        x = 3 * np.eye(CLASSES)[y] + 0.3 * draw.normal(size=(120, CLASSES))
        y = draw.permutation(y) if shuffled else y
        made.append(fq.Client(f"c{number}", net, (x[:60], y[:60]), (x[60:75], y[60:75]), (x[75:], y[75:])))
    return fq.Scenario("three", made, fq.Training(rounds=8, batch=10, lr=lr))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> fq.Run:
    return fq.run(scenario(0.5), "fedavg", engine="sequential", out=tmp_path_factory.mktemp("runs") / "learnt")


def test_a_federation_that_learns_has_no_trouble(learnt: fq.Run) -> None:
    assert learnt.summary["accuracy_mean"] > 0.9
    assert learnt.trouble is None
    assert "trouble" not in learnt.summary


def test_a_rate_that_is_too_low_is_named() -> None:
    run = fq.run(scenario(1e-6), "fedavg", engine="sequential", alone=False)
    assert run.trouble is not None
    assert "Nothing was learnt" in run.trouble
    assert "lr=1e-06 is too low" in run.trouble
    assert run.summary["trouble"] == run.trouble
    assert run.trouble in str(run)


def test_labels_that_samples_do_not_tell_are_chance() -> None:
    run = fq.run(scenario(0.5, shuffled=True), "fedavg", engine="sequential", alone=False)
    assert "not clearly more than always naming the commonest class" in str(run.trouble)


def test_a_cause_among_the_samples_is_named() -> None:
    x, y = np.random.default_rng(0).normal(size=(120, 2)), np.arange(120) % 2
    training = fq.Training(rounds=2, batch=10, lr=0.1)

    def told(samples: Any, labels: Any) -> str:
        made = fq.scenario_from((samples, labels), clients=3, partition="iid", training=training)
        return str(fq.run(made, "fedavg", engine="sequential", alone=False).trouble)

    assert "Likely cause: all training samples have the same label." in told(x, np.zeros(120, dtype=int))
    assert re.search(r"samples hold numbers of about \S+e\+05, and a network begins best where", told(1e6 * x, y))
    assert "Likely cause: losses" in told(x, y)


def test_clients_that_pull_apart_are_told_from_a_rate_that_is_wrong() -> None:
    draw = np.random.default_rng(0)
    clients = []
    for number in range(4):  # half of them mean the opposite by their labels
        x = draw.normal(size=(120, 2)).astype(np.float32)
        y = (x[:, 0] > 0).astype(int)
        y = 1 - y if number % 2 else y
        clients.append(fq.Client(f"c{number}", lambda: nn.Linear(2, 2), (x[:60], y[:60]), test=(x[60:], y[60:])))
    made = fq.Scenario("opposed", clients, fq.Training(rounds=8, batch=10, lr=0.5))
    told = str(fq.run(made, "fedavg", engine="sequential").trouble)
    assert re.search(r"clients pull apart, for alone they have 9\d\.\d %: let more of each model stay at home", told)
    assert fq.run(made, "local", engine="sequential").trouble is None


def test_the_bar_is_one_class_for_all() -> None:
    """Two clients of one class each: naming each its own is personal, one class for both is right half of the time."""
    data = [(np.eye(2)[[c] * 40], [c] * 40) for c in range(2)]
    clients = [fq.Client(f"c{c}", lambda: nn.Linear(2, 2), train=data[c], test=data[c]) for c in range(2)]
    made = fq.Scenario("one class each", clients, fq.Training(rounds=5, batch=10, lr=0.5))
    run = fq.run(made, "local", engine="sequential")
    assert run.summary["accuracy_mean"] == 1.0
    assert run.trouble is None


def row(accuracy: float, round_: int, loss: float | None) -> Row:
    return {"accuracy": accuracy, "samples": 400, "round": round_, "training_loss": loss}


@pytest.mark.parametrize(
    ("first", "last", "refused", "told"),
    [
        (row(0.3, 1, 1.0), row(0.34, 9, 4.0), 0, "losses of training rose, so lr=0.1 is too high; try lr=0.01"),
        (row(0.3, 1, 1.0), row(0.34, 9, None), 3, "refused, so lr=0.1 is too high"),
        (row(0.3, 1, 1.0), row(0.34, 9, 0.95), 0, "barely fell, so lr=0.1 is too low"),
        (row(0.3, 1, 1.0), row(0.34, 9, 0.1), 0, "fit their training samples but not their test samples"),
        (row(0.3, 1, 1.0), row(0.34, 9, 0.7), 0, "still fall: 9 rounds are too few"),
        (row(0.9, 1, 1.0), row(0.7, 9, 4.0), 0, "It got worse: 70.0 % after round 9, 90.0 % after round 1"),
        (row(0.3, 1, None), row(0.34, 9, None), 0, "the learning rate lr=0.1"),
    ],
)
def test_the_cause_follows_the_losses(first: Row, last: Row, refused: int, told: str) -> None:
    assert told in str(trouble([first], [last], (1 / 3, 0.0236), Training(lr=0.1), refused))


@pytest.mark.parametrize(
    "training", [Training(lr=0.9), Training(lr=0.1, momentum=0.9), Training(lr=0.03, optimiser="adam")]
)
def test_a_rate_that_is_not_low_is_not_too_low(training: Training) -> None:
    told = trouble([row(0.3, 1, 2.31)], [row(0.33, 9, 2.30)], (1 / 3, 0.0236), training, 0)
    assert told is not None
    assert f"lr={training.lr} is too high; try lr={training.lr / 10:g}" in told


def test_chance_ends_two_standard_errors_above_it() -> None:
    error = (0.25 / 400) ** 0.5  # of 400 answers that are right half of the time
    assert trouble([], [row(0.5 + 1.9 * error, 9, None)], (0.5, error), Training(), 0) is not None
    assert trouble([], [row(0.5 + 2.1 * error, 9, None)], (0.5, error), Training(), 0) is None


def test_it_prints_itself_in_a_few_lines(learnt: fq.Run) -> None:
    lines = str(learnt).splitlines()
    assert lines[0] == "fedavg on three, seed 0: 4 clients, 8 rounds"
    assert len(lines) == 4
    assert re.search(r"gain over alone [+-]\d", lines[2])
    assert repr(learnt) == str(learnt)


def test_predictions_are_those_that_were_measured(learnt: fq.Run) -> None:
    for client in learnt.federation.scenario.clients:
        right = (learnt.predict(client.name, client.test.x.numpy()) == client.test.y).double().mean()
        assert float(right) == learnt.last_rows("received")[int(client.name[1:])]["accuracy"]


@pytest.mark.parametrize("method", ["apfl", "fedrod", "fedem", "fedavg-plus", "ditto"])
def test_predictions_are_the_methods(method: str) -> None:
    """Methods that predict with more than one module, or by a read-out of their own."""
    run = fq.run(scenario(0.02), method, rounds=2, engine="sequential", alone=False)
    rows = {r["client"]: r["accuracy"] for r in run.last_rows(run.readout)}
    for client in run.federation.scenario.clients:
        right = (run.predict(client.name, client.test.x) == client.test.y).double().mean()
        assert float(right) == pytest.approx(rows[client.name], abs=1e-12)


def test_predict_refuses_what_does_not_fit(learnt: fq.Run) -> None:
    with pytest.raises(KeyError, match="there is no client 'nobody'"):
        learnt.predict("nobody", [[0.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match=r"samples for client 'c0' are float32 of shape \(2,\)"):
        learnt.predict("c0", [[0.0, 0.0]])
    run = fq.run(scenario(0.5), "fedavg", rounds=2, readouts="best-of-last-2", engine="sequential", alone=False)
    with pytest.raises(ValueError, match="of others it cannot say it"):
        run.predict("c0", [[0.0, 0.0, 0.0]])


def test_a_saved_model_is_the_clients(learnt: fq.Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = learnt.save_model("c1", tmp_path / "kept" / "c1.safetensors")
    model = net()
    model.load_state_dict(load_file(path))
    x = torch.eye(CLASSES)
    assert torch.equal(model(x), learnt.model("c1")(x))


def test_curves_have_accuracy_and_loss(learnt: fq.Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = learnt.plot(tmp_path / "curves.png")
    accuracy, loss = figure.axes
    assert len(accuracy.lines) == 4  # two read-outs, two splits
    assert len(loss.lines) == 4
    last = learnt.last_rows("received")
    line = next(each for each in accuracy.lines if each.get_label() == "received, test")
    assert np.asarray(line.get_ydata())[-1] == pytest.approx(100 * sum(r["accuracy"] for r in last) / len(last))
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_notebook_gets_words_and_a_quilt(learnt: fq.Run) -> None:
    html = learnt._repr_html_()
    assert "fedavg on three" in html
    assert "c3" in html
    assert "background-color" in html


def test_the_page_needs_a_folder(learnt: fq.Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    assert learnt.report(tmp_path / "page.html").stat().st_size > 1_000_000
    with pytest.raises(ValueError, match=r"give fedquilt\.run a folder"):
        fq.run(scenario(0.5), "local", rounds=1, engine="sequential").report()


def test_a_data_frame_has_a_row_a_row(learnt: fq.Run) -> None:
    pandas = pytest.importorskip("pandas")
    frame = learnt.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(learnt.rows)


def test_without_pandas_it_says_so(learnt: fq.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        learnt.to_pandas()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"privacy": fq.Privacy(noise=200.0, smallest=2)}, "Likely cause: the noise of privacy (dp); more clients"),
        ({"attack": SignFlip(liars=0.6)}, "Likely cause: the clients that lie (sign-flip"),
    ],
    ids=["noise", "liars"],
)
def test_what_was_asked_for_is_the_cause_before_the_learning_rate(asked: dict[str, Any], told: str) -> None:
    run = fq.run(fq.scenarios.build("digits", clients=8), "fedavg", 3, alone=False, engine="sequential", **asked)
    assert told in run.summary["trouble"]
