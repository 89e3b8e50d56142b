"""Splits inside a client: disjoint, covering, and without leaks; what a leak is worth on real data."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.data.splits import Parts, leaks, random_split, time_split

SHARES = st.sampled_from([(0.6, 0.1, 0.3), (0.75, 0.0, 0.25), (1.0, 0.0, 0.0), (0.34, 0.33, 0.33)])


def disjoint(parts: Parts) -> bool:
    joined = np.concatenate(parts)
    return len(np.unique(joined)) == len(joined)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), SHARES, st.integers(0, 20))
def test_a_random_split_covers_everything_once(y: list[int], shares: tuple[float, float, float], seed: int) -> None:
    parts = random_split(y, shares, seed)
    assert disjoint(parts)
    assert sum(map(len, parts)) == len(y)
    assert set(np.asarray(y)[parts.train]) == set(y)  # every label can be learned
    for a, b in zip(parts, random_split(y, shares, seed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_random_split_takes_its_share_of_each_label() -> None:
    y = np.repeat([0, 1], [40, 20])
    parts = random_split(y, (0.5, 0.25, 0.25))
    assert [np.bincount(y[p]).tolist() for p in parts] == [[20, 10], [10, 5], [10, 5]]


def test_rare_labels_do_not_starve_validation_and_test() -> None:
    y = np.repeat(np.arange(20), 2)
    assert [len(p) for p in random_split(y, (0.6, 0.1, 0.3))] == [24, 4, 12]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=30, max_size=90), SHARES, st.integers(1, 3))
def test_windows_that_overlap_never_straddle(
    rows: list[tuple[int, int]], shares: tuple[float, float, float], ratio: int
) -> None:
    rows = sorted(rows)
    recording = np.array([r for r, _ in rows])
    y = np.array([label for _, label in rows])
    step, length = 8, 8 * ratio  # each window overlaps ratio - 1 successors
    time = np.concatenate([np.arange((recording == r).sum()) * step for r in np.unique(recording)])
    parts = time_split(y, recording, time, length, shares)
    assert disjoint(parts)
    assert leaks(parts, recording, time, length) == 0
    span = [{(recording[i], t) for i in p for t in range(time[i], time[i] + length)} for p in parts]  # readings used
    assert sum(map(len, span)) == len(set().union(*span))  # no reading is in two parts
    if ratio == 1:
        assert sum(map(len, parts)) == len(y)  # nothing overlaps, nothing is lost


def test_a_cut_between_recordings_costs_nothing_and_one_inside_costs_one_window() -> None:
    time = np.tile(np.arange(5) * 64, 2)
    inside = time_split(np.zeros(10, int), np.zeros(10, int), np.arange(10) * 64, 128, (0.5, 0.0, 0.5))
    between = time_split(np.zeros(10, int), np.repeat([0, 1], 5), time, 128, (0.5, 0.0, 0.5))
    assert [len(p) for p in inside] == [4, 0, 5]
    assert [len(p) for p in between] == [5, 0, 5]


def test_the_order_of_rows_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    order = rng.permutation(40)
    time, recording = np.arange(40) % 20 * 64, np.repeat([0, 1], 20)
    straight = time_split(np.zeros(40, int), recording, time, 128)
    mixed = time_split(np.zeros(40, int), recording[order], time[order], 128)
    for a, b in zip(straight, mixed, strict=True):
        assert sorted(order[b]) == sorted(a)


def test_bad_wishes_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        random_split([0, 1], shares=(0.5, 0.1, 0.1))
    with pytest.raises(ValueError, match="give one of each"):
        time_split([0, 1], [0], [0, 1], 2)
    with pytest.raises(ValueError, match="how many readings"):
        time_split([0, 1], [0, 0], [0, 1], 0)


def nearest_neighbour(x: npt.NDArray[np.float32], y: npt.NDArray[np.int64], parts: Parts) -> float:
    """Accuracy of the label of the closest training window: memory without understanding, so it shows leaks."""
    train, test = x[parts.train], x[parts.test]
    distance = (test**2).sum(1)[:, None] - 2 * test @ train.T + (train**2).sum(1)
    return float((y[parts.train][distance.argmin(1)] == y[parts.test]).mean())


@pytest.mark.skipif(not os.environ.get("FEDQUILT_DATA"), reason="needs the real data in FEDQUILT_DATA")
def test_what_a_leaking_split_would_be_worth_on_uci_har() -> None:
    from fedquilt.data import load

    data = load("uci_har", fetch=False)
    assert data.subject is not None
    assert data.recording is not None
    assert data.time is not None
    honest, leaky, shared = [], [], []
    for subject in np.unique(data.subject):
        mine = np.flatnonzero(data.subject == subject)
        x, y = data.signals(mine).reshape(len(mine), -1), data.y[mine]
        recording, time = data.recording[mine], data.time[mine]
        by_time = time_split(y, recording, time, length=128)
        at_random = random_split(y)
        assert leaks(by_time, recording, time, 128) == 0
        shared.append(leaks(at_random, recording, time, 128) / (len(at_random.validation) + len(at_random.test)))
        honest.append(nearest_neighbour(x, y, by_time))
        leaky.append(nearest_neighbour(x, y, at_random))
    assert np.mean(shared) > 0.75  # of the windows a random split tests on share readings with a training window
    assert np.mean(leaky) - np.mean(honest) > 0.02, (np.mean(leaky), np.mean(honest))
