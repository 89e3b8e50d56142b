"""FedAMP beside a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from plain import (
    Weights,
    close,
    federation,
    first_weights,
    flat,
    gradient,
    loss_of,
    moved,
    net,
    scenario,
    served,
    weights_of,
)
from torch import nn

import fedquilt as fq
from fedquilt.methods import FedAMP, FedAvg, Local
from fedquilt.sharing import MixedUnit

ENGINES = ("sequential", "vectorised")


def trained(start: Weights, client: fq.Client, mu: float, epochs: int) -> Weights:
    now = dict(start)
    for _ in range(epochs):
        g = gradient(loss_of(client), now)
        now = {n: now[n] - 0.3 * (g[n] + mu * (now[n] - start[n])) for n in now}
    return now


def mixtures(models: list[Weights | None], alpha: float, sigma: float) -> list[Weights | None]:
    """u_i, pair by pair, of those who were ever heard."""
    found: list[Weights | None] = []
    for i, mine in enumerate(models):
        if mine is None:
            found.append(None)
            continue
        rest, other = 1.0, {n: torch.zeros_like(v) for n, v in mine.items()}
        for j, theirs in enumerate(models):
            if j != i and theirs is not None:
                distance = float((flat(mine).double() - flat(theirs).double()).square().sum())
                xi = alpha * math.exp(-distance / sigma) / sigma
                rest, other = rest - xi, moved(other, theirs, xi)
        found.append(moved(other, mine, rest))
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_fedamp_by_hand(engine: str) -> None:
    of = scenario(rounds=4, epochs=3, groups=3)  # more than one step, or nothing would be seen of the pull to u_i
    alpha, sigma, mu = 0.2, 0.5, 0.7
    fed = federation(of, FedAMP(mu=mu, sigma=sigma, alpha=alpha), engine)
    received: list[Weights | None] = [first_weights(of) for _ in of.clients]
    for round_ in range(4):
        pairs = zip(received, of.clients, strict=True)
        own: list[Weights | None] = [trained(u, client, mu, 3) for u, client in pairs if u is not None]
        received = mixtures(own, alpha, sigma)
        report = fed.step(evaluate=False)
        numbers = 4 * sum(value.numel() for value in first_weights(of).values())
        assert report.traffic.total_up == 3 * numbers  # a model up, and one down from the second round on
        assert report.traffic.total_down == (3 * numbers if round_ else 0)
        for client, u in zip(of.clients, received, strict=True):
            assert u is not None
            close(weights_of(fed.model(client.name)), u)  # the mixture is installed: what is received is u_i
    plan = fed.server.plan["0"]
    assert isinstance(plan, MixedUnit)
    shares = plan.matrix[~torch.eye(3, dtype=torch.bool)]
    assert float(shares.max()) > 1.5 * float(shares.min())  # attention: whoever is nearer counts for more


@pytest.mark.parametrize("engine", ENGINES)
def test_fedamp_with_some_clients_mixes_what_the_others_sent_last(engine: str) -> None:
    of = scenario((6, 9, 4, 5), rounds=6, epochs=2, share=0.5, groups=2)
    alpha, sigma, mu = 0.15, 0.5, 0.4
    fed = federation(of, FedAMP(mu=mu, sigma=sigma, alpha=alpha), engine)
    start = first_weights(of)
    last: list[Weights | None] = [None] * 4
    received: list[Weights | None] = [None] * 4
    stale = 0
    for _ in range(6):
        report = fed.step(evaluate=False)
        for i in report.participants:
            last[i] = trained(received[i] or start, of.clients[i], mu, 2)
        received = mixtures(last, alpha, sigma)
        stale += sum(model is not None for i, model in enumerate(last) if i not in report.participants)
        for i, client in enumerate(of.clients):
            close(weights_of(fed.model(client.name)), received[i] or start)
    assert stale > 2


def test_equal_weights_are_fedavg() -> None:
    """As sigma grows all are alike: of K clients each gets 1 / K of all, and with equal samples that is FedAvg."""
    of = scenario((6, 6, 6), rounds=3, batch=2)
    fedavg = federation(of, FedAvg())
    fedavg.run()
    equal = FedAMP(mu=0.0, sigma=3e9, alpha=1e9), FedAMP(mu=0.0, similarity="cosine", sigma=1e-9)
    for method in equal:
        amp = federation(of, method)
        amp.run()
        for client in of.clients:
            close(weights_of(amp.model(client.name)), served(fedavg))


def test_those_who_are_far_apart_are_alone() -> None:
    of = scenario(rounds=3, groups=3)
    amp, local = federation(of, FedAMP(mu=0.0, sigma=1e-6)), federation(of, Local())
    for fed in (amp, local):
        fed.run()
    for client in of.clients:
        close(weights_of(amp.model(client.name)), weights_of(local.model(client.name)))


def test_heuristic_mixtures_are_softmax_of_cosines() -> None:
    of = scenario(rounds=1, groups=3)
    fed = federation(of, FedAMP(similarity="cosine", sigma=5.0, own=0.25))
    start = first_weights(of)
    fed.step(evaluate=False)
    w = [flat(trained(start, client, 0.1, 1)) for client in of.clients]
    plan = fed.server.plan["2"]
    assert isinstance(plan, MixedUnit)
    for i in range(3):
        loud = {j: math.exp(5 * float(w[i] @ w[j] / (w[i].norm() * w[j].norm()))) for j in range(3) if j != i}
        expected = [0.25 if j == i else 0.75 * loud[j] / sum(loud.values()) for j in range(3)]
        assert plan.matrix[i].tolist() == pytest.approx(expected, rel=1e-4)


def test_who_names_classes_alike_is_mixed_with_each_other() -> None:
    of = scenario((30,) * 6, rounds=8, batch=10, groups=2)
    fed = federation(of, FedAMP(), "vectorised")
    fed.run()
    plan = fed.server.plan["0"]
    assert isinstance(plan, MixedUnit)
    own_group = torch.tensor([[(i - j) % 2 == 0 and i != j for j in range(6)] for i in range(6)])
    other_group = torch.tensor([[(i - j) % 2 == 1 for j in range(6)] for i in range(6)])
    assert float(plan.matrix[own_group].min()) > 2 * float(plan.matrix[other_group].max())


def test_unlike_architectures_are_never_mixed() -> None:
    plain = scenario((6, 9, 4, 5), rounds=2)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3))

    clients = [
        fq.Client(c.name, wide if i > 1 else net, c.train, c.validation, c.test) for i, c in enumerate(plain.clients)
    ]
    fed = federation(fq.Scenario("two", clients, plain.training, label_names=plain.label_names), FedAMP())
    fed.run()
    for unit in ("0", "2"):
        plan = fed.server.plan[unit]
        assert isinstance(plan, MixedUnit)
        assert (plan.matrix > 0).tolist() == [[i // 2 == j // 2 for j in range(4)] for i in range(4)]


def test_a_copy_that_is_not_finite_is_in_no_mixture() -> None:
    of = scenario(rounds=3)
    fed = federation(of, FedAMP())
    fed.step(evaluate=False)
    handed = fed.simulation.run

    def broken(down: object) -> object:
        up = handed(down)  # type: ignore[arg-type]
        up.blocks[0].value[1] = torch.nan
        return up

    fed.simulation.run = broken  # type: ignore[method-assign,assignment]
    fed.step(evaluate=False)
    assert all(bool(torch.isfinite(v).all()) for c in of.clients for v in weights_of(fed.model(c.name)).values())
    assert fed.server.refused.tolist() == [0, 1, 0]


def test_fedamp_refuses_what_is_no_mixture() -> None:
    with pytest.raises(ValueError, match=r"3 clients, others could get more than everything; .* sigma / 2 = 0.5"):
        federation(scenario(), FedAMP(sigma=1.0, alpha=1.0))  # defaults elsewhere
    with pytest.raises(ValueError, match="give sigma too"):
        FedAMP(alpha=1.0)
    with pytest.raises(ValueError, match="use the method 'local'"):
        FedAMP(similarity="cosine", own=1.0)
    with pytest.raises(ValueError, match="similarity is distance or cosine"):
        FedAMP(similarity="norm")  # type: ignore[arg-type]
