"""Clustered FL beside a plain loop."""

from __future__ import annotations

import pytest
import torch
from plain import Weights, close, federation, first_weights, flat, gradient, loss_of, mean, moved, scenario, weights_of

from fedquilt.methods import Clustered, FedAvg
from fedquilt.methods.clustered import _halves

ENGINES = ("sequential", "vectorised")
SIZES = (8, 9, 12, 10, 11, 8)  # clients 0 and 3, 1 and 4, 2 and 5 name classes alike


@pytest.mark.parametrize("engine", ENGINES)
def test_clustered_by_hand_until_three_groups_are_apart(engine: str) -> None:
    of, eps_1, eps_2 = scenario(SIZES, rounds=40, groups=3, lr=1.0), 0.3, 0.3
    fed = federation(of, Clustered(eps_1=eps_1, eps_2=eps_2, after=3), engine)
    groups, models = [list(range(6))], [first_weights(of)]
    splits = 0
    for round_ in range(1, 41):
        now: list[tuple[list[int], Weights]] = []
        for group, w in zip(groups, models, strict=True):
            copies = {i: moved(w, gradient(loss_of(of.clients[i]), w), -1.0) for i in group}
            updates = {i: flat(copies[i]) - flat(w) for i in group}
            together = flat(mean([copies[i] for i in group], [SIZES[i] for i in group])) - flat(w)
            parts = [group]
            farthest = max(float(update.norm()) for update in updates.values())
            if round_ > 3 and len(group) > 2 and float(together.norm()) < eps_1 and farthest > eps_2:
                parts, splits = halves(updates), splits + 1
            now += [(part, mean([copies[i] for i in part], [SIZES[i] for i in part])) for part in parts]
        groups, models = [part for part, _ in now], [w for _, w in now]
        fed.step(evaluate=False)
        circle = fed.server.state["circle"]
        assert {tuple((circle == c).nonzero()[:, 0].tolist()) for c in circle.unique()} == {tuple(g) for g in groups}
        for group, w in now:
            for i in group:
                close(weights_of(fed.model(f"c{i}")), w, atol=1e-3)
    assert splits == 2  # the second one of a group whose members are not the first clients
    assert sorted(groups) == [[0, 3], [1, 4], [2, 5]]
    told = fed.method.describe(fed.server.state, fed.server.plan, fed.server.roster)
    assert told == {"clients_in_clusters": [2, 2, 2]}


def halves(updates: dict[int, torch.Tensor]) -> list[list[int]]:
    """Complete linkage by hand: join the two groups whose farthest members are nearest, until two are left."""
    parts = [[i] for i in updates]

    def far(one: list[int], other: list[int]) -> float:
        return max(1 - float(torch.cosine_similarity(updates[i], updates[j], dim=0)) for i in one for j in other)

    while len(parts) > 2:
        pairs = [(a, b) for a in range(len(parts)) for b in range(a)]
        a, b = min(pairs, key=lambda pair: far(parts[pair[0]], parts[pair[1]]))
        parts = [part for at, part in enumerate(parts) if at not in (a, b)] + [sorted(parts[a] + parts[b])]
    return sorted(parts)


@pytest.mark.parametrize("splits", [True, False])
def test_whether_a_group_splits_is_decided_by_who_went_farthest(splits: bool) -> None:
    of = scenario(SIZES, rounds=1, groups=3, lr=1.0)
    w = first_weights(of)
    far = [float(flat(gradient(loss_of(client), w)).norm()) for client in of.clients]  # a step of size 1
    eps_2 = (max(far) + sum(far) / len(far)) / 2 if splits else 1.01 * max(far)
    fed = federation(of, Clustered(eps_1=1e6, eps_2=eps_2, after=0))
    fed.step(evaluate=False)
    assert len(fed.server.state["circle"].unique()) == 1 + splits


def test_halves_are_those_of_complete_linkage() -> None:
    angles = torch.deg2rad(torch.tensor([0.0, 25.0, 58.0, 95.0]))
    moves = torch.stack([angles.cos(), angles.sin()], 1)
    assert _halves(moves).tolist() == [0, 0, 1, 1]  # single linkage follows the chain and leaves the last one alone
    assert _halves(7 * moves.flip(0)).tolist() == [0, 0, 1, 1]


def test_before_anything_splits_it_is_fedavg() -> None:
    of = scenario(rounds=3, batch=2)
    one, other = federation(of, Clustered()), federation(of, FedAvg())
    for _ in range(3):
        assert one.step(evaluate=False).traffic.total_up == other.step(evaluate=False).traffic.total_up
    close(weights_of(one.model("c0")), weights_of(other.model("c0")))


def test_nothing_splits_while_not_all_of_a_group_are_heard() -> None:
    of = scenario(SIZES, rounds=3, groups=3, share=0.5)
    fed = federation(of, Clustered(eps_1=1e6, eps_2=0.0, after=0))
    fed.run()
    assert fed.server.state["circle"].tolist() == [0] * 6


def test_clustered_that_never_splits() -> None:
    with pytest.raises(ValueError, match="use the method 'fedavg'"):
        Clustered(eps_1=0)
    with pytest.raises(ValueError, match="must not be below 0"):
        Clustered(eps_2=-1.0)
