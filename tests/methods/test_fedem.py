"""FedEM, FedAvg+ and Ditto's choice of lambda, each beside a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from plain import Weights, close, federation, flat, gradient, loss_of, mean, moved, net, scenario, state, weights_of
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.core.evaluation import look_at
from fedquilt.methods import Ditto, FedAvg, FedAvgPlus, FedEM
from fedquilt.testing import check_method

ENGINES = ("sequential", "vectorised")


def component(fed: fq.Federation, number: int, client: int = 0) -> Weights:
    """The server's value of a component, in the circle of a client."""
    layout = fed.simulation.family_states[0].family.layout
    found: Weights = {}
    for unit in layout.units:
        if unit.name.startswith(f"component_{number}/"):
            held = fed.server.held(unit.name, torch.tensor([client]))[0].cpu()
            found |= {n.removeprefix(f"component_{number}."): v for n, v in layout.named(unit.name, held).items()}
    return found


def shares(client: fq.Client, components: list[Weights], pi: list[float]) -> list[list[float]]:
    """q of every training sample, one sample after another."""
    found = []
    for x, y in zip(client.train.x, client.train.y, strict=True):
        said = [functional_call(net(), w, (x[None],))[0].log_softmax(0) for w in components]
        joint = [p * math.exp(float(logs[int(y)])) for p, logs in zip(pi, said, strict=True)]
        found.append([value / sum(joint) for value in joint])
    return found


def weighted(client: fq.Client, q: list[float], at: Weights) -> Weights:
    """The gradient of the mean of weighted losses: divided by all samples, not by the sum of weights."""

    def loss(weights: Weights) -> Tensor:
        losses = F.cross_entropy(functional_call(net(), weights, (client.train.x,)), client.train.y, reduction="none")
        return (torch.tensor(q) * losses).sum() / len(q)

    return gradient(loss, at)


@pytest.mark.parametrize("engine", ENGINES)
def test_fedem_by_hand_with_half_the_clients(engine: str) -> None:
    of = scenario((6, 9, 4, 7), rounds=3, epochs=2, groups=2, share=0.5)
    fed = federation(of, FedEM(components=2), engine)
    models = [component(fed, m) for m in range(2)]
    assert not torch.equal(flat(models[0]), flat(models[1]))  # equal ones would stay equal for ever
    pi = [[0.5, 0.5] for _ in of.clients]
    for round_ in range(1, 4):
        chosen = fed.sample_clients(round_)
        copies: list[list[Weights]] = [[], []]
        for i in chosen:
            q = shares(of.clients[i], models, pi[i])
            pi[i] = [sum(row[m] for row in q) / len(q) for m in range(2)]
            for m in range(2):
                now = dict(models[m])
                for _ in range(2):  # whole batches: an epoch is a step; q stays as it was
                    now = moved(now, weighted(of.clients[i], [row[m] for row in q], now), -0.3)
                copies[m].append(now)
        models = [mean(copies[m], [of.clients[i].samples for i in chosen]) for m in range(2)]
        report = fed.step()
        for m in range(2):
            close(component(fed, m), models[m])
        for i in range(4):
            assert state(fed, i, "pi").tolist() == pytest.approx(pi[i], abs=1e-5)
        size = 4 * sum(value.numel() for value in models[0].values())
        assert report.traffic.total_up == report.traffic.total_down == 2 * 2 * size  # each component, nothing else
        (seen,) = (e for e in report.evaluations if (e.readout, e.split) == ("received", "test"))
        for i, client in enumerate(of.clients):
            said = [functional_call(net(), w, (client.test.x,)) for w in models]
            mixed = pi[i][0] * said[0].softmax(1) + pi[i][1] * said[1].softmax(1)
            right = int((mixed.argmax(1) == client.test.y).sum())
            assert int(seen.counts[i].diagonal().sum()) == right
            assert seen.losses is not None
            assert float(seen.losses[i]) == pytest.approx(float(F.nll_loss(mixed.log(), client.test.y)), rel=1e-4)


def test_probabilities_are_mixed_and_not_logits() -> None:
    """One component is sure of class 0 by far, the other is rather for class 1; the mixture is mostly the other."""
    of = scenario((6,), rounds=1)
    fed = federation(of, FedEM(components=2))
    family_state = fed.simulation.family_states[0]
    rows, layout = family_state.store.all(), family_state.family.layout
    rows.zero_()
    for unit, bias in (("component_0/2", [50.0, 0.0, 0.0]), ("component_1/2", [0.0, 2.0, 0.0])):
        layout.take(rows, unit)[0, -3:] = torch.tensor(bias)
    layout.take(rows, "pi")[0] = torch.tensor([0.2, 0.8])
    look = look_at(fed.simulation, fed.server.instructions([0]))
    answer = look.scores("adapted", "test").exp()[0, 0]
    sure = torch.tensor([0.0, 2.0, 0.0]).softmax(0)
    assert answer.tolist() == pytest.approx([0.2 + 0.8 * float(sure[0]), 0.8 * float(sure[1]), 0.8 * float(sure[2])])
    assert int(answer.argmax()) == 1  # 0.2 * 50 against 0.8 * 2: logits would say 0


