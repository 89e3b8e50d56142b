"""Read-outs that choose or mix by validation samples: neighbours, fine-tuning and the vote, against plain loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.authoring import ClientInfo, Install, Parts, Plan, Roster, State, Step, Train, nobody, task_loss
from fedquilt.core.evaluation import look_at
from fedquilt.core.federation import Federation, RoundReport
from fedquilt.interface.client_stack import ClientStack, PaddedSplit
from fedquilt.readouts import KNN, EvaluationContext, FineTuned, FineTunedChosen, Readout, Vote, named
from fedquilt.readouts.vote import EXPERTS
from fedquilt.readouts.vote import foreseen as left_out

ROUNDS, RATE = 12, 0.5
SIZES = {"few": (7, 5, 11), "blind": (12, 0, 8), "many": (30, 9, 6)}  # training, validation and test samples
Pair = tuple[Tensor, Tensor]
Way = Callable[[Tensor], Tensor]
Ways = dict[str, list[Way]]
CHOOSING: list[Readout] = [KNN(), KNN(4), FineTunedChosen(), Vote()]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def scenario(model: Callable[[], nn.Module] = net) -> fq.Scenario:
    """Three clients who draw the borders between three classes in other places; all of a client is one batch."""
    random = torch.Generator().manual_seed(3)

    def draw(turn: float, count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 2, generator=random)
        angle = torch.atan2(x[:, 1], x[:, 0]) + turn + 0.5 * torch.randn(count, generator=random)
        return x, (angle / (2 * math.pi) * 3).floor().long() % 3

    def splits(turn: float, counts: tuple[int, int, int]) -> tuple[Pair, Pair, Pair]:
        return draw(turn, counts[0]), draw(turn, counts[1]), draw(turn, counts[2])

    clients = [
        fq.Client(name, model, *splits(0.8 * at, counts), labels=range(3))
        for at, (name, counts) in enumerate(SIZES.items())
    ]
    return fq.Scenario("borders", clients, fq.Training(rounds=ROUNDS, epochs=1, batch=64, lr=RATE))


@cache
def after(readouts: tuple[Readout, ...], engine: str = "sequential") -> fq.Run:
    return fq.run(scenario(), "fedavg", engine=engine, alone=False, readouts=readouts, evaluate_every=ROUNDS)


def predicted(run: fq.Run, readout: Readout) -> dict[str, list[list[int]]]:
    """Counts by true and predicted class of each client's test samples."""
    (found,) = (e.counts for e in run.evaluations if (e.readout, e.split) == (readout.name, "test"))
    return dict(zip(SIZES, found.tolist(), strict=True))


def counted(answers: dict[str, list[int]]) -> dict[str, list[list[int]]]:
    tables = {}
    for client in scenario().clients:
        tables[client.name] = [[0] * 3 for _ in range(3)]
        for truth, said in zip(client.test.y.tolist(), answers[client.name], strict=True):
            tables[client.name][truth][said] += 1
    return tables


def model_of(run: fq.Run, client: fq.Client) -> nn.Sequential:
    model = run.model(client.name)
    assert isinstance(model, nn.Sequential)
    return model


def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        said: Tensor = model(x).softmax(1)
    return said


def answering(model: nn.Module) -> Way:
    return lambda x: probabilities(model, x)


def by_neighbours(model: nn.Sequential, client: fq.Client, x: Tensor, k: int) -> Tensor:
    """(n, classes) one sample after another: sort all distances, weigh the first k."""
    with torch.no_grad():
        body = nn.Sequential(*list(model)[:-1])
        own, seen = body(client.train.x), body(x)
    rows = []
    for sample in seen:
        pairs = sorted(
            (float((sample - other).square().sum()), int(y)) for other, y in zip(own, client.train.y, strict=True)
        )
        total = [0.0] * 3
        for distance, label in pairs[:k]:
            total[label] += math.exp(-distance / 4)
        rows.append([value / sum(total) for value in total])
    return torch.tensor(rows).reshape(-1, 3)


def trained_on(model: nn.Sequential, client: fq.Client, epochs: int, head: bool = False) -> nn.Sequential:
    """Full steps of plain gradient descent from a model, on all of it or on its last layer."""
    tuned = copy.deepcopy(model)
    parameters = list((tuned[-1] if head else tuned).parameters())
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(tuned(client.train.x), client.train.y)
        for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data -= RATE * slope
    return tuned


