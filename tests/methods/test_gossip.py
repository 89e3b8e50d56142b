"""Gossip beside a plain loop over peers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain import Weights, close, federation, first_weights, gradient, loss_of, mean, moved, scenario, weights_of
from torch import nn

import fedquilt as fq
from fedquilt.methods import FedAvg, Gossip
from fedquilt.methods.gossip import weights
from fedquilt.sharing import MixedUnit

SIZES = (6, 9, 4, 5)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_ring_by_hand(engine: str) -> None:
    of = scenario(SIZES, rounds=4)
    fed = federation(of, Gossip(), engine)
    z: list[Weights] = [first_weights(of)] * 4
    numbers = 4 * sum(value.numel() for value in z[0].values())
    for _ in range(4):
        x = [moved(z[i], gradient(loss_of(client), z[i]), -0.3) for i, client in enumerate(of.clients)]
        z = [mean([x[i - 1], x[i], x[(i + 1) % 4]], [1, 1, 1]) for i in range(4)]
        report = fed.step(evaluate=False)
        assert (report.traffic.total_up, report.traffic.total_down) == (4 * numbers, 4 * numbers)
    for i in range(4):
        close(weights_of(fed.model(f"c{i}")), z[i])
    assert not torch.equal(next(fed.model("c0").parameters()), next(fed.model("c2").parameters()))


def test_who_does_not_take_part_is_mixed_as_it_was_last() -> None:
    of = scenario(SIZES, rounds=3, share=0.5)
    fed = federation(of, Gossip())
    x: list[Weights] = [first_weights(of)] * 4
    for round_ in range(1, 4):
        z = [mean([x[i - 1], x[i], x[(i + 1) % 4]], [1, 1, 1]) for i in range(4)]
        for i in fed.sample_clients(round_):
            x[i] = moved(z[i], gradient(loss_of(of.clients[i]), z[i]), -0.3)
        fed.step(evaluate=False)
    for i in range(4):
        close(weights_of(fed.model(f"c{i}")), mean([x[i - 1], x[i], x[(i + 1) % 4]], [1, 1, 1]))


def test_with_everybody_it_is_fedavg_of_clients_that_have_equally_many_samples() -> None:
    of = scenario((5, 5, 5, 5), rounds=3)
    average = federation(of, FedAvg())
    for method in (Gossip("complete"), Gossip(reach=2)):  # two to either side are all
        fed = federation(of, method)
        for _ in range(3):
            fed.step(evaluate=False)
        if average.round == 0:
            average.run()
        close(weights_of(fed.model("c1")), weights_of(average.model("c1")))


def test_any_graph_keeps_the_mean_and_brings_models_together() -> None:
    near = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    near = (near | near.T) & ~torch.eye(9, dtype=torch.bool)
    w = weights(near)
    w = w + torch.diag(1 - w.sum(1))
    torch.testing.assert_close(w, w.T)
    assert bool((w >= 0).all())
    x = torch.randn(9, 3)
    torch.testing.assert_close((w @ x).mean(0), x.mean(0))
    assert (torch.linalg.matrix_power(w, 200) @ x).std(0).max() < 1e-3


def test_a_random_ring_is_drawn_anew_and_is_the_same_again() -> None:
    of = scenario((5,) * 7, rounds=3)
    plans = []
    for _ in range(2):
        fed = federation(of, Gossip("random"))
        plans.append([fed.step(evaluate=False).plan for _ in range(3)])
    assert plans[0] == plans[1]
    assert plans[0][0] != plans[0][1]
    for plan in plans[0]:
        unit = plan["0"]
        assert isinstance(unit, MixedUnit)
        assert ((unit.matrix > 0).sum(1) == 3).all()


def test_declared_peers() -> None:
    of = scenario((5, 5, 5), rounds=1)
    peers = ["c1", "", "c1"]
    clients = tuple(
        fq.Client(c.name, c.model, c.train, c.validation, c.test, traits={"peers": peers[i]})
        for i, c in enumerate(of.clients)
    )
    unit = federation(replace(of, clients=clients), Gossip("declared")).server.plan["0"]
    assert isinstance(unit, MixedUnit)
    third = 1 / 3  # the one in the middle has two neighbours
    wanted = torch.tensor([[2 * third, third, 0], [third, third, third], [0, third, 2 * third]])
    torch.testing.assert_close(unit.matrix, wanted)
    peers[0] = "c9"
    with pytest.raises(ValueError, match="names the peer 'c9', which is no client"):
        federation(
            replace(of, clients=(fq.Client("a", clients[0].model, clients[0].train, traits={"peers": "c9"}),)),
            Gossip("declared"),
        )


def test_units_are_mixed_among_neighbours_of_one_shape() -> None:
    of = scenario((5, 5, 5), rounds=1)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))

    other = fq.Client("wide", wide, of.clients[0].train)
    fed = federation(replace(of, clients=(*of.clients, other)), Gossip("complete"))
    unit = fed.server.plan["0"]
    assert isinstance(unit, MixedUnit)
    torch.testing.assert_close(unit.matrix[:3, :3], torch.full((3, 3), 1 / 3))
    assert unit.matrix[3].tolist() == [0, 0, 0, 1]
    fed.step(evaluate=False)


def test_refused() -> None:
    with pytest.raises(ValueError, match="use the method 'local'"):
        Gossip(reach=0)
    with pytest.raises(ValueError, match="topology is ring, random, complete or declared"):
        Gossip("star")  # type: ignore[arg-type]