@pytest.mark.parametrize("engine", ENGINES)
def test_where_all_are_of_one_component_it_is_fedavg_and_the_other_rests(engine: str) -> None:
    of = scenario((6, 9, 4), rounds=2, batch=2, epochs=2)
    fed, plain = federation(of, FedEM(components=2), engine), federation(of, FedAvg(), engine)
    family_state = fed.simulation.family_states[0]
    rows = family_state.store.all()
    family_state.family.layout.take(rows, "pi")[:] = torch.tensor([1.0, 0.0])
    other = component(fed, 1)
    for _ in range(2):
        fed.step(evaluate=False), plain.step(evaluate=False)
    close(component(fed, 0), weights_of(plain.model("c0")))
    close(component(fed, 1), other)
    with pytest.raises(ValueError, match="use the method 'fedavg'"):
        FedEM(components=1)


def test_fedem_tells_groups_that_name_classes_otherwise_apart() -> None:
    of = scenario((40, 40, 40, 40), rounds=40, groups=2, batch=10)
    fed = federation(of, FedEM(components=2), "vectorised", evaluate_every=40)
    (seen,) = (e for _ in range(40) for e in fed.step().evaluations if (e.readout, e.split) == ("received", "test"))
    pi = [state(fed, i, "pi").argmax().item() for i in range(4)]
    assert pi[0] == pi[2] != pi[1] == pi[3]
    plain = federation(of, FedAvg(), "vectorised", evaluate_every=40)
    (bar,) = (e for _ in range(40) for e in plain.step().evaluations if (e.readout, e.split) == ("received", "test"))
    assert seen.score > bar.score + 0.2


def test_fedavg_plus_is_fedavg_read_out_otherwise() -> None:
    of = scenario((6, 9, 4), rounds=2, batch=2)
    plus = fq.run(of, "fedavg-plus", engine="sequential", alone=False)
    plain = fq.run(of, "fedavg", engine="sequential", alone=False, readouts=["received", "fine-tuned-chosen"])
    assert plus.summary["readout"] == "fine-tuned-chosen"
    assert plus.last_rows("fine-tuned-chosen") == plain.last_rows("fine-tuned-chosen")
    assert plus.bytes_up == plain.bytes_up
    for client in of.clients:
        close(weights_of(plus.model(client.name)), weights_of(plain.model(client.name)), atol=0)


# --- Ditto, with lambda chosen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_ditto_chooses_lambda_by_hand(engine: str) -> None:
    of = scenario((6, 9, 4), rounds=4, epochs=2)
    blind = of.clients[2]
    clients = [*of.clients[:2], fq.Client(blind.name, net, blind.train, None, blind.test)]
    of = fq.Scenario("plain", clients, of.training, label_names=of.label_names)
    lams = (2.0, 0.1, 1.0)
    fed, one = federation(of, Ditto(lams=lams), engine), federation(of, Ditto(lam=2.0), engine)
    w = weights_of(fed.model("c0"))
    v = [dict(w) for _ in clients]
    chosen = []
    for _ in range(4):
        copies = []
        for i, client in enumerate(clients):
            tries = []
            for lam in lams:
                now = v[i]
                for _ in range(2):
                    g = gradient(loss_of(client), now)
                    now = {n: now[n] - 0.3 * (g[n] + lam * (now[n] - w[n])) for n in w}
                tries.append(now)
            best = 0
            if len(client.validation):
                x, y = client.validation.x, client.validation.y
                losses = [float(F.cross_entropy(functional_call(net(), t, (x,)), y)) for t in tries]
                best = losses.index(min(losses))
            chosen.append(best)
            v[i] = tries[best]
            shared = dict(w)
            for _ in range(2):
                shared = moved(shared, gradient(loss_of(client), shared), -0.3)
            copies.append(shared)
        w = mean(copies, [6, 9, 4])
        report, other = fed.step(evaluate=False), one.step(evaluate=False)
        assert report.traffic.total_up == other.traffic.total_up  # what is tried stays home
        for i, client in enumerate(clients):
            close(weights_of(fed.model(client.name)), v[i])
    assert len(set(chosen)) > 1
    assert set(chosen[2::3]) == {0}  # without validation samples: the first


def test_no_choice_is_refused() -> None:
    for lams in ((1.0,), (1.0, 0.0)):
        with pytest.raises(ValueError, match="give several finite ones above 0, or one as lam"):
            Ditto(lams=lams)


@pytest.mark.parametrize("method", [FedEM(components=2), FedAvgPlus(), Ditto(lams=(0.1, 1.0))])
def test_checked(method: fq.Method) -> None:
    assert len(check_method(method)) >= 7
