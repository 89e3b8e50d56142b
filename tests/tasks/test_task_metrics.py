"""What tasks measure, against scikit-learn; counts add up over batches and clients; what is refused."""

from __future__ import annotations

import math
import re
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.tasks import IGNORED, Classification, Forecasting, Metric, MultiLabel, Regression, Task, Tokens, task_from
from fedquilt.tasks.task import Task as Base

DRAW = torch.Generator().manual_seed(3)
K, N = 3, 12
MASK = torch.ones(K, N)
MASK[0, 7:] = 0
MASK[2, 1:] = 0


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """What a test draws does not depend on which tests ran before it in the same process."""
    DRAW.manual_seed(3)


def mine(client: int) -> slice:
    return slice(0, int(MASK[client].sum()))


def measures(task: Task, predicted: Tensor, y: Tensor, width: int) -> dict[str, Tensor]:
    counts = task.counts(predicted, y, MASK, width)
    assert task.samples(counts).tolist() == MASK.sum(1).tolist()
    return task.measures(counts)


def test_errors_are_scikit_learns() -> None:
    y, said = torch.randn(K, N, 2, generator=DRAW) + 2000, torch.randn(K, N, 2, generator=DRAW) + 2000
    found = measures(Regression(), said, y, 2)
    for i in range(K):
        truth, answer = y[i, mine(i)].double().numpy(), said[i, mine(i)].double().numpy()
        assert found["rmse"][i] == pytest.approx(metrics.root_mean_squared_error(truth, answer), rel=1e-9)
        assert found["mae"][i] == pytest.approx(metrics.mean_absolute_error(truth, answer), rel=1e-9)
        if len(truth) > 1:
            assert found["r2"][i] == pytest.approx(metrics.r2_score(truth, answer), rel=1e-6)
    assert math.isnan(found["r2"][2])  # one sample: scikit-learn warns and says NaN


@pytest.mark.parametrize(("off", "r2"), [(0.0, 1.0), (1.0, 0.0)])
def test_r2_of_targets_that_are_all_alike(off: float, r2: float) -> None:
    y = torch.full((1, 5, 1), 3.3)
    task = Regression()
    assert task.measures(task.counts(y + off, y, torch.ones(1, 5), 1))["r2"].item() == r2
    assert metrics.r2_score(y[0].numpy(), (y[0] + off).numpy()) == r2


def test_labels_are_scored_as_by_scikit_learn() -> None:
    y, logits = torch.rand(K, N, 4, generator=DRAW) > 0.6, torch.randn(K, N, 4, generator=DRAW)
    y[..., 3] = False  # a label that nobody has
    y[2] = False  # a client that has none
    task = MultiLabel()
    found = measures(task, task.predictions(logits), y.float(), 4)
    for i in range(K):
        truth, answer = y[i, mine(i)].numpy().astype(int), (logits[i, mine(i)] > 0).numpy().astype(int)
        shown = truth.any(0)
        expected = {
            "f1": metrics.f1_score(truth, answer, average="micro", zero_division=0),
            "exact": metrics.accuracy_score(truth, answer),
            "hamming": metrics.hamming_loss(truth, answer),
        }
        if shown.any():
            expected["f1_macro"] = metrics.f1_score(truth, answer, average=None, zero_division=0)[shown].mean()
        for name, value in expected.items():
            assert found[name][i] == pytest.approx(value), name
    assert math.isnan(found["f1_macro"][2])


def test_tokens_are_scored_at_the_places_that_count() -> None:
    y = torch.randint(0, 5, (K, N, 3), generator=DRAW)
    y[torch.rand(K, N, 3, generator=DRAW) < 0.3] = IGNORED
    y[2, 0] = torch.tensor([1, IGNORED, 2])
    task, logits = Tokens(), torch.randn(K, N, 3, 5, generator=DRAW)
    counts = task.counts(task.predictions(logits), y, MASK, 5)
    losses = task.mean_losses(task.answers(logits), y, MASK)
    for i in range(K):
        truth, scores = y[i, mine(i)].flatten(), logits[i, mine(i)].flatten(0, 1)
        there = truth != IGNORED
        right = metrics.accuracy_score(truth[there].numpy(), scores.argmax(1)[there].numpy())
        lost = metrics.log_loss(truth[there].numpy(), scores[there].double().softmax(1).numpy(), labels=range(5))
        assert task.measures(counts)["accuracy"][i] == pytest.approx(right)
        assert losses[i] == pytest.approx(lost, rel=1e-5)
        assert task.from_losses(losses)["perplexity"][i] == pytest.approx(math.exp(lost), rel=1e-5)
    single = task.losses(logits[0], y[0])
    expected = [nn.functional.cross_entropy(s, t, ignore_index=IGNORED) for s, t in zip(logits[0], y[0], strict=True)]
    for one, other, target in zip(single, expected, y[0], strict=True):
        assert one == (pytest.approx(float(other), rel=1e-5) if bool((target != IGNORED).any()) else 0.0)


