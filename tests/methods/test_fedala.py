"""FedALA beside a plain loop."""

from __future__ import annotations

import numpy as np
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
    scenario,
    served,
    state,
    weights_of,
)
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.methods import FedALA, FedAvg

ENGINES = ("sequential", "vectorised")
SIZES = [6.0, 9.0, 4.0]
HEAD = ("2.weight", "2.bias")


def mixed(own: Weights, received: Weights, shares: Weights) -> Weights:
    return received | {n: own[n] + (received[n] - own[n]) * shares[n] for n in shares}


def one_epoch(
    own: Weights, received: Weights, shares: Weights, client: fq.Client, rate: float
) -> tuple[Weights, float]:
    """All samples as one batch; the loss is that before the step, as in the authors' code."""
    at = mixed(own, received, shares)
    g, loss = gradient(loss_of(client), at), float(loss_of(client)(at))
    return {n: (w - rate * g[n] * (received[n] - own[n])).clamp(0, 1) for n, w in shares.items()}, loss


def learnt(
    own: Weights, received: Weights, shares: Weights, client: fq.Client, rate: float, round_: int, most: int
) -> tuple[Weights, int]:
    if round_ == 1:
        return shares, 0
    losses: list[float] = []
    for _ in range(most if round_ == 2 else 1):
        shares, loss = one_epoch(own, received, shares, client, rate)
        losses.append(loss)
        if len(losses) > 10 and np.std(losses[-10:]) < 0.1:
            break
    return shares, len(losses)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("most", [5, 40])
def test_fedala_by_hand(most: int, engine: str) -> None:
    of = scenario(rounds=4, epochs=4, lr=1.0, groups=3)
    fed = federation(of, FedALA(share=1.0, rate=2.0, first_epochs=most), engine)
    received = first_weights(of)
    own = [dict(received) for _ in of.clients]
    shares = [{n: torch.ones_like(received[n]) for n in HEAD} for _ in of.clients]
    took = []
    for round_ in range(1, 5):
        for i, client in enumerate(of.clients):
            shares[i], epochs = learnt(own[i], received, shares[i], client, 2.0, round_, most)
            took.append(epochs)
            now = mixed(own[i], received, shares[i])
            for _ in range(4):
                now = moved(now, gradient(loss_of(client), now), -1.0)
            own[i] = now
        received = mean(own, SIZES)
        report = fed.step(evaluate=False)
        numbers = sum(value.numel() for value in received.values())
        assert report.traffic.total_up == report.traffic.total_down == 3 * 4 * numbers
        for i, client in enumerate(of.clients):
            kept = state(fed, i, "shares")
            torch.testing.assert_close(kept, torch.cat([shares[i][n].flatten() for n in HEAD]), atol=1e-4, rtol=1e-4)
            close(
                weights_of(fed.model(client.name)), mixed(own[i], received, shares[i]), atol=1e-4
            )  # what it begins with
    if most == 40:
        assert 10 < max(took) < 40  # the loss settled
    apart = torch.stack([state(fed, i, "shares") for i in range(3)])
    assert float(apart.min()) < 0.9  # something was kept,
    assert not torch.allclose(apart[0], apart[1], atol=1e-3)  # and each client has its own


def test_shares_of_one_are_fedavg() -> None:
    of = scenario(rounds=4, batch=2)
    ala, fedavg = federation(of, FedALA(rate=1e-9)), federation(of, FedAvg())
    for fed in (ala, fedavg):
        fed.run()
    for client in of.clients:
        close(weights_of(ala.model(client.name)), served(fedavg))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_part_of_the_samples_batch_by_batch(engine: str) -> None:
    """Of ten samples eight, two at a time: four steps on batches that hold no sample twice."""
    of = scenario((10, 10), rounds=2, batch=2, groups=2)
    seen: list[Tensor] = []
    method = FedALA(share=0.8, first_epochs=1)
    fed = federation(of, method, engine)
    fed.step(evaluate=False)
    some = FedALA._some

    def watched(self: FedALA, me: object, data: object) -> list[object]:
        batches = some(self, me, data)  # type: ignore[arg-type]
        seen.extend(batch.x for batch in batches if engine == "sequential")
        assert [len(batch.y) for batch in batches] == [2, 2, 2, 2]
        return list(batches)

    before = state(fed, 0, "shares").clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedALA, "_some", watched)
        fed.step(evaluate=False)
    assert not torch.equal(state(fed, 0, "shares"), before)
    if engine == "sequential":
        for client, at in zip(of.clients, (0, 4), strict=True):
            rows = [tuple(row.tolist()) for batch in seen[at : at + 4] for row in batch]
            assert len(set(rows)) == 8
            assert set(rows) <= {tuple(row.tolist()) for row in client.train.x}


def test_shares_rest_with_who_is_not_chosen() -> None:
    of = scenario((6, 9, 4, 5), rounds=5, share=0.5, groups=2)
    fed = federation(of, FedALA())
    for round_ in range(1, 6):
        before = [state(fed, i, "shares").clone() for i in range(4)]
        report = fed.step(evaluate=False)
        for i in set(range(4)) - set(report.participants):
            assert torch.equal(state(fed, i, "shares"), before[i]), round_


def test_fedala_refuses_what_is_fedavg_and_what_has_no_gradient() -> None:
    for settings in ({"adaptive": 0}, {"rate": 0.0}):
        with pytest.raises(ValueError, match="use the method 'fedavg'"):
            FedALA(**settings)
    plain = scenario(rounds=1)
    norms = lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))  # noqa: E731
    clients = [fq.Client(c.name, norms, c.train, c.validation, c.test) for c in plain.clients]
    with pytest.raises(ValueError, match=r"the last 1 unit\(s\) of the model of client 'c0' have buffers"):
        federation(fq.Scenario("norm", clients, plain.training, label_names=plain.label_names), FedALA())
