"""FedDyn and FedNova, each beside a plain loop."""

from __future__ import annotations

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
    mean,
    moved,
    net,
    order_of,
    scenario,
    served,
    state,
)
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import FedAvg, FedDyn, FedNova

ENGINES = ("sequential", "vectorised")


# --- FedDyn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_feddyn_by_hand_with_half_the_clients(engine: str) -> None:
    of, alpha = scenario((6, 9, 4, 7), rounds=4, epochs=2, share=0.5), 0.2
    fed = federation(of, FedDyn(alpha=alpha), engine)
    w = first_weights(of)
    h = {name: torch.zeros_like(value) for name, value in w.items()}
    own = [dict(h) for _ in of.clients]
    for round_ in range(1, 5):
        chosen, copies = fed.sample_clients(round_), []
        for i in chosen:
            theta = dict(w)
            for _ in range(2):  # whole batches: an epoch is a step
                g = gradient(loss_of(of.clients[i]), theta)
                theta = {n: theta[n] - 0.3 * (g[n] - own[i][n] + alpha * (theta[n] - w[n])) for n in w}
            own[i] = {n: own[i][n] - alpha * (theta[n] - w[n]) for n in w}
            copies.append(theta)
        h = {n: h[n] - alpha / 4 * sum(theta[n] - w[n] for theta in copies) for n in w}
        w = moved(mean(copies, [1.0, 1.0]), h, -1 / alpha)  # alike, whatever their samples
        report = fed.step(evaluate=False)
        close(served(fed), w)
        for i in range(4):  # those who were not chosen keep theirs
            torch.testing.assert_close(state(fed, i, "h_i"), flat(own[i]), atol=1e-5, rtol=1e-4)
        assert report.traffic.total_up == report.traffic.total_down == 2 * 4 * flat(w).numel()  # as FedAvg


def test_feddyn_s_private_state_is_the_gradient_where_training_ended() -> None:
    of = scenario((6, 9), rounds=2, epochs=200)
    fed = federation(of, FedDyn(alpha=1.0), "vectorised")
    for _ in range(2):
        fed.step(evaluate=False)
    layout, rows = fed.simulation.family_states[0].family.layout, fed.simulation.family_states[0].store.all()
    for i, client in enumerate(of.clients):
        theta = {
            name.removeprefix("model."): value
            for name, value in layout.split_parameters(rows[i, : layout.parameters]).items()
        }
        g = flat(gradient(loss_of(client), theta))
        torch.testing.assert_close(state(fed, i, "h_i"), g, atol=1e-4, rtol=1e-3)


def test_feddyn_without_alpha() -> None:
    with pytest.raises(ValueError, match="use the method 'fedavg'"):
        FedDyn(alpha=0)
    with pytest.raises(ValueError, match="push clients apart"):
        FedDyn(alpha=-1)


# --- FedNova ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_fednova_by_hand_with_half_the_clients(engine: str) -> None:
    sizes = (8, 2, 5, 11)  # 4, 1, 3 and 6 steps
    of, module = scenario(sizes, rounds=4, batch=2, share=0.5), net()
    fed = federation(of, FedNova(), engine)
    w = first_weights(of)
    seen = set()
    for round_ in range(1, 5):
        chosen = fed.sample_clients(round_)
        gradients: list[Weights] = []
        taus: list[int] = []
        for i in chosen:
            client, theta = of.clients[i], dict(w)
            batches = order_of(fed, i, round_).split(2)
            for part in batches:

                def loss(at: Weights, part: Tensor = part, client: fq.Client = client) -> Tensor:
                    return F.cross_entropy(functional_call(module, at, (client.train.x[part],)), client.train.y[part])

                theta = moved(theta, gradient(loss, theta), -0.3)
            taus.append(len(batches))
            gradients.append({n: (w[n] - theta[n]) / (0.3 * len(batches)) for n in w})  # d_i
        p = [sizes[i] / sum(sizes[j] for j in chosen) for i in chosen]
        effective = sum(share * tau for share, tau in zip(p, taus, strict=True))
        w = moved(w, mean(gradients, p), -0.3 * effective)
        seen.update(taus)
        report = fed.step(evaluate=False)
        close(served(fed), w)
        assert report.traffic.total_up == 2 * (4 * flat(w).numel() + 4)  # a model, and a number of steps
        assert report.traffic.total_down == 2 * 4 * flat(w).numel()
    assert len(seen) > 1


def test_fednova_with_as_many_steps_for_everyone_is_fedavg() -> None:
    of = scenario((6, 9, 4), rounds=3, epochs=2)  # whole batches
    nova, fedavg = federation(of, FedNova()), federation(of, FedAvg())
    for fed in (nova, fedavg):
        fed.run()
    close(served(nova), served(fedavg))


def test_fednova_is_not_fedavg_where_steps_differ() -> None:
    of = scenario((12, 2), rounds=1, batch=2)
    nova, fedavg = federation(of, FedNova()), federation(of, FedAvg())
    for fed in (nova, fedavg):
        fed.run()
    assert float((flat(served(nova)) - flat(served(fedavg))).abs().max()) > 1e-3


def test_fednova_wants_plain_sgd() -> None:
    with pytest.raises(ValueError, match=r"'fednova' reads gradients off the way .* momentum=0"):
        federation(scenario(rounds=1, momentum=0.9), FedNova())
