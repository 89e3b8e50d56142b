"""APFL beside a plain loop."""

from __future__ import annotations

import pytest
import torch
from plain import (
    Weights,
    close,
    federation,
    first_weights,
    gradient,
    loss_of,
    mean,
    moved,
    net,
    scenario,
    state,
    weights_of,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import APFL, FedAvg

ENGINES = ("sequential", "vectorised")
SIZES = [6.0, 9.0, 4.0]


def mixed(v: Weights, w: Weights, a: Tensor) -> Weights:
    return {name: a * v[name] + (1 - a) * w[name] for name in w}


def scores(mix: str, v: Weights, w: Weights, a: Tensor, x: Tensor) -> Tensor:
    module = net()

    def run(at: Weights) -> Tensor:
        out: Tensor = functional_call(module, at, (x,))
        return out

    return run(mixed(v, w, a)) if mix == "weights" else a * run(v) + (1 - a) * run(w)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mix", ["weights", "logits"])
def test_apfl_by_hand(mix: str, engine: str) -> None:
    of = scenario(rounds=4, epochs=2, groups=3)  # who name classes otherwise have something to adapt to
    fed = federation(of, APFL(alpha=0.3, mix=mix), engine)  # type: ignore[arg-type]
    w = first_weights(of)
    own = [dict(w) for _ in of.clients]
    parts = [torch.tensor(0.3) for _ in of.clients]
    for _ in range(4):
        copies = []
        for i, client in enumerate(of.clients):
            x, y = client.train.x, client.train.y
            a = parts[i].clone().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(scores(mix, own[i], w, a, x), y), a)
            if mix == "weights":  # the product in the paper's equation
                g = gradient(loss_of(client), mixed(own[i], w, parts[i]))
                product = sum((((own[i][n] - w[n]) * g[n]).sum() for n in w), torch.tensor(0.0))
                torch.testing.assert_close(slope, product, atol=1e-6, rtol=1e-4)
            parts[i] = (parts[i] - 0.3 * slope).clamp(0, 1)
            shared = dict(w)
            for _ in range(2):  # whole batches: an epoch is a step
                now, a = dict(shared), parts[i]
                shared = moved(shared, gradient(loss_of(client), shared), -0.3)
                g = gradient(lambda v, w=now, a=a, x=x, y=y: F.cross_entropy(scores(mix, v, w, a, x), y), own[i])  # type: ignore[misc]
                own[i] = moved(own[i], g, -0.3)
            copies.append(shared)
        w = mean(copies, SIZES)
        report = fed.step(evaluate=False)
        assert report.traffic.total_up == report.traffic.total_down == 3 * 4 * sum(v.numel() for v in w.values())
        for i, client in enumerate(of.clients):
            close(weights_of(fed.model(client.name)), own[i])
            torch.testing.assert_close(state(fed, i, "alpha")[0], parts[i], atol=1e-5, rtol=1e-4)
    assert all(abs(float(a) - 0.3) > 1e-3 for a in parts)
    ids = fed.fleet.crews[0].family.ids
    ((received, _),) = fed.fleet.looks({ids: fed.server.down(ids)})
    look = fq.readouts.Look(received, received, predict=fed.method.predicts, memory={}, fine_tune=None, last=True)
    found = look.scores("received", "test")
    for i, client in enumerate(of.clients):  # with the new w
        expected = scores(mix, own[i], w, parts[i], client.test.x)
        torch.testing.assert_close(found[i, : len(expected)], expected, atol=1e-5, rtol=1e-4)


def test_apfl_s_shared_model_is_fedavg_s() -> None:
    of = scenario(rounds=3, batch=2)
    apfl, fedavg = federation(of, APFL(adaptive=False)), federation(of, FedAvg())
    for fed in (apfl, fedavg):
        fed.run()
    for unit in ("0", "2"):
        shared = apfl.server.held(f"shared/{unit}", torch.tensor([0]))
        torch.testing.assert_close(shared, fedavg.server.held(unit, torch.tensor([0])))
    assert state(apfl, 0, "alpha").item() == 0.5


def test_weights_and_logits_are_one_for_linear_models() -> None:
    plain = scenario(rounds=3)
    clients = [fq.Client(c.name, lambda: nn.Linear(3, 3), c.train, c.validation, c.test) for c in plain.clients]
    of = fq.Scenario("linear", clients, plain.training, label_names=plain.label_names)
    one, other = (federation(of, APFL(mix=mix)) for mix in ("weights", "logits"))
    for fed in (one, other):
        fed.run()
    for client in of.clients:
        close(weights_of(one.model(client.name)), weights_of(other.model(client.name)))


def test_running_statistics_need_logits() -> None:
    plain = scenario(rounds=1)
    norms = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    clients = [fq.Client(c.name, lambda: norms, c.train, c.validation, c.test) for c in plain.clients]
    of = fq.Scenario("norms", clients, plain.training, label_names=plain.label_names)
    with pytest.raises(ValueError, match=r"client 'c0' has running statistics \(BatchNorm1d\).* take mix=logits"):
        federation(of, APFL())
    fed = federation(of, APFL(mix="logits"))
    fed.step(evaluate=False)
    assert float(fed.model("c0").get_buffer("1.running_mean").abs().sum()) > 0


def test_apfl_that_mixes_nothing() -> None:
    with pytest.raises(ValueError, match="use the method 'fedavg'"):
        APFL(alpha=0)
    with pytest.raises(ValueError, match="use the method 'local'"):
        APFL(alpha=1)
    with pytest.raises(ValueError, match="no part of a mixture"):
        APFL(alpha=1.5)
