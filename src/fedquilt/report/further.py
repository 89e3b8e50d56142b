"""Other test sets beside each client's own: columns of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedquilt.report.compare import Further
from fedquilt.report.read_runs import RunFiles


class _TestSet(NamedTuple):
    name: str
    heading: str
    meaning: str
    score: Callable[[RunFiles], float | None]


def _on_everyone(run: RunFiles) -> float | None:
    series = run.series.get((run.reading[0], "everyone"))
    return None if series is None else float(np.nanmean(series.filled()[-1]))


def _unseen(run: RunFiles) -> float | None:
    found = run.summary.get("unseen_mean")
    return found if isinstance(found, float) else None


_TEST_SETS = (
    _TestSet(
        "everyone", "on everyone's data",
        "clients' models on all clients' test samples, beside their own; what a model cannot take is left out",
        _on_everyone,
    ),
    _TestSet("unseen", "unseen clients", "clients that were not trained with, after they joined", _unseen),
)  # fmt: skip


def further(runs: Mapping[str, Sequence[RunFiles]]) -> dict[str, tuple[Further, ...]]:
    """By method, its mean on those other test sets that any of the runs was tried on."""
    scores = {
        kind: {name: [score for run in mine if (score := kind.score(run)) is not None] for name, mine in runs.items()}
        for kind in _TEST_SETS
    }
    asked = [kind for kind, by_method in scores.items() if any(by_method.values())]
    return {name: tuple(_row(kind, scores[kind][name]) for kind in asked) for name in runs}


def _row(kind: _TestSet, seeds: Sequence[float]) -> Further:
    deviation = float(np.std(seeds, ddof=1)) if len(seeds) > 1 else None
    return Further(kind.name, kind.heading, kind.meaning, float(np.mean(seeds)) if seeds else None, deviation)
