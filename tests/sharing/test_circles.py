"""Affinity and the circles it makes, against FedDL's equations worked out by hand."""

from __future__ import annotations

import math
import resource
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquilt.sharing import adjusted_rand, affinity, circles_by_trait, group_by_affinity, grouping, refine
from fedquilt.sharing.grouping import Linkage

steady = settings(max_examples=50, deadline=None)  # a busy machine is no failure

BOTH: list[Linkage] = ["component", "average"]


def symmetric(size: int, **pairs: float) -> Tensor:
    """A divergence matrix from its pairs: d01=0.5."""
    matrix = torch.zeros(size, size)
    for name, value in pairs.items():
        i, j = int(name[1]), int(name[2])
        matrix[i, j] = matrix[j, i] = value
    return matrix


def test_divergence_by_hand() -> None:
    # Two samples, two classes. p = (1, 0), (1/2, 1/2) and q = (1/2, 1/2), (1/2, 1/2).
    # Sample 1: m = (3/4, 1/4); p: ln(4/3); q: 1/2 ln(2/3) + 1/2 ln 2 = 1/2 ln(4/3); half the sum. Sample 2: 0.
    p, q = [[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]
    by_hand = (0.5 * (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2))) / 2
    found = affinity(torch.tensor([p, q]))
    assert found[0, 1].item() == pytest.approx(by_hand, rel=1e-6)
    assert found[0, 0] == found[1, 1] == 0


def test_answers_that_never_overlap_are_ln_2_apart() -> None:
    assert affinity(torch.eye(3)[:, None, :])[0, 2].item() == pytest.approx(math.log(2), rel=1e-6)


@steady
@given(st.integers(0, 10**6))
def test_divergence_against_the_definition(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 3, 4, generator=random, dtype=torch.float64) * 3
    p = logits.softmax(-1)
    found = affinity(p)
    for i in range(5):
        for j in range(5):
            m = (p[i] + p[j]) / 2
            literal = ((p[i] * (p[i] / m).log()).sum(-1) + (p[j] * (p[j] / m).log()).sum(-1)).mean() / 2
            assert found[i, j].item() == pytest.approx(float(literal), abs=1e-12)
    assert torch.equal(found, found.T)
    assert bool((found >= 0).all())


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    p = torch.randn(37, 11, 3).softmax(-1)
    whole = affinity(p)
    for block in (40, 500, 5000):
        monkeypatch.setitem(grouping._BLOCK, "cpu", block)
        torch.testing.assert_close(affinity(p), whole, rtol=1e-6, atol=1e-9)


def test_identical_answers_are_exactly_0_apart() -> None:
    torch.manual_seed(0)
    p = torch.randn(1, 50, 6).softmax(-1).repeat(4, 1, 1)
    assert torch.equal(affinity(p), torch.zeros(4, 4))


def test_a_client_with_nan_is_far_from_all_and_harms_nobody() -> None:
    torch.manual_seed(0)
    p = torch.randn(5, 8, 3).softmax(-1)
    p[2, 3, 1] = math.nan
    found = affinity(p)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(found[others][:, others], affinity(p[others]))
    assert found[2, others].isnan().all()
    for linkage in BOTH:
        circle, freq = group_by_affinity(found, torch.zeros(5), linkage)
        alone, freq_alone = group_by_affinity(affinity(p[others]), torch.zeros(4), linkage)
        assert adjusted_rand(circle[others], alone) == 1
        assert torch.equal(freq[others], freq_alone)
        assert (circle == circle[2]).sum() == 1
        assert freq[2] == 1