def picked(ways: Ways) -> dict[str, int]:
    """Which of the ways to answer is right most often on each client's validation samples; of several the likeliest.

    The client without validation samples takes what is best for all of them together.
    """

    def worth(client: fq.Client, way: Way) -> tuple[int, float]:
        said = way(client.validation.x).tolist()
        truth = client.validation.y.tolist()
        right = sum(max(range(3), key=p.__getitem__) == y for p, y in zip(said, truth, strict=True))
        return right, sum(math.log(p[y]) if p[y] > 0 else -math.inf for p, y in zip(said, truth, strict=True))

    found = {c.name: [worth(c, way) for way in ways[c.name]] for c in scenario().clients}
    numbers = range(len(found["few"]))
    together = [tuple(sum(found[c][way][which] for c in found) for which in (0, 1)) for way in numbers]
    return {client: max(numbers, key=(found[client] if SIZES[client][1] else together).__getitem__) for client in found}


def answers(ways: Ways) -> dict[str, list[int]]:
    chosen = picked(ways)
    return {c.name: ways[c.name][chosen[c.name]](c.test.x).argmax(1).tolist() for c in scenario().clients}


@pytest.mark.parametrize("readout", [KNN(), KNN(4)])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_neighbours_against_a_plain_loop(readout: KNN, engine: str) -> None:
    run = after((readout,), engine)

    def ways(client: fq.Client, logits: bool) -> list[Way]:
        model = model_of(run, client)

        def mixed(part: float) -> Way:
            def way(x: Tensor) -> Tensor:
                with torch.no_grad():
                    said: Tensor = model(x) if logits else model(x).softmax(1)
                return part * by_neighbours(model, client, x, readout.k) + (1 - part) * said

            return way

        return [mixed(step / 10) for step in range(11)]

    clients = scenario().clients
    found = picked({c.name: ways(c, logits=False) for c in clients})
    assert len(set(found.values())) > 1  # clients choose otherwise
    assert predicted(run, readout) == counted(answers({c.name: ways(c, logits=False) for c in clients}))
    # the trap: probabilities of neighbours mixed with raw logits answer otherwise, whatever the part
    traps = [{c.name: ways(c, logits=True)[at](c.test.x).argmax(1).tolist() for c in clients} for at in range(1, 10)]
    assert all(counted(trap) != predicted(run, readout) for trap in traps)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_fine_tuning_is_chosen_as_by_a_plain_loop(engine: str) -> None:
    readout = FineTunedChosen()
    run = after((readout, FineTuned(5), FineTuned(2, "head")), engine)
    tried = [(0, False), *((e, head) for head in (False, True) for e in (1, 2, 5, 10))]

    def ways(client: fq.Client) -> list[Way]:
        models = [trained_on(model_of(run, client), client, epochs, head) for epochs, head in tried]
        return [answering(model) for model in models]

    every = {client.name: ways(client) for client in scenario().clients}
    assert len(set(picked(every).values())) > 1
    assert predicted(run, readout) == counted(answers(every))
    for fixed, at in ((FineTuned(5), 3), (FineTuned(2, "head"), 6)):
        said = {c.name: every[c.name][at](c.test.x).argmax(1).tolist() for c in scenario().clients}
        assert predicted(run, fixed) == counted(said)


def believed(likelihood: list[list[float]], prior: list[float], pseudo: float = 2.0) -> list[float]:
    """EM by hand: likelihood[v][m] of validation sample v by expert m."""
    pi = list(prior)
    for _ in range(10):
        counts = [pseudo * p for p in prior]
        for row in likelihood:
            total = sum(p * value for p, value in zip(pi, row, strict=True))
            counts = [c + p * value / total for c, p, value in zip(counts, pi, row, strict=True)]
        pi = [c / (len(likelihood) + pseudo) for c in counts]
    return pi


def expected_of(likelihood: dict[str, list[list[float]]]) -> list[float]:
    """What all clients' samples say of five experts: sets of them that count alike, by their likelihood."""
    sets = [some for size in range(1, 6) for some in combinations(range(5), size)]
    odds = [math.prod(sum(row[m] for m in some) / len(some) for rows in likelihood.values() for row in rows)
            for some in sets]  # fmt: skip
    shares = [sum(o / len(some) for o, some in zip(odds, sets, strict=True) if m in some) / sum(odds) for m in range(5)]
    return [0.9 * share + 0.1 / 5 for share in shares]


