"""Numbers that are reported: against scikit-learn, and computed again from the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_help import federation, mlp, points, same_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

import fedquilt as fq
from fedquilt._util.wording import worst_decile
from fedquilt.methods import FedPer
from fedquilt.results import Evaluation, final, summarise
from fedquilt.tasks.confusion import accuracy, confusion, f_by_class, macro_f1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_measures_are_those_of_scikit_learn(data: st.DataObject) -> None:
    classes = data.draw(st.integers(2, 5))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    labels = st.integers(0, classes - 1)
    longest = max(sizes)
    truth, guess = (torch.zeros(len(sizes), longest, dtype=torch.int64) for _ in range(2))
    mask = torch.zeros(len(sizes), longest)
    for i, n in enumerate(sizes):
        mask[i, :n] = 1
        truth[i, :n] = torch.tensor(data.draw(st.lists(labels, min_size=n, max_size=n)))
        guess[i] = torch.tensor(data.draw(st.lists(labels, min_size=longest, max_size=longest)))
    counts = confusion(guess, truth, mask, classes)
    for i, n in enumerate(sizes):
        y, p = truth[i, :n].numpy(), guess[i, :n].numpy()
        every = np.arange(classes)
        assert counts[i].to_dense().tolist() == metrics.confusion_matrix(y, p, labels=every).tolist()
        assert float(accuracy(counts)[i]) == pytest.approx(metrics.accuracy_score(y, p))
        by_class = metrics.f1_score(y, p, labels=every, average=None, zero_division=0)
        assert f_by_class(counts)[i].tolist() == pytest.approx(by_class.tolist())
        present = sorted(set(y.tolist()))
        expected = metrics.f1_score(y, p, labels=present, average="macro", zero_division=0)
        assert float(macro_f1(counts)[i]) == pytest.approx(expected)


def test_rows_of_an_evaluation() -> None:
    counts = torch.tensor([[[3, 1, 0], [0, 0, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 0]]])
    evaluation = Evaluation(4, "received", "test", ("a", "nobody"), counts.to_sparse())
    assert torch.equal(evaluation.counts, counts)
    (row,) = evaluation.rows()  # who has no samples has no row
    # class 0: 2 * 3 / (4 + 4), class 1 is not there, class 2: never predicted
    assert row == {
        "round": 4, "client": "a", "readout": "received", "split": "test", "accuracy": pytest.approx(0.6),
        "f1": pytest.approx(0.375), "samples": 5, "f_by_class": [0.75, None, 0.0], "loss": None, "training_loss": None,
    }  # fmt: skip


def a_run(**more: object) -> fq.Run:
    scenario = points(sizes=(6, 9, 7, 5), training={"rounds": 3})
    return fq.run(scenario, "fedper", engine="sequential", device="cpu", **more)  # type: ignore[arg-type]


def test_a_row_for_each_client_round_readout_and_split() -> None:
    run = a_run(alone=False)
    keys = {(r["client"], r["round"], r["readout"], r["split"]) for r in run.rows}
    assert len(run.rows) == len(keys) == 4 * 3 * 2 * 2
    assert {r["samples"] for r in run.rows if r["split"] == "test"} == {6}
    sparse = a_run(alone=False, evaluate_every=2)
    assert {r["round"] for r in sparse.rows} == {2, 3}  # and always the last one


def test_rows_have_losses_beside_accuracies() -> None:
    """Cross-entropy by PyTorch itself on the model that the client ends with; the training loss of who trained."""
    scenario = points(sizes=(6, 9, 7, 5), training={"rounds": 3, "share": 0.5, "batch": 64, "epochs": 1})
    run = fq.run(
        scenario, "fedavg", engine="vectorised", device="cpu", alone=False, readouts=["received", "best-of-both"]
    )
    trained = run.federation.sample_clients(3)
    for number, client in enumerate(scenario.clients):
        rows = {(r["readout"], r["split"]): r for r in run.rows if r["client"] == client.name and r["round"] == 3}
        model = run.model(client.name)
        for split, part in (("validation", client.validation), ("test", client.test)):
            with torch.no_grad():
                loss = float(torch.nn.functional.cross_entropy(model(part.x), part.y))
            assert rows["received", split]["loss"] == pytest.approx(loss, rel=1e-4)
            assert rows["best-of-both", split]["loss"] is None  # it names classes only
        assert (rows["received", "test"]["training_loss"] is not None) == (number in trained)
    before = fq.run(scenario, "fedavg", rounds=2, engine="sequential", device="cpu", alone=False)
    for number in trained:  # one step on all samples: its loss is that of what was received, before it
        client = scenario.clients[number]
        (row,) = (r for r in run.last_rows("received") if r["client"] == client.name)
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(before.model(client.name)(client.train.x), client.train.y))
        assert row["training_loss"] == pytest.approx(loss, rel=1e-4)


def test_the_summary_comes_from_the_rows() -> None:
    run = a_run()
    s = run.summary
    last = [r for r in run.rows if (r["round"], r["readout"], r["split"]) == (3, "received", "test")]
    scores = np.array([r["accuracy"] for r in last])
    assert s["accuracy_mean"] == pytest.approx(scores.mean())
    assert s["accuracy_std"] == pytest.approx(scores.std())
    assert s["accuracy_worst_decile"] == pytest.approx(scores.min())  # of four, the worst tenth is one
    assert s["f1_mean"] == pytest.approx(np.mean([r["f1"] for r in last]))
    assert run.alone is not None
    alone = {r["client"]: r["accuracy"] for r in run.alone.rows if (r["round"], r["split"]) == (3, "test")}
    gains = np.array([r["accuracy"] - alone[r["client"]] for r in last])
    assert s["alone_mean"] == pytest.approx(np.mean(list(alone.values())))
    assert s["gain_over_alone"] == pytest.approx(gains.mean())
    assert s["share_gaining"] == pytest.approx((gains > 0).mean())
    # up and down in each of three rounds: four clients' first layers, 4 * 6 + 6 numbers of four bytes
    assert s["megabytes_up"] == s["megabytes_down"] == pytest.approx(3 * 4 * 30 * 4 / 1e6)
    told = {key: s[key] for key in ("scenario", "method", "seed", "rounds", "clients", "readout", "split", "engine")}
    assert told == {
        "scenario": "points", "method": "fedper", "seed": 0, "rounds": 3, "clients": 4, "readout": "received",
        "split": "test", "engine": "sequential",
    }  # fmt: skip
    assert s["refused_updates"] == 0
    assert s["device"] == "cpu"
    assert s["seconds"] > 0


def test_a_run_alone_may_be_given() -> None:
    alone = fq.run(points(sizes=(6, 9, 7, 5)), "local", rounds=3, engine="sequential", device="cpu")
    assert alone.summary["gain_over_alone"] == 0.0
    run = a_run(alone=alone)
    assert run.alone is alone
    assert run.summary["alone_mean"] == alone.summary["accuracy_mean"]
    with pytest.raises(ValueError, match="the run alone has no rows of these clients"):
        summarise(run.rows, [], "received")


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_personal_model_scores_what_its_row_says(engine: str) -> None:
    scenario = points(sizes=(6, 9, 7, 5), training={"rounds": 3})
    run = fq.run(scenario, "fedper", engine=engine, device="cpu", alone=False)
    rows = final(run.rows, "received", "test")
    for client in scenario.clients:
        model = run.model(client.name)
        assert not model.training
        right = (model(client.test.x).argmax(1) == client.test.y).float().mean()
        assert float(right) == pytest.approx(rows[client.name]["accuracy"])


def test_the_adapted_read_out_is_the_model_before_installing() -> None:
    scenario = points(training={"rounds": 1, "lr": 0.5})
    federated = federation(scenario, FedPer())
    report = federated.step()
    adapted = {e.split: e for e in report.evaluations if e.readout == "adapted"}["test"]
    family_state = federated.simulation.family_states[0]
    for i, client in enumerate(scenario.clients):
        model = family_state.family.model(family_state.store.all()[i])
        right = int((model(client.test.x).argmax(1) == client.test.y).sum())
        assert int(adapted.counts[i].diagonal().sum()) == right


def test_padding_is_never_counted() -> None:
    """Clients with different numbers of test samples: each is counted on its own."""
    base = points(sizes=(6, 6, 6))
    clients = [
        fq.Client(c.name, mlp, c.train, None, (c.test.x[:n], c.test.y[:n])) for n, c in enumerate(base.clients, 1)
    ]
    scenario = fq.Scenario("s", clients, training=base.training, label_names=base.label_names)
    for engine in ("sequential", "vectorised"):
        run = fq.run(scenario, "local", rounds=1, engine=engine, device="cpu")
        assert [final(run.rows, "received", "test")[c.name]["samples"] for c in clients] == [1, 2, 3]


def test_evaluation_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = points(sizes=(6, 9))
    big = torch.randn(150, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(150) % 3
    clients = [fq.Client(c.name, mlp, c.train, None, (big, labels)) for c in scenario.clients]
    scenario = fq.Scenario("s", clients, training=scenario.training)
    whole = fq.run(scenario, "fedavg", rounds=1, engine="vectorised", device="cpu", alone=False)
    monkeypatch.setattr("fedquilt.core.local_training.how_many_at_once", lambda *_: 1)
    parts = fq.run(scenario, "fedavg", rounds=1, engine="vectorised", device="cpu", alone=False)
    same_rows(whole.rows, parts.rows)


def test_plans_are_kept_when_they_change() -> None:
    run = a_run(alone=False)
    assert len(run.plans) == 1
    assert run.plans[0][0] == 1
    assert run.plan == run.plans[0][1]
    assert str(run.plan).splitlines() == ["0          1 circle of 4", "2          private"]


def test_worst_decile() -> None:
    assert worst_decile([0.5]) == 0.5
    assert worst_decile([i / 100 for i in range(100)]) == pytest.approx(0.045)
    assert worst_decile([0.9] * 19 + [0.1]) == pytest.approx(0.5)  # two of twenty


def test_a_summary_looks_at_the_last_round_alone_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fq.run(points(), "fedavg", rounds=6, engine="sequential", alone=False)
    last = final(run.rows, "received", "test")
    looked = 0
    rows = Evaluation.rows

    def counted(evaluation: Evaluation) -> list[dict[str, object]]:
        nonlocal looked
        looked += 1
        return rows(evaluation)

    monkeypatch.setattr(Evaluation, "rows", counted)
    with monkeypatch.context() as many:
        many.setattr("fedquilt.runs.result._ONE_BY_ONE", 2)  # of more clients nobody is told of one by one
        assert run.summary == run.summary
        assert looked == 1
    assert run.summary == run.summary
    assert looked == 1 + 12  # and of few every look at them is read once, for who fell from what it was
    assert {row["client"]: row for row in run.last_rows("received")} == last
    run.evaluations.append(run.evaluations[1])  # a new one is seen
    assert [row["round"] for row in run.last_rows("received")] == [1, 1, 1]
