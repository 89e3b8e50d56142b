"""Clustering of updates: finds what is there, keeps ids, and does not flap."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedquilt.sharing import adjusted_rand, cluster_updates
from fedquilt.sharing.clustering import cosine_distance


def cohorts(count: int, each: int, noise: float, seed: int = 0, size: int = 60) -> tuple[Tensor, Tensor]:
    """Updates around `count` directions, and who belongs to which."""
    random = torch.Generator().manual_seed(seed)
    truth = torch.arange(count * each) % count
    centres = torch.randn(count, size, generator=random)
    return centres[truth] + noise * torch.randn(count * each, size, generator=random), truth


def degrees(*angles: float) -> Tensor:
    turned = torch.tensor(angles, dtype=torch.float64) * math.pi / 180
    return torch.stack([turned.cos(), turned.sin()], 1)


def test_cosine_distance_by_hand() -> None:
    distance = cosine_distance(torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    expected = [0, 1, 2, 1 - math.sqrt(0.5), 1]
    assert distance[0].tolist() == pytest.approx(expected)
    assert distance[4].tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_cohorts_are_found_without_their_number(count: int, noise: float) -> None:
    updates, truth = cohorts(count, 6, noise)
    updates *= torch.rand(len(truth), 1) * 9 + 1  # how far a client went says nothing about its cohort
    assert adjusted_rand(cluster_updates(updates), truth) == 1
    assert adjusted_rand(cluster_updates(updates, number=count), truth) == 1


@pytest.mark.parametrize("seed", range(3))
def test_one_cohort_is_not_cut_up(seed: int) -> None:
    updates, _ = cohorts(1, 20, 1.0, seed)
    assert cluster_updates(updates).tolist() == [0] * 20


def test_noise_alone_is_one_cluster() -> None:
    assert cluster_updates(torch.randn(20, 500, generator=torch.Generator().manual_seed(0))).tolist() == [0] * 20


@pytest.mark.parametrize("k", [1, 2])
def test_very_few_clients(k: int) -> None:
    assert cluster_updates(torch.eye(k)).tolist() == [0] * k
    assert cluster_updates(torch.eye(k), number=5).tolist() == list(range(k))


def test_ids_follow_the_earlier_clustering() -> None:
    updates, truth = cohorts(3, 5, 0.3)
    names = torch.tensor([20, 4, 11])
    assert torch.equal(cluster_updates(updates, previous=names[truth]), names[truth])
    # Most, not all, were known under an id; one client had none.
    before = names[truth]
    before[0], before[1] = -1, 20
    assert torch.equal(cluster_updates(updates, previous=before), names[truth])


def test_a_new_cluster_takes_a_free_id() -> None:
    updates, truth = cohorts(3, 5, 0.3)
    before = torch.tensor([0, 1, 0])[truth]  # the cohorts 0 and 2 were one circle
    found = cluster_updates(updates, previous=before)
    assert set(found[truth == 1].tolist()) == {1}
    assert sorted(set(found.tolist())) == [0, 1, 2]
    found = cluster_updates(updates, previous=before, reserved=[2, 3])
    assert sorted(set(found.tolist())) == [0, 1, 4]


def test_a_client_in_between_stays_where_it_was() -> None:
    # Cohorts at 0 and 90 degrees, the last client between them, a little nearer to the second.
    updates = degrees(0, 1, 2, 3, 90, 89, 88, 87, 46)
    before = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0])
    assert cluster_updates(updates, number=2, previous=before, hysteresis=0).tolist()[-1] == 1
    assert cluster_updates(updates, number=2, previous=before, hysteresis=0.1).tolist()[-1] == 0
    # Clearly nearer: it moves.
    updates = degrees(0, 1, 2, 3, 90, 89, 88, 87, 60)
    assert cluster_updates(updates, number=2, previous=before, hysteresis=0.1).tolist()[-1] == 1


def test_flapping_is_damped() -> None:
    moves = {0.0: 0, 0.2: 0}
    for hysteresis in moves:
        ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0])
        for turn in range(10):
            angle = 45 + (2 if turn % 2 else -2)
            new = cluster_updates(degrees(0, 1, 2, 3, 90, 89, 88, 87, angle), 2, ids, hysteresis)
            moves[hysteresis] += int((new != ids).sum())
            ids = new
    assert moves == {0.0: 9, 0.2: 0}


def test_an_outlier_leaves_for_a_circle_of_its_own() -> None:
    updates = degrees(0, 1, 2, 3, 180)
    assert cluster_updates(updates, number=2, previous=torch.zeros(5)).tolist() == [0, 0, 0, 0, 1]


def test_a_broken_update_does_not_break_the_clustering() -> None:
    updates, truth = cohorts(2, 6, 0.3)
    updates[3] = math.nan
    found = cluster_updates(updates, number=3)
    good = torch.arange(12) != 3
    assert adjusted_rand(found[good], truth[good]) == 1


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^updates have shape \(3,\); give one row per client$"):
        cluster_updates(torch.zeros(3))
    with pytest.raises(ValueError, match=r"^number=0 clusters cannot hold anybody; give 1 or more, or None"):
        cluster_updates(torch.eye(3), number=0)
    with pytest.raises(ValueError, match=r"^hysteresis=1 must be from 0 \(move at once\) to below 1$"):
        cluster_updates(torch.eye(3), hysteresis=1)
    with pytest.raises(ValueError, match=r"^previous has shape \(2,\) for 3 updates; give one id each$"):
        cluster_updates(torch.eye(3), previous=torch.zeros(2))