def test_2000_clients_in_seconds_and_little_memory() -> None:
    torch.manual_seed(0)
    p = torch.randn(2000, 4, 5).softmax(-1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = affinity(p)
    assert time.perf_counter() - start < 20  # under 1 s on a free core
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 < 1  # GiB; the result alone has 16 MiB
    assert found.shape == (2000, 2000)
    torch.testing.assert_close(found[1990:, 1990:], affinity(p[1990:]))


def test_grouping_by_hand() -> None:
    # pairs: 0.1, 0.2, 0.9, 0.8, 0.9, 0.9 -> mean 3.8 / 6 = 0.633; links 0-1 and 1-2 (0-2 is not one): a component
    near = symmetric(4, d01=0.1, d12=0.2, d02=0.9, d03=0.8, d13=0.9, d23=0.9)
    circle, freq = group_by_affinity(near, torch.zeros(4).long())
    assert circle.tolist() == [0, 0, 0, 1]
    assert freq.tolist() == [1, 2, 1, 1]
    assert circle.dtype == freq.dtype == torch.int64


def test_average_linkage_by_hand() -> None:
    # A chain: 0-1 0.1, 1-2 0.4, all else 1 -> mean of six pairs 4.5 / 6 = 0.75. Links 0-1, 1-2 make one component of
    # three; the average of 2 to {0, 1} is 0.7 < 0.75, so it joins as well. With 0-2 at 1.2 (mean 0.783) it is 0.8: out.
    near = symmetric(4, d01=0.1, d12=0.4, d02=1.0, d03=1.0, d13=1.0, d23=1.0)
    assert group_by_affinity(near, torch.zeros(4), "average")[0].tolist() == [0, 0, 0, 1]
    far = symmetric(4, d01=0.1, d12=0.4, d02=1.2, d03=1.0, d13=1.0, d23=1.0)
    assert group_by_affinity(far, torch.zeros(4), "component")[0].tolist() == [0, 0, 0, 1]
    circle, freq = group_by_affinity(far, torch.zeros(4), "average")
    assert circle.tolist() == [0, 0, 1, 2]
    assert freq.tolist() == [1, 1, 1, 1]  # the link 1-2 leaves the circle and does not count


def test_the_threshold_is_that_of_the_parent_group() -> None:
    # Group {0, 1, 2} has pairs 0.1, 0.5, 0.6 (mean 0.4), group {3, 4, 5} has 3, 4, 8 (mean 5): 3-4 and 3-5 are linked.
    near = torch.full((6, 6), 100.0)
    near[:3, :3] = symmetric(3, d01=0.1, d02=0.5, d12=0.6)
    near[3:, 3:] = symmetric(3, d01=3, d02=4, d12=8)
    circle, freq = group_by_affinity(near, torch.tensor([7, 7, 7, 2, 2, 2]))
    assert circle.tolist() == [0, 0, 1, 2, 2, 2]
    assert freq.tolist() == [1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("linkage", BOTH)
def test_a_group_of_two_stays_together_and_one_alone_stays_alone(linkage: Linkage) -> None:
    circle, freq = group_by_affinity(symmetric(3, d01=0.5, d02=9, d12=9), torch.tensor([4, 4, 1]), linkage)
    assert circle.tolist() == [0, 0, 1]
    assert freq.tolist() == [1, 1, 1]


@pytest.mark.parametrize("linkage", BOTH)
@pytest.mark.parametrize("level", [0.0, 0.3])
def test_clients_all_equally_far_apart_stay_together_noise_included(linkage: Linkage, level: float) -> None:
    torch.manual_seed(0)
    noise = torch.rand(5, 5) * 5e-8
    near = torch.full((5, 5), level) + noise + noise.T
    circle, freq = group_by_affinity(near.fill_diagonal_(0), torch.zeros(5), linkage)
    assert circle.tolist() == [0] * 5
    assert freq.tolist() == [4] * 5


@pytest.mark.parametrize("linkage", BOTH)
def test_identical_clients_are_never_split(linkage: Linkage) -> None:
    near = symmetric(4, d01=0, d23=0, d02=0.4, d03=0.4, d12=0.4, d13=0.4)
    assert group_by_affinity(near, torch.zeros(4), linkage)[0].tolist() == [0, 0, 1, 1]


@steady
@given(st.integers(0, 10**6), st.lists(st.integers(-1, 2), min_size=1, max_size=9), st.sampled_from(BOTH))
def test_groups_refine_their_parents(seed: int, parents: list[int], linkage: Linkage) -> None:
    size = len(parents)
    near = torch.rand(size, size, generator=torch.Generator().manual_seed(seed))
    near = (near + near.T).fill_diagonal_(0)
    circle, freq = group_by_affinity(near, torch.tensor(parents), linkage)
    for i in range(size):
        assert (circle[i] == -1) == (parents[i] == -1) == (freq[i] == 0)
        for j in range(size):
            if circle[i] == circle[j]:
                assert (parents[i] == -1) == (parents[j] == -1)
                assert parents[i] == parents[j]
    used = [c for c in circle.tolist() if c >= 0]
    assert sorted(set(used)) == list(range(len(set(used))))
    assert all(used.index(c) <= used.index(c + 1) for c in range(max(used, default=0)))
    assert bool((freq[circle >= 0] >= 1).all())


def test_traits_and_refining() -> None:
    assert circles_by_trait([2, 10, "b", None, (1, 2), 2]).tolist() == [0, 1, 2, -1, 3, 0]
    assert refine(torch.tensor([3, 3, -1, 0, 3]), ["x", "y", "x", "x", None]).tolist() == [0, 1, -1, 2, -1]


def test_rand_index() -> None:
    assert adjusted_rand(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])) == 1
    assert adjusted_rand(torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])) <= 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^affinity needs \(clients, samples, classes\) probabilities, not the shape"):
        affinity(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^client 1: its answers are not probabilities that sum to 1; take the"):
        affinity(torch.tensor([[[0.5, 0.5]], [[2.0, 1.0]]]))
    with pytest.raises(ValueError, match=r"^client 0: its answers are not probabilities"):
        affinity(torch.tensor([[[1.5, -0.5]], [[0.5, 0.5]]]))
    with pytest.raises(ValueError, match=r"^linkage 'single' is not known; take component or average$"):
        group_by_affinity(torch.zeros(1, 1), torch.zeros(1), "single")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^divergence has shape \(2, 2\); 3 parents need \(3, 3\)$"):
        group_by_affinity(torch.zeros(2, 2), torch.zeros(3))
