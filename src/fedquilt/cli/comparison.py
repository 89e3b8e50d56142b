"""Runs on disk of several methods as one comparison, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt._util.metric import ACCURACY, Metric
from fedquilt._util.suggest import did_you_mean
from fedquilt.cli.output import Refused, out, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from fedquilt.cli.planned_runs import PlannedRun
    from fedquilt.report.compare import Comparison

FORMS = ("text", "csv", "latex", "markdown")
ALONE = "local"


@dataclass(frozen=True)
class Tried:
    """Settings of a method that a sweep tried: the score on validation data, its mean and deviation over seeds."""

    method: str
    settings: str
    score: float
    deviation: float | None  # None with one seed
    chosen: bool = False


@dataclass(frozen=True)
class Choice:
    """Which of a method's swept settings was best on validation data."""

    method: str
    label: str
    variant: str
    score: float
    among: int
    metric: Metric = ACCURACY
    tried: tuple[Tried, ...] = ()

    def __str__(self) -> str:
        name = "" if self.metric == ACCURACY else f"{self.metric.name} "
        score = f"{name}{self.metric.show(self.score)}{self.metric.unit} on validation data"
        return f"{self.method}: {self.label or 'as it is'} is the best of {self.among} settings ({score})"


def best_setting(jobs: Sequence[PlannedRun], folder: Path) -> dict[str, Choice]:
    """For every method the settings with the best mean over clients and seeds on validation data, never on test."""
    import numpy as np

    from fedquilt.report.read_runs import read_run
    from fedquilt.report.statistics import without_noise

    variants: dict[str, dict[str, list[PlannedRun]]] = {}
    for job in jobs:
        variants.setdefault(job.name, {}).setdefault(job.variant, []).append(job)
    chosen = {}
    for method, found in variants.items():
        if len(found) == 1:
            (variant,) = found
            chosen[method] = Choice(method, found[variant][0].label, variant, float("nan"), 1)
            continue
        seeds = {variant: _validated(mine, folder) for variant, mine in found.items()}
        scores = {variant: float(without_noise(np.mean(mine))) for variant, mine in seeds.items()}
        metric = read_run(folder / jobs[0].folder).metric
        best = max(scores, key=lambda variant: metric.gain(scores[variant], 0.0))  # of equally good ones the first
        tried = tuple(
            Tried(method, found[variant][0].label or "as it is", scores[variant],
                  float(np.std(mine, ddof=1)) if len(mine) > 1 else None, variant == best)
            for variant, mine in seeds.items()
        )  # fmt: skip
        chosen[method] = Choice(method, found[best][0].label, best, scores[best], len(found), metric, tried)
    return chosen


def _validated(jobs: Sequence[PlannedRun], folder: Path) -> list[float]:
    """By seed, the mean over clients of the last score on validation data, with the read-out a method reports."""
    import numpy as np

    from fedquilt.report.read_runs import read_run

    scores = []
    for job in jobs:
        run = read_run(folder / job.folder)
        series = run.series.get((run.reading[0], "validation"))
        if series is None:
            raise Refused(f"'{folder / job.folder}' has no scores on validation data, so nothing can be chosen by them")
        scores.append(float(np.nanmean(series.filled()[-1])))
    return scores


def compared(
    folders: Mapping[str, Sequence[Path]], alone: Sequence[Path], reference: str | None, target: float | None
) -> Comparison:
    """What the runs of each method, one a seed, say against each other; `alone` are the runs of the clients alone."""
    from fedquilt.report.comparison_data import Group, measured
    from fedquilt.report.comparison_data import compared as compare
    from fedquilt.report.read_runs import read_run

    groups = [Group(name, [read_run(folder) for folder in mine]) for name, mine in folders.items()]
    found = measured(groups)
    if alone:
        found = replace(found, alone=measured([Group(ALONE, [read_run(folder) for folder in alone])]).alone)
    table = compare(found, reference, target)
    if table is None:
        raise Refused("the runs have no client with test data in common, so there is nothing to compare")
    return table


def tried_table(tried: Sequence[Tried], metric: Metric) -> Table:
    """All settings that a sweep tried, the best of each method bold."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("method", "settings tried", f"validation {metric.heading}"):
        table.add_column(heading, justify="right" if heading.startswith("validation") else "left")
    for one in tried:
        score = metric.show(one.score) if one.deviation is None else metric.around(one.score, one.deviation)
        table.add_row(one.method, one.settings, score, style="bold" if one.chosen else "")
    return table


def check_form(form: str) -> None:
    """Refuse a format that nobody knows."""
    if form not in FORMS:
        raise Refused(did_you_mean(form, FORMS, "format"))


def show(comparison: Comparison, form: str, json: bool = False, **more: Any) -> None:
    """The comparison as text, CSV, LaTeX, Markdown or JSON."""
    from fedquilt.report.tables import FORMATS, as_text, records

    if json:
        print_json({"methods": records(comparison), "notes": list(comparison.notes), **more})
    elif form == "text":
        out.print(as_text(comparison, out.width))
    else:
        print(FORMATS[form](comparison), end="")
