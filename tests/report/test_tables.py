"""Comparison tables: every form escapes names and says what its signs mean."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from rich.console import Console

from fedquilt.report.compare import Comparison, Curve, compare
from fedquilt.report.tables import as_csv, as_latex, as_markdown, as_text, cells, latex_escape, markdown_escape

NASTY = "=a_b|[red]<script>&%\\"


@pytest.fixture
def comparison() -> Comparison:
    local = np.linspace(0.6, 0.8, 8)[:, None].repeat(2, axis=1)
    curves = {NASTY: [Curve([1, 2], [0.6, 0.75], [10, 20]), Curve([1, 2], [0.6, 0.62], [10, 20])]}
    return compare({"local": local, NASTY: local + 0.05}, alone=local, curves=curves, reference="local", target=0.7)


def test_cells(comparison: Comparison) -> None:
    headings, rows = cells(comparison)
    assert headings == [
        "method", "accuracy %", "worst decile %", "gain over alone", "clients gaining %", "rounds to 70.0 %",
        "MB in all", "against local", "p (Holm)",
    ]  # fmt: skip
    assert [c.text for c in rows[1]][2:] == ["65.0", "+5.0 ± 0.0", "100", "– (1 of 2)", "20", "+5.0 ± 0.0 ▲", "0.008"]
    assert [c.bold for c in rows[0]][:2] == [False, False]
    assert [c.bold for c in rows[1]][:2] == [True, True]


def test_text_prints_names_as_they_are(comparison: Comparison) -> None:
    console = Console(width=200, color_system=None, file=io.StringIO())
    console.print(as_text(comparison))
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
    assert latex[2].count("&") == latex[4].count("&") == 8
    assert latex[5].startswith(r"\textbf{=a\_b|[red]\textless{}script\textgreater{}\&\%\textbackslash{}}")
    markdown = as_markdown(comparison).splitlines()
    assert markdown[3].startswith(r"| **=a\_b\|\[red\]&lt;script&gt;&%\\** |")
    assert len({line.replace(r"\|", "").count("|") for line in markdown[:4]}) == 1


def test_a_line_break_in_a_name_ends_no_row() -> None:
    assert latex_escape("a\nb") == markdown_escape("a\nb") == "a b"


def test_a_single_method_needs_no_comparison_columns() -> None:
    headings, _ = cells(compare({"fedavg": [[0.5], [0.6]]}, reference="fedavg"))
    assert headings == ["method", "accuracy %", "worst decile %"]
