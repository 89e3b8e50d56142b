"""Partitions: disjoint, covering what they promise, never empty, the same for the same seed, and they end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.data.dirichlet import dirichlet, pachinko
from fedquilt.data.label_table import LabelTable
from fedquilt.data.partition import (
    Partition,
    by_label_sets,
    by_subject,
    cohort_sets,
    iid,
    label_streams,
    quantity_skew,
    specialists,
    subset,
)

LABELS = st.lists(st.integers(0, 4), min_size=12, max_size=80)
SEED = st.integers(0, 50)


def check(p: Partition, n: int, covers: bool = True, at_least: int = 1) -> None:
    dealt = np.concatenate(list(p)) if len(p) else np.zeros(0, int)
    assert len(np.unique(dealt)) == len(dealt), "a sample is on two clients"
    assert dealt.min(initial=0) >= 0
    assert dealt.max(initial=0) < n
    assert min(len(part) for part in p) >= at_least
    if covers:
        assert len(dealt) == n


def same(a: Partition, b: Partition) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@given(LABELS, st.integers(1, 12), SEED)
def test_iid_deals_every_label_evenly(y: list[int], clients: int, seed: int) -> None:
    p = iid(y, clients, seed)
    check(p, len(y))
    counts = p.table().counts
    assert (counts.max(0) - counts.min(0) <= 1).all()
    assert same(p, iid(y, clients, seed))


@given(LABELS, st.integers(1, 10), st.sampled_from([1e-6, 0.05, 0.4, 5.0]), SEED, st.sampled_from([None, 1]))
@settings(deadline=None)
def test_dirichlet_covers_everything_and_leaves_nobody_out(
    y: list[int], clients: int, alpha: float, seed: int, groups: int | None
) -> None:
    p = dirichlet(y, clients, alpha, groups, seed=seed)
    check(p, len(y))
    assert same(p, dirichlet(y, clients, alpha, groups, seed=seed))


def test_dirichlet_keeps_a_minimum_where_shares_are_extreme() -> None:
    p = dirichlet([0] * 60 + [1] * 60, clients=10, alpha=1e-8, at_least=12)
    check(p, 120, at_least=12)


def test_dirichlet_in_groups_keeps_the_mixture_of_a_group() -> None:
    y = np.repeat(np.arange(4), 3000)
    counts = dirichlet(y, clients=5, alpha=0.5, groups=2, seed=1).table().counts
    classes = np.random.default_rng(1).permutation(4)
    for a, b in (classes[:2], classes[2:]):  # inside a group both labels go the same way
        assert np.abs(counts[:, a] - counts[:, b]).max() < 250
    assert np.abs(counts[:, classes[0]] - counts[:, classes[2]]).max() > 500


def test_a_small_alpha_makes_clients_differ_more() -> None:
    y = np.repeat(np.arange(5), 200)

    def spread(alpha: float) -> float:
        counts = dirichlet(y, 10, alpha, seed=3).table().counts
        return float((counts.max(1) / counts.sum(1)).mean())

    assert spread(0.1) > spread(1.0) > spread(100.0)


@given(LABELS, st.integers(1, 8), SEED)
@settings(deadline=None)
def test_pachinko_deals_everything_in_equal_amounts(y: list[int], clients: int, seed: int) -> None:
    p = pachinko(y, [label // 2 for label in y], clients, seed=seed)
    check(p, len(y))
    sizes = [len(part) for part in p]
    assert max(sizes) - min(sizes) <= 1


def test_pachinko_clients_prefer_super_classes() -> None:
    y = np.repeat(np.arange(20), 100)
    counts = pachinko(y, y // 4, clients=10, alpha=0.1, beta=10, seed=0).table().counts
    top = counts.reshape(10, 5, 4).sum(2)  # (clients, super-classes)
    assert (top.max(1) / top.sum(1)).mean() > 0.5
    inside = counts.reshape(10, 5, 4)[0, top[0].argmax()]
    assert inside.min() > 0  # all labels of the preferred super-class


@given(st.integers(2, 12), st.data(), SEED)
def test_cohort_sets_differ_and_use_labels_evenly(classes: int, data: st.DataObject, seed: int) -> None:
    labels = data.draw(st.integers(1, classes - 1))
    cohorts = data.draw(st.integers(1, classes))
    sets = cohort_sets(classes, cohorts, labels, seed)
    assert len(set(sets)) == cohorts
    assert all(len(set(s)) == labels for s in sets)
    if cohorts == classes:
        assert set(np.bincount(np.concatenate(sets), minlength=classes)) == {labels}


def test_all_labels_are_one_cohort() -> None:
    assert cohort_sets(9, 9, 9) == [tuple(range(9))]


@given(SEED, st.integers(2, 4), st.integers(1, 3))
def test_label_sets_give_equal_amounts(seed: int, labels: int, per_set: int) -> None:
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(5), 40))
    sets = [s for s in cohort_sets(5, 5, labels, seed) for _ in range(per_set)]
    p = by_label_sets(y, sets, seed=seed)
    check(p, len(y), covers=False)
    counts = p.table().counts
    assert set(counts[counts > 0]) == {40 // (labels * per_set)}
    assert all(set(np.flatnonzero(row)) == set(s) for row, s in zip(counts, sets, strict=True))
    assert same(p, by_label_sets(y, sets, seed=seed))
    check(by_label_sets(y, sets, everything=True, seed=seed), len(y))


def test_label_sets_say_what_is_scarce() -> None:
    with pytest.raises(ValueError, match="label 1 has 2 samples for 3 clients"):
        by_label_sets([0] * 30 + [1] * 2, [{0, 1}] * 3)
    with pytest.raises(ValueError, match="too few for 7 each"):
        by_label_sets([0] * 30 + [1] * 20, [{0, 1}] * 3, per_label=7)


def test_specialists_are_the_thesis_fragments() -> None:
    extra = [4, 1, 4, 1, 3, 2, 2, 3, 4, 3]
    y = np.repeat(np.arange(10), [(10 + t) * 6 for t in extra])
    p = specialists(y, extra)
    check(p, len(y))
    expected = np.full((10, 10), 6) + np.diag([6 * t for t in extra])
    assert np.array_equal(p.table().counts, expected)


def test_specialists_refuse_a_missing_class() -> None:
    with pytest.raises(ValueError, match="2 numbers of extra fragments for labels up to 3"):
        specialists([0, 1, 2, 3], extra=[1, 1])


def test_by_subject_is_one_client_each_and_can_leave_small_ones_out() -> None:
    subjects, y = [3, 3, 1, 3, 9], [0, 1, 1, 0, 0]
    p = by_subject(subjects, y)
    assert p.names == ("1", "3", "9")
    check(p, 5)
    assert by_subject(subjects, y, at_least=2).names == ("3",)
    with pytest.raises(ValueError, match="the most any has is 3"):
        by_subject(subjects, y, at_least=4)


@given(st.integers(10, 200), st.integers(1, 10), st.sampled_from([0.01, 1.0, 100.0]), SEED)
def test_quantity_skew_covers_and_keeps_a_minimum(n: int, clients: int, alpha: float, seed: int) -> None:
    y = [i % 3 for i in range(n)]
    check(quantity_skew(y, clients, alpha, at_least=1, seed=seed), n)


@given(SEED, st.sampled_from([None, 0.3]))
def test_streams_are_disjoint_between_clients_and_repeat_only_when_used_up(seed: int, alpha: float | None) -> None:
    y = np.repeat(np.arange(3), 40)
    sets = [{0, 1}, {1, 2}]
    streams = label_streams(y, sets, rounds=4, per_label=5, alpha=alpha, seed=seed)
    everything = [set(np.concatenate(client)) for client in streams]
    assert not everything[0] & everything[1]
    for client, owned in zip(streams, sets, strict=True):
        assert len(client) == 4
        for part in client:
            assert len(set(part)) == len(part)
            assert set(y[part]) == owned
        if alpha is None:
            assert sum(map(len, client)) == 40
    if alpha is None:  # 4 rounds of 5 fit client 0's 20 samples of label 1: nothing comes twice
        ones = np.concatenate([part[y[part] == 1] for part in streams[0]])
        assert len(set(ones)) == 20
    long = label_streams(y, sets, rounds=9, per_label=15, seed=seed)
    assert all(len(part) == 30 for part in long[1])


@given(LABELS, st.sampled_from([0.05, 0.5, 1.0]), SEED)
def test_a_subset_keeps_every_label(y: list[int], fraction: float, seed: int) -> None:
    kept = subset(y, fraction, seed)
    assert set(np.asarray(y)[kept]) == set(y)
    assert len(set(kept)) == len(kept)
    if fraction == 1:
        assert len(kept) == len(y)


def test_impossible_wishes_are_refused_not_looped_over() -> None:
    with pytest.raises(ValueError, match="3 samples cannot give 4 clients 1 each"):
        dirichlet([0, 1, 2], clients=4)
    with pytest.raises(ValueError, match="cannot give 2 clients 3 each"):
        quantity_skew([0] * 5, clients=2, at_least=3)
    with pytest.raises(ValueError, match="must be above 0"):
        dirichlet([0] * 9, clients=2, alpha=0)
    with pytest.raises(ValueError, match="groups=3: give 1 to 1"):
        dirichlet([0] * 9, clients=2, groups=3)
    with pytest.raises(ValueError, match="10 cohorts over 9 labels"):
        cohort_sets(9, 10, 3)
    with pytest.raises(ValueError, match="one whole number, 0 or more"):
        iid([0, -1], clients=1)


def test_a_partition_prints_its_table_and_draws_it(tmp_path: Path) -> None:
    p = by_label_sets([0, 0, 1, 1], [{0}, {0, 1}], everything=True).named(["ann", "bob"], ["cat", "dog"])
    assert str(p).splitlines() == ["    cat dog  all", "ann   1   ·    1", "bob   1   2    3", "all   2   2    4"]
    pytest.importorskip("matplotlib")
    p.plot(tmp_path / "table.png", title="ann and bob")
    assert (tmp_path / "table.png").stat().st_size > 1000
    LabelTable(np.zeros((2, 2), int), ("a", "b"), ("x", "y")).plot()
