"""FedPAC beside a plain loop; its quadratic problem beside all supports that a solution could have."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from plain import Weights, close, federation, first_weights, gradient, mean, moved, net, scenario, weights_of
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import FedPAC
from fedquilt.methods.fedpac import mixture_for
from fedquilt.sharing import MixedUnit

ENGINES = ("sequential", "vectorised")
HEAD = ("2.weight", "2.bias")
Statistics = tuple[np.ndarray, float]  # h (classes, width) and v


def body(weights: Weights, x: Tensor) -> Tensor:
    return torch.tanh(x @ weights["0.weight"].T + weights["0.bias"])


def statistics(weights: Weights, client: fq.Client) -> Statistics:
    """Label by label, from the covariance of a head's features, as the paper has it."""
    z, y = body(weights, client.train.x).numpy().astype(np.float64), client.train.y.numpy()
    h, v = np.zeros((3, 4)), 0.0
    for label in range(3):
        mine = z[y == label]
        if len(mine):
            p = len(mine) / len(y)
            h[label] = p * mine.mean(0)
            v += p * np.trace(mine.T @ mine / len(mine)) - p**2 * (mine.mean(0) @ mine.mean(0))
    return h, v / len(y)


def best_mixture(i: int, told: list[Statistics]) -> np.ndarray:
    """The least of a' P a on the simplex: on its support S, a is in proportion to the inverse of P_S times 1."""
    k = len(told)
    problem = np.diag([v for _, v in told])
    for j in range(k):
        for m in range(k):
            problem[j, m] += ((told[i][0] - told[j][0]) * (told[i][0] - told[m][0])).sum()
    best, least = np.zeros(k), np.inf
    for size in range(1, k + 1):
        for support in map(list, combinations(range(k), size)):
            a = np.linalg.solve(problem[np.ix_(support, support)], np.ones(size))
            a = a / a.sum()
            value = a @ problem[np.ix_(support, support)] @ a
            if (a >= 0).all() and value < least:
                best, least = np.zeros(k), value
                best[support] = a
    best[best < 1e-3] = 0
    found: np.ndarray = best / best.sum()
    return found


def trained(start: Weights, client: fq.Client, known: dict[int, Tensor], lam: float) -> Weights:
    """Two epochs of the head at 0.2, then three of the body at 0.3."""
    x, y = client.train.x, client.train.y

    def plain(at: Weights) -> Tensor:
        return F.cross_entropy(body(at, x) @ at["2.weight"].T + at["2.bias"], y)

    def near(at: Weights) -> Tensor:
        z = body(at, x)
        target = torch.stack([known.get(int(label), z[n].detach()) for n, label in enumerate(y)])
        return plain(at) + lam * F.mse_loss(z, target)

    now = dict(start)
    for _ in range(2):
        now = now | {n: v for n, v in moved(now, gradient(plain, now), -0.2).items() if n in HEAD}
    for _ in range(3):
        now = now | {n: v for n, v in moved(now, gradient(near, now), -0.3).items() if n not in HEAD}
    return now