def foreseen(likelihood: dict[str, list[list[float]]], prior: list[float], pseudo: float) -> float:
    """The log-likelihood of all samples, each by a mixture that was weighed without its fold."""
    total = 0.0
    for rows in likelihood.values():
        for v, row in enumerate(rows):
            others = [other for w, other in enumerate(rows) if w // 4 % 5 != v // 4 % 5]
            total += math.log(sum(p * value for p, value in zip(believed(others, prior, pseudo), row, strict=True)))
    return total


def experts(run: fq.Run, client: fq.Client) -> list[Way]:
    """Received, half-way, adapted, fine-tuned for ten epochs, and neighbours."""
    received = model_of(run, client)
    number = list(SIZES).index(client.name)
    adapted = run.federation.simulation.model(number)  # nothing installed
    half = copy.deepcopy(received)
    for own, other in zip(half.parameters(), adapted.parameters(), strict=True):
        own.data = (own.data + other.data) / 2
    models = [received, half, adapted, trained_on(received, client, 10)]
    return [*(answering(model) for model in models),
            lambda x: by_neighbours(received, client, x, 10)]  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_vote_against_a_plain_loop(engine: str) -> None:
    run, clients = after((Vote(),), engine), scenario().clients
    likelihood = {}
    for client in clients:
        said = [expert(client.validation.x) for expert in experts(run, client)]
        likelihood[client.name] = [[float(p[v, y]) for p in said] for v, y in enumerate(client.validation.y.tolist())]
    prior = expected_of(likelihood)
    by_pseudo = {pseudo: foreseen(likelihood, prior, pseudo) for pseudo in (2.0, 8.0, 32.0, 128.0, 1e6)}
    best = max(by_pseudo, key=by_pseudo.__getitem__)
    pi = {name: believed(rows, prior, best) for name, rows in likelihood.items()}
    assert pi["blind"] == pytest.approx(prior)
    answered = {}
    for c in clients:
        mixed = torch.stack([p * expert(c.test.x) for p, expert in zip(pi[c.name], experts(run, c), strict=True)])
        answered[c.name] = mixed.sum(0).argmax(1).tolist()
    assert predicted(run, Vote()) == counted(answered)
    look = looked_at(run)
    look.pooled = {"vote": Vote().evidence(look).sum(0)}
    assert look.pooled["vote"][63:68].tolist() == [0] * 5  # nothing is foreseen before it is known what is expected
    look.pooled = {"vote": Vote().evidence(look).sum(0)}
    assert look.pooled["vote"][63:68].tolist() == pytest.approx(list(by_pseudo.values()), abs=1e-4)
    assert list(Vote().experts(look, "test")) == list(EXPERTS[:5])
    assert Vote().weights(look).tolist() == [pytest.approx(pi[name], abs=1e-5) for name in SIZES]


def looked_at(run: fq.Run) -> EvaluationContext:
    """The clients as one device sees itself: nobody has told it what the others' samples say."""
    federation = run.federation
    (everybody,) = federation.simulation.groups()
    return look_at(federation.simulation, federation.server.instructions(everybody), last=True)


def test_by_itself_a_device_knows_no_federation() -> None:
    look = looked_at(after((Vote(),)))
    blind = list(SIZES).index("blind")
    received = look.scores("received", "test").argmax(2)[blind]
    assert torch.equal(KNN().predictions(look, "test")[blind], received)
    assert torch.equal(FineTunedChosen().predictions(look, "test")[blind], received)
    assert Vote().weights(look)[blind].tolist() == pytest.approx([0.2] * 5)


def test_where_nobody_has_validation_samples_the_received_model_is_believed() -> None:
    usual = scenario()
    clients = [fq.Client(c.name, net, c.train, None, c.test, labels=range(3)) for c in usual.clients]
    run = fq.run(fq.Scenario("blind", clients, usual.training), "fedavg", engine="vectorised", alone=False,
                 readouts=["received", "knn", "fine-tuned-chosen", "vote"])  # fmt: skip
    last = {e.readout: e.counts for e in run.evaluations if e.split == "test" and e.round == ROUNDS}
    assert torch.equal(last["knn"], last["received"])
    assert torch.equal(last["fine-tuned-chosen"], last["received"])
    assert int(last["vote"].sum()) == 11 + 8 + 6


def test_clients_that_are_alike_vote_alike_and_others_by_themselves() -> None:
    """Where experts are as good for all, own weights foresee less than common ones; where each has its own, more."""
    random = torch.Generator().manual_seed(0)
    noise = torch.rand(20, 2, 24, generator=random, dtype=torch.float64)  # clients, experts, samples
    better = torch.zeros(20, 2, 1, dtype=torch.float64)
    better[::2, 0], better[1::2, 1] = 1.0, 1.0
    prior, mask = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.ones(20, 24)
    for table, own in ((noise, False), (noise + better, True)):
        few, many = (float(left_out(table, mask, torch.arange(24), prior, c, 10).sum()) for c in (2.0, 1e6))
        assert (few > many) == own


def unpadded(view: ClientStack) -> ClientStack:
    """One client with its own samples and no more."""

    def tables(split: str) -> PaddedSplit:
        table = view.data(split)
        return table.samples(0, int(table.count[0]))

    return replace(view, tables=tables)


@pytest.mark.parametrize("readout", CHOOSING)
def test_padding_has_no_voice(readout: Readout) -> None:
    """A client answers alike beside clients with more samples and by itself."""
    federation = after((readout,), "vectorised").federation
    look = looked_at(after((readout,), "vectorised"))
    look.pooled = {readout.name: readout.evidence(look).sum(0)}
    together = readout.predictions(look, "test")
    for at, (_, _, tests) in enumerate(SIZES.values()):
        mine = look_at(federation.simulation, federation.server.instructions([at]), last=True)
        mine = replace(mine, received=unpadded(mine.received), adapted=unpadded(mine.adapted), pooled=look.pooled)
        assert torch.equal(readout.predictions(mine, "test")[0], together[at, :tests])


@pytest.mark.parametrize("readout", CHOOSING)
def test_test_labels_are_never_seen(readout: Readout) -> None:
    usual = scenario()

    def answered(split: str) -> Tensor:
        clients = []
        for c in usual.clients:
            parts = {"train": c.train, "validation": c.validation, "test": c.test}
            if split:
                parts[split] = fq.Split(parts[split].x, (parts[split].y + 1) % 3)
            clients.append(fq.Client(c.name, net, parts["train"], parts["validation"], parts["test"], labels=range(3)))
        run = fq.run(fq.Scenario("relabelled", clients, usual.training), "fedavg", engine="sequential", alone=False,
                     readouts=[readout], evaluate_every=ROUNDS)  # fmt: skip
        (found,) = (e.counts.sum(1) for e in run.evaluations if e.split == "test" and e.readout == readout.name)
        return found

    assert torch.equal(answered("test"), answered(""))
    assert not torch.equal(answered("validation"), answered(""))


class Hidden(nn.Module):
    """A model whose last layer is never called: its weights are used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.body(x).tanh(), self.head.weight, self.head.bias)


def test_where_features_are_not_seen_that_is_said_and_the_vote_does_without() -> None:
    with pytest.raises(
        ValueError, match=r"'knn' compares .* the unit 'head' of client 'few' is not seen .* as a layer"
    ):
        fq.run(scenario(Hidden), "fedavg", engine="sequential", alone=False, readouts=["knn"])
    run = fq.run(scenario(Hidden), "fedavg", engine="sequential", alone=False, readouts=["vote"])
    assert list(Vote().experts(looked_at(run), "test")) == ["received", "half-way", "adapted", "fine-tuned"]


def test_features_of_many_kinds_of_models() -> None:
    """The input of the last layer, sample by sample: of a plain layer, a twin, a model with further parts above."""

    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(6, 3), nn.Conv1d(1, 3, 1)  # not in the order in which they are called

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.body(x[:, None]).flatten(1)).log_softmax(1)
            return scores

    for engine in ("sequential", "vectorised"):
        for model, method, size in ((lambda: nn.Linear(2, 3), "fedavg", 2), (net, "ditto", 4), (Tail, "apfl", 6)):
            run = fq.run(scenario(model), method, engine=engine, rounds=1, alone=False, readouts=["received"])
            features = looked_at(run).features("test")
            assert features is not None
            assert features.shape == (3, 11, size)
            if size == 4:
                with torch.no_grad():
                    own = model_of(run, scenario().clients[2])[:2](scenario().clients[2].test.x)
                assert torch.allclose(features[2, :6], own, atol=1e-6)


def test_the_head_alone_is_trained_where_that_is_asked_for() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    for method in ("fedavg", "ditto", "fedrep"):
        run = fq.run(scenario(normed), method, engine="vectorised", rounds=1, alone=False, readouts=["received"])
        look, family_state = looked_at(run), run.federation.simulation.family_states[0]
        assert look.fine_tune is not None
        moved = (look.fine_tune(look.received.rows, 1, "head") != look.received.rows).any(0)
        head = torch.zeros_like(moved)
        for start, stop in family_state.family.layout.ranges[family_state.family.head.name]:
            head[start:stop] = True
        assert bool(moved.any())
        assert not bool((moved & ~head).any())


@dataclass(frozen=True)
class WithTwin(fq.methods.FedAvg):
    """FedAvg, and beside it the client's own model, which is trained alone and never sent."""

    name: ClassVar[str] = "with-twin"

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        return Parts({"shared": model, "alone": copy.deepcopy(model)}, predicts="shared")

    def local(self) -> tuple[Step, ...]:
        twin = Train(task_loss("alone"), "alone/*", when="round")
        return Install(), Train(task_loss("shared"), "shared/*"), twin

    def plan(self, state: State, roster: Roster) -> Plan:
        own = [unit for unit in roster.units if unit.startswith("alone/")]
        return super().plan(state, roster).but(nobody(own, len(roster)).units)


def test_the_model_that_is_alone_votes_where_clients_hold_one() -> None:
    run = fq.run(scenario(), WithTwin(), engine="vectorised", alone=False, readouts=["vote"], evaluate_every=ROUNDS)
    local = fq.run(scenario(), "local", engine="sequential", alone=False, readouts=["adapted"])
    said = Vote().experts(looked_at(run), "test")
    assert list(said) == list(EXPERTS)
    for at, client in enumerate(scenario().clients):
        own = probabilities(local.model(client.name), client.test.x)
        assert torch.allclose(said["alone"][at, : len(client.test)], own, atol=1e-5)


def test_models_that_a_run_trains_alone_vote_too(tmp_path: Path) -> None:
    how: dict[str, Any] = {"engine": "sequential", "readouts": ["vote"], "evaluate_every": ROUNDS}
    run = fq.run(scenario(), "fedavg", out=tmp_path / "run", **how)
    local = fq.run(scenario(), "local", alone=False, engine="sequential", readouts=["adapted"])
    said = Vote().experts(looked_at(run), "test")
    assert list(said) == list(EXPERTS)
    for at, client in enumerate(scenario().clients):
        own = probabilities(local.model(client.name), client.test.x)
        assert torch.allclose(said["alone"][at, : len(client.test)], own, atol=1e-5)
    answered = {client.name: run.predict(client.name, client.test.x).tolist() for client in scenario().clients}
    assert predicted(run, Vote()) == counted(answered)
    given = fq.run(scenario(), "fedavg", alone=local, **how)
    assert [e.counts.tolist() for e in given.evaluations] == [e.counts.tolist() for e in run.evaluations]
    without = fq.run(scenario(), "fedavg", alone=False, **how)
    assert list(Vote().experts(looked_at(without), "test")) == list(EXPERTS[:5])


def test_a_run_that_goes_on_asks_the_models_that_were_trained_alone(tmp_path: Path) -> None:
    def stop(federation: Federation, report: RoundReport) -> None:
        if report.round == ROUNDS - 2:
            raise KeyboardInterrupt

    how: dict[str, Any] = {"engine": "sequential", "readouts": ["vote"], "evaluate_every": ROUNDS}
    with pytest.raises(KeyboardInterrupt):
        fq.run(scenario(), "fedavg", out=tmp_path / "run", callbacks=[stop], **how)
    resumed = fq.resume(tmp_path / "run", scenario())
    assert list(Vote().experts(looked_at(resumed), "test")) == list(EXPERTS)
    assert predicted(resumed, Vote()) == predicted(fq.run(scenario(), "fedavg", **how), Vote())


def test_names_and_settings() -> None:
    for readout in (KNN(), KNN(4), FineTuned(), FineTuned(3), FineTuned(3, "head"), FineTunedChosen(), Vote()):
        assert named(readout.name) == readout
    assert named("fine-tuned-tail-3") is None
    with pytest.raises(ValueError, match="use the read-out 'received'"):
        named("fine-tuned-0")
    with pytest.raises(ValueError, match="give ones above 0"):
        named("knn-0")
    with pytest.raises(ValueError, match="say how many, as in 'fine-tuned-head-5'"):
        FineTuned(units="head")


def test_scores_that_are_no_logits_are_not_mixed() -> None:
    look = replace(looked_at(after((Vote(),))), logits=False)
    for readout in CHOOSING:
        with pytest.raises(ValueError, match=f"'{readout.name}' mixes probabilities, .* use the read-out 'received'"):
            readout.predictions(look, "test")
