"""Comparison tables: every form escapes names and says what its signs mean."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from rich.console import Console

from fedquilt.report.compare import Comparison, Curve, compare
from fedquilt.report.escapes import latex_escape, markdown_escape
from fedquilt.report.tables import as_csv, as_latex, as_markdown, as_text, cells

NASTY = "=a_b|[red]<script>&%\\"


@pytest.fixture
def comparison() -> Comparison:
    local = np.linspace(0.6, 0.8, 8)[:, None].repeat(2, axis=1)
    curves = {NASTY: [Curve([1, 2], [0.6, 0.75], [10, 20]), Curve([1, 2], [0.6, 0.62], [10, 20])]}
    return compare({"local": local, NASTY: local + 0.05}, alone=local, curves=curves, reference="local", target=0.7)


def test_cells(comparison: Comparison) -> None:
    headings, rows = cells(comparison)
    assert headings == [
        "method", "accuracy %", "95 % interval", "worst decile %", "gain over alone", "clients gaining %",
        "rounds to 70.0 %", "MB a seed", "against local", "p (Holm)",
    ]  # fmt: skip
    assert [c.text for c in rows[1]][3:] == ["65.0", "+5.0 ± 0.0", "100", "– (1 of 2)", "20", "+5.0 ± 0.0 ▲", "0.008"]
    assert [c.bold for c in rows[0]][:2] == [False, False]
    assert [c.bold for c in rows[1]][:2] == [True, True]


def test_text_prints_names_as_they_are(comparison: Comparison) -> None:
    console = Console(width=200, color_system=None, file=io.StringIO())
    console.print(as_text(comparison, 200))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert NASTY in printed
    assert "Holm over all pairs" in printed


def test_csv_reads_back_unrounded_and_runs_no_formula(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert rows[1]["method"] == "'" + NASTY
    assert float(rows[1]["accuracy"]) == comparison.rows[1].score.mean
    assert rows[1]["real"] == "True"
    assert rows[0]["p"] == ""


def test_latex_and_markdown_have_one_line_a_method(comparison: Comparison) -> None:
    latex = as_latex(comparison).splitlines()
    assert latex[2].count("&") == latex[4].count("&") == 9
    assert latex[5].startswith(r"\textbf{=a\_b|[red]\textless{}script\textgreater{}\&\%\textbackslash{}}")
    markdown = as_markdown(comparison).splitlines()
    assert markdown[3].startswith(r"| **=a\_b\|\[red\]&lt;script&gt;&%\\** |")
    assert len({line.replace(r"\|", "").count("|") for line in markdown[:4]}) == 1


def test_a_line_break_in_a_name_ends_no_row() -> None:
    assert latex_escape("a\nb") == markdown_escape("a\nb") == "a b"


def test_a_single_method_needs_no_comparison_columns() -> None:
    headings, _ = cells(compare({"fedavg": [[0.5], [0.6]]}, reference="fedavg"))
    assert headings == ["method", "accuracy %", "95 % interval", "worst decile %"]


def test_an_accuracy_has_its_deviation_over_seeds_and_an_interval_within_a_hundred() -> None:
    table = np.array([[1.0, 0.9], [1.0, 0.98], [0.7, 0.98]])  # means of the seeds: 0.9 and 0.9533
    _, ((_, accuracy, interval, *_),) = cells(compare({"fedavg": table}))
    assert accuracy.text == "92.7 ± 3.8"
    assert interval.text.endswith(" to 100.0")
    (row,) = compare({"fedavg": table}).rows
    assert 0 <= row.score.low < row.score.mean < row.score.high <= 1


def test_bold_is_not_for_who_is_far_behind_among_few_clients() -> None:
    """With four clients Wilcoxon's p is 0.125 at best: no difference is real, yet 30 points are not level."""
    best = np.array([[0.9], [0.91], [0.92], [0.93]])
    close = best + np.array([[0.01], [-0.02], [0.01], [-0.01]])
    found = compare({"best": best, "close": close, "far": best - np.array([[0.3], [0.31], [0.29], [0.3]])})
    assert not any(difference.real for difference in found.differences)
    assert [row.level_with_best for row in found.rows] == [True, True, False]


def test_places_by_mean_worst_decile_and_clients_gaining() -> None:
    alone = np.full((4, 1), 0.5)
    found = {"steady": alone + 0.1, "split": np.array([[0.4], [0.9], [0.9], [0.9]]), "low": alone - 0.2}
    headings, rows = cells(compare(found, alone=alone))
    at = headings.index("rank by mean, worst decile, gaining")
    assert [row[at].text for row in rows] == ["2, 1, 1", "1, 2, 2", "3, 3, 3"]


@pytest.mark.parametrize("width", [80, 60, 140])
def test_no_cell_is_broken_however_narrow_the_terminal(width: int) -> None:
    local = np.linspace(0.6, 0.8, 8)[:, None].repeat(2, axis=1)
    names = ["local", "score-sharing", "fedavg-plus", "per-fedavg"]
    curves = {name: [Curve([1], [0.7], [1234.0])] * 2 for name in names}
    found = compare(
        {name: local + 0.01 * i for i, name in enumerate(names)},
        alone=local, curves=curves, reference="local", target=0.7,
    )  # fmt: skip
    console = Console(width=width, color_system=None, file=io.StringIO())
    console.print(as_text(found, width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    body = [line for line in lines if any(line.startswith(name) for name in names)]
    assert len(body) == len(names)
    assert all("%" not in line and "…" not in line for line in body)
    assert [line.split()[1] for line in body] == ["70.0", "71.0", "72.0", "73.0"]
    assert max(len(line.rstrip()) for line in lines) <= width
    assert (width < 140) == any("No room here" in line for line in lines)