def told_by(weights: Weights, client: fq.Client) -> dict[int, tuple[Tensor, int]]:
    labels = sorted(set(client.train.y.tolist()))
    parts = {label: client.train.x[client.train.y == label] for label in labels}
    return {label: (body(weights, x).mean(0), len(x)) for label, x in parts.items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedpac_by_hand(share: float, engine: str) -> None:
    sizes = (12, 30, 9, 20)
    of = scenario(sizes, rounds=5, epochs=3, share=share, groups=2)
    fed = federation(of, FedPAC(lam=0.7, head_epochs=2, head_rate=0.2), engine)
    start = first_weights(of)
    shared = {n: v for n, v in start.items() if n not in HEAD}
    heads: list[Weights] = [{n: start[n] for n in HEAD} for _ in of.clients]  # what each has, mixed or its own
    sent: dict[int, Weights] = {}
    told: dict[int, Statistics] = {}
    known: dict[int, Tensor] = {}
    rows = []
    for _ in range(5):
        report = fed.step(evaluate=False)
        bodies, prototypes = [], []
        for i in report.participants:
            told[i] = statistics(shared | heads[i], of.clients[i])  # of the received body, before training
            now = trained(shared | heads[i], of.clients[i], known, 0.7)
            sent[i] = {n: now[n] for n in HEAD}
            bodies.append({n: now[n] for n in shared})
            prototypes.append(told_by(now, of.clients[i]))
        shared = mean(bodies, [float(sizes[i]) for i in report.participants])
        for label in {label for said in prototypes for label in said}:
            pairs = [said[label] for said in prototypes if label in said]
            total = sum(n for _, n in pairs)
            known[label] = sum((n / total * value for value, n in pairs), torch.zeros(4))
        heard = sorted(told)
        for at, i in enumerate(heard):  # all from what was sent, none from what was mixed a moment ago
            row = best_mixture(at, [told[j] for j in heard])
            rows.append(row)
            heads[i] = mean([sent[j] for j in heard], row.tolist())
        for i, client in enumerate(of.clients):
            close(weights_of(fed.model(client.name)), shared | heads[i], atol=1e-4)
    assert any(((row > 0.05) & (row < 0.95)).sum() > 1 for row in rows)  # heads were mixed, in unequal parts


def test_traffic_is_a_model_prototypes_and_statistics() -> None:
    of = scenario((12, 30, 9), rounds=2)
    fed = federation(of, FedPAC())
    model = 3 * 4 + 4 + 4 * 3 + 3
    labels = [len(set(client.train.y.tolist())) for client in of.clients]
    mixed = known = 0  # at first no heads were sent, and no label is known
    for _ in range(2):
        report = fed.step(evaluate=False)
        statistics_up = 3 * (3 * 4 + 1 + 3)  # h, v and how many samples each label has
        assert report.traffic.total_up == 4 * (3 * model + sum(labels) * 4 + statistics_up)
        assert report.traffic.total_down == 4 * (3 * (3 * 4 + 4) + mixed * (4 * 3 + 3) + 3 * known * 4)
        mixed, known = int(fed.server.plan.receives("2").sum()), 3
    assert mixed


def test_the_quadratic_problem_is_solved_exactly() -> None:
    draw = np.random.default_rng(0)
    for k in (2, 3, 5, 7):
        told = [(draw.normal(size=(3, 4)) * 0.1, float(draw.uniform(0.001, 0.1))) for _ in range(k)]
        h = torch.tensor(np.stack([h for h, _ in told]), dtype=torch.float32)
        v = torch.tensor([v for _, v in told], dtype=torch.float32)
        for i in range(k):
            assert mixture_for(i, h, v).tolist() == pytest.approx(best_mixture(i, told).tolist(), abs=1e-3)
    nothing = mixture_for(0, torch.zeros(3, 2, 2), torch.zeros(3))  # models that say nothing at all, alike
    assert nothing.tolist() == pytest.approx([1 / 3] * 3)


def test_clients_that_agree_share_their_heads_and_others_do_not() -> None:
    of = scenario((60,) * 4, rounds=6, batch=20, groups=2)  # every second one names classes otherwise
    few = scenario((60,) * 4, rounds=6, batch=20)
    mixed = []
    for each in (of, few):
        fed = federation(each, FedPAC(), "vectorised")
        fed.run()
        plan = fed.server.plan["2"]
        assert isinstance(plan, MixedUnit)
        mixed.append(float(plan.matrix[0, 1] + plan.matrix[0, 3]))
    assert mixed[0] < 0.1 < mixed[1]


def test_heads_of_unlike_shapes_and_features_of_unlike_widths() -> None:
    plain = scenario((6, 9, 4, 5), rounds=2)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3))

    def some(other: object) -> fq.Scenario:
        clients = [
            fq.Client(c.name, other if i > 1 else net, c.train, c.validation, c.test)  # type: ignore[arg-type]
            for i, c in enumerate(plain.clients)
        ]
        return fq.Scenario("two", clients, plain.training, label_names=plain.label_names)

    with pytest.raises(ValueError, match=r"features have 2 unlike widths.* 'fedproto'"):
        federation(some(wide), FedPAC())
    with pytest.raises(ValueError, match="aligns no features"):
        FedPAC(lam=0)
    fed = federation(
        some(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 3))), FedPAC()
    )
    fed.run()
    heads = [fed.server.plan[unit] for unit in ("2", "3")]
    assert all(isinstance(head, MixedUnit) for head in heads)
    assert (heads[1].matrix[:2] == 0).all()  # type: ignore[union-attr]
