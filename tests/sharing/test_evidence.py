"""What sharing would cost: by hand, by a plain loop over explicit vectors, and where noise is all there is."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from fedquilt.sharing import adjusted_rand
from fedquilt.sharing.evidence import Evidence, agglomerate, costs, evidence, pooled


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(directions: Tensor, noise: Tensor) -> Evidence:
    return Evidence(directions @ directions.T, noise)


def cost_of(members: list[int], directions: Tensor, noise: Tensor, samples: Tensor, lam: float) -> float:
    """The cost of one circle from the vectors themselves, client by client."""
    total = sum(float(samples[i]) for i in members)
    middle = sum(samples[i] / total * directions[i] for i in members)
    left = sum((float(samples[j]) / total) ** 2 * float(noise[j]) for j in members)
    return sum(lam * float(((middle - directions[i]) ** 2).sum()) + left for i in members)


def by_loop(directions: Tensor, noise: Tensor, samples: Tensor, lam: float) -> list[list[int]]:
    """Join the two circles whose joining saves most, until none saves anything."""
    circles = [[i] for i in range(len(samples))]
    while True:
        best, pair = 0.0, None
        for a, b in combinations(range(len(circles)), 2):
            change = cost_of(circles[a] + circles[b], directions, noise, samples, lam)
            change -= sum(cost_of(circles[c], directions, noise, samples, lam) for c in (a, b))
            if change < best:
                best, pair = change, (a, b)
        if pair is None:
            return sorted(sorted(c) for c in circles)
        circles = [c for i, c in enumerate(circles) if i not in pair] + [circles[pair[0]] + circles[pair[1]]]


def test_two_clients_of_unlike_sizes_by_hand() -> None:
    found = exact(torch.tensor([[2.0], [-2.0]]), torch.tensor([1.0, 4.0]))
    # weights 3/4 and 1/4: the mean is 1, so 1 and 9 are lost; noise 9/16 * 1 + 1/16 * 4 = 13/16 each
    shared = costs(found, torch.tensor([3.0, 1.0]), torch.tensor([0, 0]), lam=0.5)
    assert shared.tolist() == pytest.approx([0.5 + 13 / 16, 4.5 + 13 / 16])
    assert costs(found, torch.tensor([3.0, 1.0]), torch.tensor([0, 1]), lam=0.5).tolist() == [1.0, 4.0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lam", [0.1, 0.5, 2.0])
def test_agglomeration_is_the_plain_loop(seed: int, lam: float) -> None:
    rng = draw(seed)
    directions = torch.randn(7, 3, generator=rng, dtype=torch.float64)
    noise = 2 * torch.rand(7, generator=rng, dtype=torch.float64)
    samples = torch.randint(5, 50, (7,), generator=rng).double()
    circle = agglomerate(exact(directions, noise), samples, lam)
    found = sorted([i for i in range(7) if circle[i] == c] for c in set(circle.tolist()))
    assert found == by_loop(directions, noise, samples, lam)


def test_without_the_correction_for_noise_lengths_would_be_too_long() -> None:
    truth, rng = torch.full((20,), 0.5), draw(1)
    lengths, naive, noises = [], [], []
    for _ in range(400):
        one, other = (truth + torch.randn(2, 20, generator=rng) for _ in range(2))
        found = evidence(one, other)
        lengths.append(float(found.products[0, 0]))
        naive.append(float(((one + other) / 2)[0].square().sum()))
        noises.append(float(found.noise[0]))
    assert sum(lengths) / 400 == pytest.approx(5.0, abs=0.5)  # |truth|^2
    assert sum(noises) / 400 == pytest.approx(10.0, abs=0.6)  # 20 numbers of variance 1/2
    assert sum(naive) / 400 > 14


def test_groups_are_found_and_noise_alone_splits_nothing() -> None:
    truth = torch.arange(24) % 3
    centres = torch.randn(3, 60, generator=draw(3))
    for common in (False, True):
        rng = draw(4)
        middle = centres[torch.zeros_like(truth) if common else truth]
        one, other = (middle + 1.5 * torch.randn(24, 60, generator=rng) for _ in range(2))
        circle = agglomerate(evidence(one, other), torch.ones(24), lam=0.3)
        if common:
            assert circle.unique().tolist() == [0]
        else:
            assert adjusted_rand(circle, truth) == 1


def test_a_client_that_shouts_or_sends_no_numbers_moves_nobody_else() -> None:
    truth = torch.arange(12) % 2
    rng = draw(5)
    middle = torch.randn(2, 40, generator=rng)[truth]
    one, other = (middle + torch.randn(12, 40, generator=rng) for _ in range(2))
    honest = agglomerate(evidence(one, other), torch.ones(12), lam=0.3)
    assert adjusted_rand(honest[1:], truth[1:]) == 1
    for lie in (1e6 * torch.randn(40, generator=rng), torch.full((40,), torch.nan)):
        told = one.clone()
        told[0] = lie
        found = evidence(told, other)
        assert bool(found.products.isfinite().all())
        assert bool(found.noise.isfinite().all())
        circle = agglomerate(found, torch.ones(12), lam=0.3)
        assert adjusted_rand(circle[1:], truth[1:]) == 1


def test_pooled_gains_by_hand_and_with_a_liar() -> None:
    gain = pooled(torch.tensor([0.1, 0.3, 9.0]), torch.tensor([2.0, 2.0, 0.0]))  # the third judged nothing
    assert gain.mean == pytest.approx(0.2)
    assert gain.error == pytest.approx(0.1)
    honest = torch.tensor([0.1, 0.2, 0.15, 0.12, 0.18, 0.14, 0.16])
    lied = torch.cat([honest, torch.tensor([-100.0])])
    assert pooled(lied, torch.ones(8)).mean > 0.1
    assert pooled(lied, torch.ones(8)).sure > 2
    assert pooled(torch.tensor([0.5]), torch.ones(1)).sure == 0  # nobody to compare with
