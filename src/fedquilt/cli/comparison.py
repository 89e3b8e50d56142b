"""Runs of several methods as one comparison, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from fedquilt.cli.speak import out, print_json

if TYPE_CHECKING:
    from fedquilt.report.compare import Comparison, Curve
    from fedquilt.run import Run

RunsBySeed = Mapping[int, "Run"]
_ALONE = "the clients alone"  # no method has this name


def default_reference(methods: Sequence[str]) -> str | None:
    """What methods are set against where nothing is said: fedavg, else the clients alone, else the first.

    >>> default_reference(["local", "fedavg", "modfl"]), default_reference(["modfl"])
    ('fedavg', None)
    """
    if len(methods) < 2:
        return None
    return next((name for name in ("fedavg", "local") if name in methods), methods[0])


def compared(
    runs: Mapping[str, RunsBySeed], bars: RunsBySeed, reference: str | None, target: float | None
) -> Comparison:
    """The runs as tables over clients and seeds, and what they say; `bars` are the clients alone, by seed."""
    from fedquilt.report.compare import compare, pair_up

    scores = {name: {seed: last_scores(run) for seed, run in by_seed.items()} for name, by_seed in runs.items()}
    if bars:
        scores[_ALONE] = {seed: last_scores(run) for seed, run in bars.items()}
    _, _, tables, _ = pair_up(scores)
    alone = tables.pop(_ALONE, None)
    curves = {name: [curve(run) for run in by_seed.values()] for name, by_seed in runs.items()}
    return compare(tables, alone=alone, curves=curves, reference=reference, target=target)


def last_scores(run: Run) -> dict[str, float]:
    """Each client's accuracy on test data after the last round, with the read-out that the method reports."""
    from fedquilt.results import final

    summary = run.summary
    return {client: row["accuracy"] for client, row in final(run.rows, summary["readout"], "test").items()}


def curve(run: Run) -> Curve:
    """Mean accuracy on test data and megabytes moved, over rounds."""
    from fedquilt.report.compare import Curve

    readout = run.summary["readout"]
    moved = list(accumulate((up + down) / 1e6 for up, down in zip(run.bytes_up, run.bytes_down, strict=True)))
    points = [e for e in run.evaluations if (e.readout, e.split) == (readout, "test")]
    return Curve([e.round for e in points], [e.accuracy for e in points], [moved[e.round - 1] for e in points])


def show(comparison: Comparison, form: str, json: bool) -> None:
    """The comparison as text, CSV, LaTeX, Markdown or JSON."""
    from fedquilt.report.tables import FORMATS, as_text, records

    if json:
        print_json({"methods": records(comparison), "notes": list(comparison.notes)})
    elif form == "text":
        out.print(as_text(comparison))
    else:
        print(FORMATS[form](comparison), end="")
