"""Read-outs: numbers by hand, what they may look at, and where best-of-both is the right one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.families.family import Family
from fedquilt.families.layout import Layout
from fedquilt.families.units import cut
from fedquilt.interface.client_stack import ClientStack, PaddedSplit
from fedquilt.interface.messages import ClientInfo, Instructions
from fedquilt.readouts import (
    READOUTS,
    Averaged,
    AveragedByClass,
    BestOfBoth,
    BestOfLast,
    EvaluationContext,
    Readout,
    named,
)
from fedquilt.readouts.averaged import output_of
from fedquilt.readouts.best_of_both import most_trusted

ALL = [*READOUTS, "best-of-last-2"]


def one_hot(predicted: Sequence[Sequence[int]]) -> Tensor:
    """Scores (k, n, 3) whose argmax is what is predicted."""
    return torch.eye(3)[torch.tensor(predicted)]


def table(y: Sequence[Sequence[int]], mask: Sequence[Sequence[float]] | None = None) -> PaddedSplit:
    truth = torch.tensor(y)
    real = torch.ones(truth.shape) if mask is None else torch.tensor(mask)
    return PaddedSplit(torch.zeros(*truth.shape, 1), truth, real, torch.full((len(truth),), truth.shape[1]))


def look(
    splits: dict[str, PaddedSplit],
    said: dict[tuple[str, str], Tensor],
    rows: tuple[Tensor, Tensor] | None = None,
    round_: int = 2,
    samples: tuple[int, ...] = (1,),
    everyone: int = 10,
    memory: dict[str, Tensor] | None = None,
) -> EvaluationContext:
    """A look at clients whose models say these things about their splits."""
    net = nn.Linear(1, 3)
    k = len(samples)
    received, adapted = rows if rows is not None else (torch.zeros(k, 6), torch.ones(k, 6))
    family = Family(tuple(range(k)), net, Layout(net, cut(net)))

    def view(numbers: Tensor, which: str) -> ClientStack:
        return ClientStack(
            family, family.ids, [ClientInfo(f"c{i}", n, {"which": which}, (), {}) for i, n in enumerate(samples)],
            round_, 9, 1, 0, 3, numbers, splits.__getitem__, Instructions(round_, family.ids, (), (), {}, everyone),
        )  # fmt: skip

    kept = {} if memory is None else memory
    return EvaluationContext(view(received, "received"), view(adapted, "adapted"), None, memory=kept, known=dict(said))


def test_best_of_both_by_hand() -> None:
    # Validation, truth 0 0 1 1 2. Received says 0 1 1 1 0: F(0) = 2*1/(2+2) = 1/2, F(1) = 2*2/(3+2) = 4/5, F(2) = 0.
    # Adapted says 0 0 0 1 2: F(0) = 2*2/(3+2) = 4/5, F(1) = 2*1/(1+2) = 2/3, F(2) = 1.
    splits = {"validation": table([[0, 0, 1, 1, 2]]), "test": table([[0, 1, 1, 2, 0, 0]])}
    said = {
        ("received", "validation"): one_hot([[0, 1, 1, 1, 0]]),
        ("adapted", "validation"): one_hot([[0, 0, 0, 1, 2]]),
        ("received", "test"): one_hot([[0, 1, 0, 1, 2, 2]]),
        ("adapted", "test"): one_hot([[0, 0, 1, 2, 0, 1]]),
    }
    # they agree: 0. 4/5 against 4/5: received, 1. 1/2 against 2/3: adapted, 1. 4/5 against 1: 2. 0 against 4/5: 0; 1.
    assert BestOfBoth().predictions(look(splits, said), "test").tolist() == [[0, 1, 1, 2, 0, 1]]


def test_padding_has_no_voice() -> None:
    said = {
        ("received", "validation"): one_hot([[0, 1, 1]]),
        ("adapted", "validation"): one_hot([[1, 1, 0]]),
        ("received", "test"): one_hot([[0]]),
        ("adapted", "test"): one_hot([[1]]),
    }
    # Received: F(0) = 1 on the two real samples; adapted: F(1) = 2/3. With the third, F(0) of received is 2/3 as well.
    splits = {"validation": table([[0, 1, 0]], [[1.0, 1.0, 0.0]]), "test": table([[0]])}
    assert BestOfBoth().predictions(look(splits, said), "test").tolist() == [[0]]
    adapted_is_better = {"validation": table([[1, 1, 0]], [[1.0, 1.0, 0.0]]), "test": table([[1]])}
    assert BestOfBoth().predictions(look(adapted_is_better, said), "test").tolist() == [[1]]


def test_without_validation_samples_the_received_model_is_believed() -> None:
    said = {
        ("received", "validation"): torch.zeros(1, 0, 3),
        ("adapted", "validation"): torch.zeros(1, 0, 3),
        ("received", "test"): one_hot([[2, 1]]),
        ("adapted", "test"): one_hot([[1, 1]]),
    }
    nothing = PaddedSplit(
        torch.zeros(1, 0, 1), torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0), torch.tensor([0])
    )
    splits = {"validation": nothing, "test": table([[1, 1]])}
    assert BestOfBoth().predictions(look(splits, said), "test").tolist() == [[2, 1]]


def test_of_many_models_the_best_at_what_it_says() -> None:
    said = [torch.tensor([[0, 0, 2]]), torch.tensor([[1, 1, 2]]), torch.tensor([[2, 0, 1]])]
    trust = [torch.tensor([[0.5, 0.0, 0.4]]), torch.tensor([[0.0, 0.5, 0.3]]), torch.tensor([[0.6, 0.9, 0.7]])]
    # 0.5, 0.5, 0.7 -> third; 0.5, 0.5, 0.6 -> third; 0.4, 0.3, 0.9 -> third. Without it: a tie, a tie, and the first.
    assert most_trusted(said, trust).tolist() == [[2, 0, 1]]
    assert most_trusted(said[:2], trust[:2]).tolist() == [[0, 0, 2]]


def rounds_of(readout: BestOfLast, validation: Sequence[int], test: Sequence[int]) -> list[int]:
    """Predictions round by round of clients whose two models agree; the truth is 0 on validation, F = 1 for a 0."""
    memory: dict[str, Tensor] = {}
    splits = {"validation": table([[0, 1]]), "test": table([[0]])}
    seen = []
    for round_, (v, t) in enumerate(zip(validation, test, strict=True), start=1):
        said: dict[tuple[str, str], Tensor] = {}
        for which in ("received", "adapted"):
            said |= {(which, "validation"): one_hot([[v, 2 - v]]), (which, "test"): one_hot([[t]])}
        seen.append(int(readout.predictions(look(splits, said, round_=round_, memory=memory), "test")[0, 0]))
    return seen


def test_the_last_rounds_vote_and_older_ones_are_forgotten() -> None:
    # The model of round 1 names sample 0 rightly (F(0) = 1), later ones do not (F = 0): it is believed while it lasts.
    assert rounds_of(BestOfLast(2), validation=[0, 2, 2, 2], test=[0, 2, 1, 1]) == [0, 0, 1, 1]
    assert rounds_of(BestOfLast(3), validation=[0, 2, 2, 2], test=[0, 2, 1, 1]) == [0, 0, 0, 1]


def test_looking_twice_at_a_round_counts_once() -> None:
    splits = {"validation": table([[0, 1]]), "test": table([[0]])}
    said = {(w, s): one_hot([[0, 1]] if s == "validation" else [[0]]) for w in ("received", "adapted") for s in splits}
    memory: dict[str, Tensor] = {}
    for _ in range(2):
        BestOfLast(3).predictions(look(splits, said, memory=memory), "test")
    assert memory["best-of-last-3 test"].shape == (2, 1, 1)
    assert memory["best-of-last-3 test rounds"].tolist() == [2, 2]


def test_averaged_by_hand() -> None:
    # Client 0 has 1 of 10 samples, client 1 has 4: theta = 0.1 * 20 + 0.9 * 10 and 0.4 * 20 + 0.6 * 10.
    rows = torch.full((2, 6), 10.0), torch.full((2, 6), 20.0)
    splits = {"test": table([[0], [0]])}
    seen = look(splits, {}, rows, samples=(1, 4))
    Averaged().predictions(seen, "test")
    made = seen.rows("averaged", lambda: torch.zeros(0))
    assert made[0].tolist() == pytest.approx([11] * 6)
    assert made[1].tolist() == pytest.approx([14] * 6)


def test_averaged_by_class_by_hand() -> None:
    # nn.Linear(1, 3): weight of classes 0, 1, 2, then bias of classes 0, 1, 2. Of 30 samples, 10 of each class, the
    # client has 3 of class 0 and 2 of class 2: it moves 3/10, 0 and 2/10 of the way from 0 to 100.
    rows = torch.zeros(1, 6), torch.full((1, 6), 100.0)
    splits = {"train": table([[0, 0, 2, 0, 2, 1]], [[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]), "test": table([[0]])}
    seen = look(splits, {}, rows, samples=(5,), everyone=30)
    AveragedByClass().predictions(seen, "test")
    made = seen.rows("averaged-by-class", lambda: torch.zeros(0))
    assert made[0].tolist() == pytest.approx([30, 0, 20, 30, 0, 20])


def test_layers_below_the_output_move_by_the_client_s_share() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 3))
    family = Family((0,), net, Layout(net, cut(net)))
    train = table([[0, 0, 2]])
    view = ClientStack(family, (0,), [ClientInfo("a", 3, {}, (), {})], 1, 1, 1, 0, 3, torch.zeros(1, 8),
                       lambda _: train, Instructions(1, (0,), (), (), {}, 30))  # fmt: skip
    weight = AveragedByClass().weight(view)[0]
    assert weight.tolist() == pytest.approx([0.1, 0.1, 0.2, 0, 0.1, 0.2, 0, 0.1])
    with pytest.raises(ValueError, match=r"not a row for each of 4 classes, .*: use the read-out 'averaged'$"):
        output_of(family.layout, 4)


def specialists(seed: int = 0, rounds: int = 12) -> fq.Scenario:
    """Three specialists, each with its own names for two of six kinds, and somebody who knows all the usual names.

    A specialist trains on its own two kinds alone, so what it trained calls everything by their names, and what it
    receives knows the usual names and gets its own two wrong. Neither is enough.
    """
    random = torch.Generator().manual_seed(seed)
    usual = torch.arange(6)

    def draw(classes: Tensor, names: Tensor, count: int) -> tuple[Tensor, Tensor]:
        kind = classes[torch.randint(len(classes), (count,), generator=random)]
        x = 2 * torch.eye(6)[kind] + 0.3 * torch.randn(count, 6, generator=random)
        return x + 4, names[kind]  # what all samples have in common makes a model forget what it does not see

    def net() -> nn.Module:
        return nn.Linear(6, 6)

    clients = [fq.Client("generalist", net, draw(usual, usual, 240), draw(usual, usual, 60), draw(usual, usual, 60))]
    for i in range(3):
        names, own = usual.clone(), torch.tensor([2 * i, 2 * i + 1])
        names[own] = (own + 2) % 6
        train, validation, test = draw(own, names, 30), draw(usual, names, 60), draw(usual, names, 120)
        clients.append(fq.Client(f"specialist-{i}", net, train, validation, test, labels=range(6)))
    return fq.Scenario("specialists", clients, fq.Training(rounds=rounds, epochs=6, batch=10, lr=0.1))


def accuracies(result: fq.Run, split: str = "test") -> dict[str, float]:
    last = result.federation.round
    return {e.readout: e.score for e in result.evaluations if e.split == split and e.round == last}


def test_best_of_both_wins_where_clients_are_specialists() -> None:
    readouts = ["best-of-both", "received", "adapted"]
    result = fq.run(specialists(), "fedavg", engine="sequential", alone=False, evaluate_every=12, readouts=readouts)
    seen = accuracies(result)
    assert seen["best-of-both"] > max(seen["received"], seen["adapted"]) + 0.1
    assert result.summary["readout"] == "received"  # the method says which read-out is reported


def test_f_measures_come_from_validation_samples_alone() -> None:
    """With other test labels every prediction is the same; with other validation labels some are not."""
    scenario = specialists(rounds=2)

    def relabelled(split: str) -> fq.Scenario:
        clients = []
        for c in scenario.clients:
            parts = {"train": c.train, "validation": c.validation, "test": c.test}
            parts[split] = fq.Split(parts[split].x, (parts[split].y + 1) % 6)
            train, validation, test = parts.values()
            clients.append(fq.Client(c.name, c.model, train, validation, test, labels=range(6)))
        return fq.Scenario("relabelled", clients, scenario.training)

    def predictions(which: fq.Scenario, readout: Readout) -> Tensor:
        federation = fq.Federation(which, fq.methods.FedAvg(), engine="sequential", readouts=[readout], device="cpu")
        counts = [e.counts.sum(1) for _ in range(2) for e in federation.step().evaluations if e.split == "test"]
        return torch.stack(counts)  # (rounds, clients, classes) how often each class was predicted

    for readout in (BestOfBoth(), BestOfLast(2)):
        usual = predictions(scenario, readout)
        assert torch.equal(predictions(relabelled("test"), readout), usual)
        assert not torch.equal(predictions(relabelled("validation"), readout), usual)


def test_all_side_by_side_in_one_run_at_no_cost() -> None:
    plain = fq.run(specialists(rounds=3), "fedavg", engine="sequential", alone=False)
    every = fq.run(specialists(rounds=3), "fedavg", engine="sequential", alone=False, readouts=ALL)
    names = [named(name) for name in ALL]
    shown = {readout.name for readout in names if readout is not None}
    assert {row["readout"] for row in every.rows} == shown
    assert {row["round"] for row in every.rows if row["readout"] == "fine-tuned"} == {3}  # trained once, at the end
    for row in every.rows:
        assert len(row["f_by_class"]) == 6
    both = {"received", "adapted"}
    assert [row for row in every.rows if row["readout"] in both] == plain.rows  # nobody's training is disturbed
    for client in ("generalist", "specialist-0"):
        for one, other in zip(plain.model(client).parameters(), every.model(client).parameters(), strict=True):
            assert torch.equal(one, other)


def test_fine_tuned_is_the_next_round_s_adapted_model() -> None:
    """Fine-tuning after round 2 is what round 3 would do before it sends."""
    short = fq.run(specialists(rounds=2), "fedavg", engine="sequential", alone=False, readouts=["fine-tuned"])
    long = fq.run(specialists(rounds=3), "fedavg", engine="sequential", alone=False, readouts=["adapted"])
    tuned = [e.counts for e in short.evaluations if e.round == 2]
    trained = [e.counts for e in long.evaluations if e.round == 3]
    assert len(tuned) == 2
    for one, other in zip(tuned, trained, strict=True):
        assert torch.equal(one, other)


def test_best_of_the_last_rounds_starts_as_best_of_both() -> None:
    result = fq.run(specialists(rounds=3), "fedavg", engine="sequential", alone=False,
                    readouts=["best-of-both", "best-of-last-3"])  # fmt: skip
    first = {e.readout: e.counts for e in result.evaluations if e.round == 1 and e.split == "test"}
    assert torch.equal(first["best-of-both"], first["best-of-last-3"])
    for memory in result.federation.simulation.memory.values():
        assert all(isinstance(value, Tensor) for value in memory.values())  # so that a checkpoint can hold it
    (kept,) = (memory["best-of-last-3 validation"] for memory in result.federation.simulation.memory.values())
    assert kept.shape[0] == 6  # two models a round


def test_names() -> None:
    assert named("best-of-last-7") == BestOfLast(7)
    assert named("best-of-last") == BestOfLast(3)
    assert named("best-of-last-7x") is None
    with pytest.raises(ValueError, match=r"best-of-last-1 looks at no earlier round: use the read-out 'best-of-both'"):
        named("best-of-last-1")
    with pytest.raises(ValueError, match=r"there is no read-out 'best-of-bth'; did you mean 'best-of-both'\?"):
        fq.run(specialists(), "fedavg", readouts=["best-of-bth"])
