"""APFL and pFedMe, each beside a plain loop."""

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
    order_of,
    scenario,
    served,
    state,
    weights_of,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import APFL, FedAvg, PFedMe

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
    ids = fed.simulation.family_states[0].family.ids
    ((received, _),) = fed.simulation.looks({ids: fed.server.instructions(ids)})
    look = fq.readouts.EvaluationContext(
        received, received, predict=fed.method.predicts, memory={}, fine_tune=None, last=True
    )
    found = look.scores("received", "test")
    for i, client in enumerate(of.clients):  # with the new w
        expected = scores(mix, own[i], w, parts[i], client.test.x)
        torch.testing.assert_close(found[i, : len(expected)], expected, atol=1e-5, rtol=1e-4)


def test_apfl_s_part_of_its_own_is_never_more_than_all_nor_less_than_nothing() -> None:
    fed = federation(scenario((6, 9, 4), rounds=6, groups=3, lr=4.0), APFL())
    parts = []
    for _ in range(6):
        fed.step(evaluate=False)
        parts += [float(state(fed, i, "alpha")) for i in range(3)]
    assert {0.0, 1.0} <= set(parts)  # steps so long go beyond both ends
    assert all(0 <= part <= 1 for part in parts)


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


# --- pFedMe -----------------------------------------------------------------------------------------------------------


def value_of(fed: fq.Federation, part: str) -> Weights:
    layout = fed.simulation.family_states[0].family.layout
    found: Weights = {}
    for unit in layout.units:
        if unit.name.startswith(f"{part}/"):
            held = fed.server.held(unit.name, torch.tensor([0]))[0]
            found |= {n.removeprefix(f"{part}."): value for n, value in layout.named(unit.name, held).items()}
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_pfedme_by_hand_with_several_batches(engine: str) -> None:
    of, module, lam, rate, beta = scenario((6, 9, 4), rounds=3, batch=3, lr=0.1), net(), 4.0, 0.1, 1.5
    fed = federation(of, PFedMe(lam=lam, steps=3, rate=rate, beta=beta), engine)
    w = first_weights(of)
    for round_ in range(1, 4):
        copies, personal = [], []
        for i, client in enumerate(of.clients):
            own, theta = dict(w), dict(w)
            for part in order_of(fed, i, round_).split(3):

                def loss(at: Weights, part: Tensor = part, client: fq.Client = client) -> Tensor:
                    return F.cross_entropy(functional_call(module, at, (client.train.x[part],)), client.train.y[part])

                for _ in range(3):  # steps on one batch
                    g = gradient(loss, theta)
                    theta = {n: theta[n] - rate * (g[n] + lam * (theta[n] - own[n])) for n in w}
                own = {n: own[n] - 0.1 * lam * (own[n] - theta[n]) for n in w}
            copies.append(own)
            personal.append(theta)
        w = moved(w, moved(mean(copies, [1.0, 1.0, 1.0]), w, -1), beta)  # alike, whatever their samples
        report = fed.step(evaluate=False)
        close(value_of(fed, "shared"), w)
        assert report.traffic.total_up == 3 * 4 * sum(v.numel() for v in w.values())
        for client, theta in zip(of.clients, personal, strict=True):  # what predicts has moved with each round
            close(weights_of(fed.model(client.name)), theta)


def test_pfedme_with_one_step_on_one_batch_is_fedavg_with_another_rate() -> None:
    me = federation(scenario((6, 6), rounds=3, lr=0.1), PFedMe(lam=4.0, steps=1, rate=0.1))
    fedavg = federation(scenario((6, 6), rounds=3, lr=0.1 * 4.0 * 0.1), FedAvg())
    for fed in (me, fedavg):
        fed.run()
    close(value_of(me, "shared"), served(fedavg))


def test_pfedme_refuses_what_never_moves_and_what_never_settles() -> None:
    for lam, beta in ((15.0, 0.0), (0.0, 1.0)):
        with pytest.raises(ValueError, match="shared model that never moves: use the method 'local'"):
            PFedMe(lam=lam, beta=beta)
    with pytest.raises(ValueError, match=r"rate above 0 and below 2 / lam"):
        PFedMe(lam=15.0, rate=0.2)
    with pytest.raises(ValueError, match=r"'pfedme' reads gradients off the way"):
        federation(scenario(rounds=1, momentum=0.9), PFedMe())
    with pytest.raises(ValueError, match=r"'pfedme' puts weights in place .* weight_decay=0"):
        federation(scenario(rounds=1, weight_decay=0.1), PFedMe())