@pytest.mark.parametrize(
    ("task", "y", "said"),
    [
        (Regression(), torch.randn(2, N, 1, generator=DRAW), torch.randn(2, N, 1, generator=DRAW)),
        (MultiLabel(), (torch.rand(2, N, 3, generator=DRAW) > 0.5).float(), torch.rand(2, N, 3, generator=DRAW) > 0.5),
        (Tokens(), torch.randint(0, 3, (2, N, 4), generator=DRAW), torch.randint(0, 3, (2, N, 4), generator=DRAW)),
    ],
)
def test_counts_add_up_over_batches_and_clients(task: Task, y: Tensor, said: Tensor) -> None:
    def dense(counts: Tensor) -> Tensor:
        return counts.to_dense() if counts.is_sparse else counts

    whole = dense(task.counts(said, y, torch.ones(2, N), 3 if y.shape[2] > 1 else 1))
    parts = [
        dense(task.counts(said[:, at], y[:, at], torch.ones(2, N)[:, at], 3 if y.shape[2] > 1 else 1))
        for at in (slice(0, 5), slice(5, N))
    ]
    assert torch.allclose(whole.double(), sum(part.double() for part in parts))  # type: ignore[arg-type]
    joined = dense(task.counts(said.flatten(0, 1)[None], y.flatten(0, 1)[None], torch.ones(1, 2 * N),
                               3 if y.shape[2] > 1 else 1))  # fmt: skip
    assert torch.allclose(joined[0].double(), whole.sum(0).double())


def test_chance_is_the_best_that_needs_no_look() -> None:
    y = torch.randn(2, N, 1, generator=DRAW)
    y[1] += 3
    counts = Regression().counts(torch.zeros_like(y), y, torch.ones(2, N), 1)
    constant = y.mean()
    expected = (y - constant).square().mean(1).sqrt().mean()
    assert Regression().chance(counts)[0] == pytest.approx(float(expected), rel=1e-6)
    true = torch.rand(2, N, 3, generator=DRAW) > torch.tensor([0.2, 0.5, 0.9])
    counts = MultiLabel().counts(true, true.float(), torch.ones(2, N), 3)
    every = [torch.tensor([int(c) for c in f"{number:03b}"]).bool() for number in range(1, 8)]
    best = max(
        float(np.mean([metrics.f1_score(t.numpy(), s.expand(N, 3).numpy(), average="micro") for t in true]))
        for s in every
    )
    assert MultiLabel().chance(counts)[0] == pytest.approx(best)


@pytest.mark.parametrize("kind", ["squared", "absolute", "huber"])
def test_losses_by_name(kind: str) -> None:
    y, said = torch.randn(6, 2, generator=DRAW), torch.randn(6, 2, generator=DRAW)
    torchs = {"squared": nn.MSELoss, "absolute": nn.L1Loss, "huber": nn.HuberLoss}[kind](reduction="none")
    assert torch.allclose(Regression(loss=kind).losses(said, y), torchs(said, y).mean(1))


def test_tasks_go_to_text_and_back() -> None:
    for task in (Classification(), Regression("huber", lead="mae"), MultiLabel(), Tokens(), Forecasting()):
        assert task_from(task.told()) == task
    with pytest.raises(ValueError, match="functions of somebody's own"):
        task_from(Regression(metrics=(Metric("bias", function=lambda out, y: (out - y)[:, 0]),)).told())


X = [[0.0], [1.0]]


def client(y: Any, out: int = 1, **more: Any) -> fq.Client:
    return fq.Client("a", lambda: nn.Linear(1, out), (X, y), test=(X, y), **more)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fq.Scenario("s", [client([0.5, 1.0])], task="regresion"), "did you mean 'regression'"),
        (lambda: fq.Scenario("s", [client([0.5, 1.0])], task=cast(Any, Regression)), "made ready, as in Regression()"),
        (lambda: Regression(loss="cubed"), "no loss of regression 'cubed'"),
        (lambda: Regression(lead="accuracy"), "no metric of regression 'accuracy'"),
        (lambda: Regression(metrics=(Metric("x"),)), "a Metric with a function"),
        (lambda: Metric("loss"), "a metric cannot be called 'loss'"),
        (lambda: fq.Scenario("s", [client([[0, 2], [1, 1]])], task="multilabel"), "a target is 2; give 1 where"),
        (lambda: fq.Scenario("s", [client([0, 1])], task="multilabel"), "are no lists of labels"),
        (lambda: fq.Scenario("s", [client([[0, -1], [1, 1]])], task="tokens"), "a token is -1"),
        (lambda: fq.Scenario("s", [client([0, 1])], task="tokens"), "no sequences of tokens"),
        (lambda: fq.Scenario("s", [client([0.5, 1])], task="forecasting"), "no readings that follow"),
    ],
)
def test_sentences(make: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("scenario", "method", "sentence"),
    [
        (lambda: fq.Scenario("s", [client([0.5, 1.0], 3)]), "fedavg", "gives 3 numbers for a sample"),
        (lambda: fq.Scenario("s", [client([0.5, 1.0])]), "fedproto", "there are no classes in regression"),
        (lambda: fq.Scenario("s", [client([0.5, 1.0])]), "feddl", "there are no classes in regression"),
        (
            lambda: fq.Scenario("s", [client([0.5, 1.0])], task=Regression(loss=lambda out, y: (out - y).abs().mean())),
            "fedavg",
            "'loss' of the task gives () for 2 samples; give one number a sample",
        ),
    ],
)
def test_refused_before_any_work(scenario: Any, method: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fq.run(scenario(), method, rounds=1, alone=False)


@pytest.mark.parametrize("readout", ["best-of-both", "averaged-by-class", "best-of-last-3"])
def test_readouts_that_need_classes_say_so(readout: str) -> None:
    with pytest.raises(ValueError, match=f"the read-out '{readout}' .* there are no classes in regression"):
        fq.run(fq.Scenario("s", [client([0.5, 1.0])]), "fedavg", rounds=1, alone=False, readouts=readout)


def test_whole_targets_can_be_numbers() -> None:
    scenario = fq.Scenario("s", [client([3, -4])], task="regression")
    assert scenario.clients[0].train.y.tolist() == [[3.0], [-4.0]]
    assert scenario.clients[0].labels == ()
    assert isinstance(scenario.task, Base)
