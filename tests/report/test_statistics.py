"""Statistics on made-up score tables, against hand-made answers and scipy's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedquilt.report.compare import Curve, Reached, compare, pair_up, reached
from fedquilt.report.read_runs import read_run
from fedquilt.report.statistics import holm, mean_interval, share_gaining, signed_rank, worst_decile
from fedquilt.results import Evaluation


def test_one_seed_gives_students_interval_over_clients() -> None:
    values = np.random.default_rng(0).uniform(0.5, 1, (12, 1))
    low, high = stats.t.interval(0.9, 11, values.mean(), stats.sem(values[:, 0]))
    found = mean_interval(values, level=0.9)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert mean_interval(values.T, level=0.9) == found


def test_two_ways_by_hand() -> None:
    # Means of squares: clients 2 * 0.02 = 0.04, seeds 0.04, residual 0: variance 0.08 / 4
    # with 0.08^2 / (2 * 0.04^2) = 2 degrees of freedom; t(2) at 97.5 % is 4.302653.
    found = mean_interval([[0.5, 0.7], [0.7, 0.9]])
    assert found.mean == pytest.approx(0.7)
    assert found.half == pytest.approx(4.302653 * math.sqrt(0.02), rel=1e-6)


def test_equal_scores_have_no_width_and_a_single_one_is_unbounded() -> None:
    assert mean_interval(np.full((4, 3), 0.5)).half == 0
    assert mean_interval([[0.5]]).half == math.inf


def test_seeds_that_disagree_widen_the_interval_however_many_clients() -> None:
    rng = np.random.default_rng(1)
    seeds = np.array([0.0, 0.1, 0.2])
    few, many = (mean_interval(0.5 + seeds + rng.normal(0, 0.01, (n, 3))) for n in (10, 1000))
    over_seeds = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert many.half == pytest.approx(over_seeds, rel=0.05)
    assert few.half == pytest.approx(over_seeds, rel=0.1)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    covered = naive = 0
    for _ in range(400):
        table = rng.normal(0, 0.1, (20, 1)) + rng.normal(0, 0.05, (1, 5)) + rng.normal(0, 0.05, (20, 5))
        found = mean_interval(table)
        covered += found.low <= 0 <= found.high
        half = 1.98 * table.std(ddof=1) / 10
        naive += abs(table.mean()) <= half
    assert 0.92 <= covered / 400 <= 0.985
    assert naive / 400 < 0.75  # what treating 100 numbers as independent would have claimed to be 95 %


def test_worst_decile_is_the_mean_of_the_worst_tenth_of_client_means() -> None:
    table = np.stack([np.arange(30) / 100, np.arange(30) / 100 + 0.2], axis=1)
    assert worst_decile(table) == pytest.approx(np.mean([0.10, 0.11, 0.12]))
    assert worst_decile([[0.9], [0.4], [0.7]]) == 0.4


def test_a_tie_with_alone_is_no_gain() -> None:
    # 0.1 + 0.2 differs from 0.3 in the last bit, which is not a gain either
    assert share_gaining([[0.1 + 0.2], [0.5]], [[0.3], [0.4]]) == 0.5


def test_signed_rank_is_scipys_over_client_means() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.uniform(0.6, 0.9, (25, 3)), rng.uniform(0.55, 0.9, (25, 3))
    assert signed_rank(a, b) == stats.wilcoxon(np.round(a.mean(1) - b.mean(1), 12)).pvalue
    assert signed_rank(a[:6] + 1, b[:6]) == 2 / 2**6
    assert signed_rank(a, a) == 1


def test_ties_of_few_clients_are_counted_out_and_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # ranks 1.5, 1.5, 4, 4, 4, 6 of which 1.5 is down: of 64 choices of signs 1 has a sum of 0 down, and 2 one of 1.5
    tied = np.array([[0.1], [-0.1], [0.2], [0.2], [0.2], [0.3]])
    expected = stats.wilcoxon(tied[:, 0]).pvalue
    monkeypatch.setattr(stats, "wilcoxon", None)  # a table of forty methods would take it minutes
    assert signed_rank(tied, np.zeros((6, 1))) == expected == 2 * 3 / 64
    assert signed_rank(np.zeros((6, 1)), tied) == 2 * 3 / 64
    assert signed_rank([[0.1], [0.9]], [[0.4], [0.6]]) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_none_and_bonferroni(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1, p * len(p_values))
    order = np.argsort(p_values)
    assert (np.diff(np.array(adjusted)[order]) >= 0).all()


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.02, 0.03, 0.005]) == pytest.approx([0.03, 0.04, 0.04, 0.02])


def test_reaching_a_target() -> None:
    curve = Curve([2, 4, 6], [0.5, 0.7, 0.9], [1.0, 2.0, 3.0])
    assert reached(curve, 0.7) == Reached(4, 2.0)
    assert reached(curve, 0.95) is None
    assert reached(Curve([1], [0.8]), 0.8) == Reached(1, None)


def test_a_comparison_with_known_answers() -> None:
    base = np.linspace(0.6, 0.8, 10)[:, None] + np.array([[0.0, 0.01]])
    better = base + np.linspace(0.04, 0.06, 10)[:, None]
    same = base + np.array([0.002, -0.002] * 5)[:, None]
    curves = {"better": [Curve([1, 2], [0.5, 0.74], [5, 10]), Curve([1, 2], [0.74, 0.75], [6, 12])]}
    found = compare(
        {"fedavg": base, "better": better, "same": same}, alone=base, curves=curves, reference="fedavg", target=0.73
    )
    fedavg, up, level = found.rows
    assert found.best == "better"
    assert [r.best for r in found.rows] == [False, True, False]
    assert [r.level_with_best for r in found.rows] == [False, True, False]
    assert up.gain is not None
    assert up.gain.mean == pytest.approx(0.05)
    assert up.share_gaining == 1
    assert (fedavg.share_gaining, level.share_gaining) == (0, 0.5)
    assert (up.rounds_to_target, up.megabytes_to_target, up.seeds_reaching, up.megabytes) == (1.5, 8.0, 2, 11.0)
    assert (level.rounds_to_target, level.seeds_reaching, level.megabytes) == (None, 0, None)
    assert up.against_reference is not None
    assert up.against_reference.real
    # All ten differences are positive: p = 2 / 2^10, the smallest of three with its equal partner.
    assert up.against_reference.p == 2 / 2**10
    assert up.against_reference.p_holm == pytest.approx(3 * 2 / 2**10)
    assert up.against_reference.seeds_better == 2
    assert level.against_reference is not None
    assert not level.against_reference.real
    assert fedavg.against_reference is None
    turned = found.difference("fedavg", "better")
    assert turned.interval.mean == pytest.approx(-0.05)
    assert (turned.clients_better, turned.clients_worse) == (0, 1)


def test_one_lucky_seed_is_not_a_real_difference() -> None:
    base = np.linspace(0.6, 0.8, 30)[:, None].repeat(3, axis=1)
    lucky = base + np.array([[0.0, 0.0, 0.3]])
    found = compare({"a": base, "lucky": lucky}).difference("lucky", "a")
    assert found.p_holm < 1e-6  # every client gained in the mean over seeds ...
    assert not found.real  # ... but from one seed of three, and the interval of the difference knows it
    assert (found.seeds_better, found.seeds_worse) == (1, 0)


def test_a_seed_that_never_arrives_counts_as_late() -> None:
    scores = [[0.9, 0.9, 0.5]] * 2
    curves = {"m": [Curve([1, 5], [0.1, 0.9]), Curve([1, 7], [0.1, 0.9]), Curve([1, 9], [0.1, 0.5])]}
    row = compare({"m": scores}, curves=curves, target=0.8).rows[0]
    assert (row.rounds_to_target, row.seeds_reaching) == (7, 2)


def test_too_few_clients_are_said_to_be_too_few() -> None:
    notes = compare({"a": [[0.5]] * 5, "b": [[0.6]] * 5}).notes
    assert any("from 6 clients on" in note for note in notes)
    six = {"a": [[0.5]] * 6, "b": [[0.6]] * 6}
    assert not any("clients on" in note for note in compare(six).notes)
    assert compare(six).difference("b", "a").real


def test_bad_tables_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="same clients and seeds"):
        compare({"a": [[0.5]], "b": [[0.5], [0.6]]})
    with pytest.raises(ValueError, match="client number 1 has no finite score in seed number 0"):
        mean_interval([[0.5], [math.nan]])
    with pytest.raises(ValueError, match="'fedavg' is not among"):
        compare({"a": [[0.5]]}, reference="fedavg")
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({})
    with pytest.raises(KeyError, match="no comparison"):
        compare({"a": [[0.5]]}).difference("a", "b")


def test_methods_without_a_common_seed_are_paired_over_clients() -> None:
    clients, seeds, tables, notes = pair_up({"a": {0: {"x": 0.5}, 1: {"x": 0.7}}, "b": {2: {"x": 0.9}}})
    assert (clients, seeds) == (["x"], [])
    assert tables["a"].tolist() == [[pytest.approx(0.6)]]
    assert tables["b"].tolist() == [[0.9]]
    assert "no seed in common" in notes[0]


def counted(right: np.ndarray[tuple[int], np.dtype[np.int64]], samples: int) -> Evaluation:
    """An evaluation in which each client has so many samples right."""
    counts = torch.zeros(len(right), 2, 2, dtype=torch.int64)
    counts[:, 0, 0], counts[:, 0, 1] = torch.from_numpy(right), torch.from_numpy(samples - right)
    return Evaluation(1, "received", "test", tuple(f"c{i}" for i in range(len(right))), counts.to_sparse())


def written(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("single", [False, True], ids=["as runs write it", "in single precision, as older runs did"])
def test_p_values_are_those_of_whole_samples(single: bool, tmp_path: Path) -> None:
    rng, samples = np.random.default_rng(4), 10
    for trial in range(12):
        right = rng.integers(0, samples + 1, (2, 14))
        tables = []
        for which in (0, 1):
            rows = counted(right[which], samples).rows()
            if single:
                rows = [row | {"accuracy": float(np.float32(row["accuracy"]))} for row in rows]
            found = read_run(written(tmp_path / f"{trial}-{which}", rows))
            tables.append(found.series["received", "test"].score.T)
        whole = (right[0] - right[1]).astype(float)
        assert signed_rank(*tables) == pytest.approx(stats.wilcoxon(whole[whole != 0]).pvalue, abs=1e-12)


def test_what_is_equal_on_paper_is_no_gain_no_loss_and_reaches_its_target() -> None:
    first, second = [[0.3, 0.1], [0.1, 0.2]], [[0.2, 0.2], [0.2, 0.1]]  # seed by seed the same mean
    found = compare({"a": first, "b": second})
    assert (found.differences[0].seeds_better, found.differences[0].seeds_worse) == (0, 0)
    assert found.best == "a"
    assert 0.3 - 0.2 < 0.1
    assert reached(Curve([1], [0.3 - 0.2]), 0.1) == Reached(1, None)
