"""One read-out and split of a scenario's methods: curves over seeds, final scores, and the comparison."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedquilt._util.metric import ACCURACY, Metric
from fedquilt.report.compare import Comparison, Curve, Further, compare, pair_up
from fedquilt.report.further import further
from fedquilt.report.plan_frames import packed
from fedquilt.report.read_runs import Floats, Reading, RunFiles, Series
from fedquilt.report.tables import as_csv, as_latex, as_markdown, cells, explanations

ALONE = ("alone", "local")
"""Names under which clients trained by themselves are found: a read-out of that name first, then a method."""

_OFF = 4.0  # times the usual loss, beyond which a loss is not drawn


@dataclass
class Group:
    """The runs of one method with the same settings, one a seed."""

    name: str
    runs: list[RunFiles] = field(default_factory=list)


def view_data(
    groups: Sequence[Group],
    clients: Sequence[str],
    reading: Reading | None,
    reference: str | None = None,
    target: float | None = None,
) -> dict[str, Any]:
    """Curves, final scores and the comparison for one read-out and split (None: each run's declared one)."""
    found = measured(groups, reading)
    methods: list[dict[str, Any] | None] = []
    for group in groups:
        if group.name not in found.scores:
            methods.append(None)
            continue
        curves = list(found.curves[group.name].values())
        told = _method_view(clients, curves, found.scores[group.name], found.alone, found.metric)
        told["loss"] = _losses(found, group.name, told["rounds"])
        first = next(run for run in group.runs if (reading or run.reading) in run.series)
        methods.append(told | {"reading": list(reading or first.reading)})
    if found.scores and target is None:
        means = [float(np.mean([v for s in mine.values() for v in s.values()])) for mine in found.scores.values()]
        target = nearly(max(means) if found.metric.higher else min(means), found.metric)
    table = compared(found, reference, target)
    return {
        "title": "as each method declares" if reading is None else f"{reading[0]}, {reading[1]}",
        "methods": methods,
        "loss_top": loss_top([told["loss"] for told in methods if told is not None and told["loss"]]),
        "table": None if table is None else _printed(table),
    }


def nearly(best: float, metric: Metric) -> float:
    """95 % of the best score, to whole per cents; of a metric of which less is better, 105 % of it, to three digits.

    >>> nearly(0.913, ACCURACY), nearly(53.27, Metric("rmse", higher=False))
    (0.86, 55.9)
    """
    if metric.percent and metric.higher:
        return math.floor(95 * best) / 100
    return float(f"{best + (-0.05 if metric.higher else 0.05) * abs(best):.3g}")


@dataclass(frozen=True)
class Measured:
    """What runs say: by method and seed each client's last score and the curve to it; the clients alone, by seed."""

    scores: Mapping[str, Mapping[int, Mapping[str, float]]]
    curves: Mapping[str, Mapping[int, Curve]]
    alone: Mapping[int, Mapping[str, float]]
    losses: Mapping[str, Mapping[int, Sequence[float]]] = field(default_factory=dict)  # at the rounds of the curve
    said: tuple[str, ...] = ()  # what methods that do not learn say of themselves, and what others promise
    attacks: Mapping[str, str] = field(default_factory=dict)  # by method how some of its clients lied
    metric: Metric = ACCURACY
    further: Mapping[str, tuple[Further, ...]] = field(default_factory=dict)  # other test sets, by method


def measured(groups: Sequence[Group], reading: Reading | None = None) -> Measured:
    """The scores of runs with one read-out on one split (None: each run's declared one)."""
    scores: dict[str, dict[int, dict[str, float]]] = {}
    curves: dict[str, dict[int, Curve]] = {}
    losses: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        mine = [(run, series) for run in group.runs if (series := run.series.get(reading or run.reading))]
        if mine:
            scores[group.name] = {run.seed: final_scores(run, series) for run, series in mine}
            curves[group.name] = {run.seed: _curve(run, series) for run, series in mine}
            losses[group.name] = {run.seed: known_mean(s.loss.T).tolist() for run, s in mine if s.loss is not None}
    told = [
        (group.name, sorted({str(run.summary.get(key, "")) for run in group.runs} - {""}))
        for key in ("trouble", "compression", "privacy")
        for group in groups
    ]
    sayers: dict[str, list[str]] = {}
    for name, sentences in told:
        if sentences:
            sayers.setdefault(sentences[0].rstrip("."), []).append(name)
    said = tuple(f"{', '.join(names)}: {sentence}" for sentence, names in sayers.items())
    alone = {run.seed: lone for group in groups for run in group.runs if (lone := _alone(run, reading))}
    metrics = list(dict.fromkeys(run.metric for group in groups for run in group.runs))
    if len(metrics) > 1:
        both = " and ".join(metric.name for metric in metrics[:2])
        raise ValueError(f"runs led by {both} cannot be compared; give runs of one task")
    lied = {group.name: _attack(group.runs) for group in groups}
    other = further({group.name: group.runs for group in groups}) if reading is None or reading[1] == "test" else {}
    return Measured(scores, curves, alone, losses, said, lied, metrics[0] if metrics else ACCURACY, other)


def compared(found: Measured, reference: str | None, target: float | None) -> Comparison | None:
    """The comparison of methods on the clients and seeds that all of them have; None where there are none.

    The reference is, where nothing else is said or known, FedAvg, else the clients alone, else the first method.
    """
    clients, seeds, tables, notes = pair_up(found.scores) if found.scores else ([], [], {}, [])
    if not clients:
        return None
    usable = bool(seeds) and all(c in found.alone.get(s, {}) for s in seeds for c in clients)
    alone = np.array([[found.alone[s][c] for s in seeds] for c in clients]) if usable else None
    if reference not in tables:
        reference = next((name for name in ("fedavg", *ALONE) if name in tables), next(iter(tables)))
    curves = {name: [c for s, c in mine.items() if not seeds or s in seeds] for name, mine in found.curves.items()}
    table = compare(tables, alone=alone, curves=curves, reference=reference, target=target, metric=found.metric)
    rows = tuple(
        replace(row, attack=found.attacks.get(row.name, ""), further=found.further.get(row.name, ()))
        for row in table.rows
    )
    return replace(table, rows=rows, notes=(*table.notes, *notes, *found.said))


def _attack(runs: Sequence[RunFiles]) -> str:
    """How some of the clients of a method's runs lied, and how many."""
    told = {(run.summary["attack"], run.summary["liars"], len(run.clients)) for run in runs if "attack" in run.summary}
    return "; ".join(f"{name}, {liars} of {clients} lie" for name, liars, clients in sorted(told))


def final_scores(run: RunFiles, series: Series) -> dict[str, float]:
    """Each client's score at the round the run's result is read at."""
    at = len(series.rounds) - 1
    if run.chosen in series.rounds:
        at = series.rounds.index(run.chosen)
    row = series.filled()[at]
    return {c: float(v) for c, v in zip(run.clients, row, strict=True) if not math.isnan(v)}


def _alone(run: RunFiles, reading: Reading | None) -> dict[str, float]:
    """Each client's score alone, if this run knows it."""
    split = (reading or run.reading)[1]
    if (series := run.series.get((ALONE[0], split))) is not None:
        return final_scores(run, series)
    if run.method in ALONE and (series := run.series.get(reading or run.reading) or run.series.get(run.reading)):
        return final_scores(run, series)
    return {}


def _curve(run: RunFiles, series: Series) -> Curve:
    moved, clock = None, None
    if run.traffic is not None:
        total = np.cumsum((run.traffic.up + run.traffic.down).sum(axis=1))
        place = np.searchsorted(run.traffic.rounds, series.rounds, side="right") - 1
        moved = np.where(place < 0, 0.0, total[np.maximum(place, 0)]).tolist()
        if run.traffic.clock is not None:
            clock = np.where(place < 0, 0.0, run.traffic.clock[np.maximum(place, 0)]).tolist()
    return Curve(series.rounds, known_mean(series.filled().T).tolist(), moved, clock)


def _method_view(
    clients: Sequence[str],
    curves: Sequence[Curve],
    scores: Mapping[int, Mapping[str, float]],
    lone: Mapping[int, Mapping[str, float]],
    metric: Metric,
) -> dict[str, Any]:
    rounds = sorted({at for curve in curves for at in curve.rounds})
    score = np.stack([at_rounds(c.rounds, np.array(c.score)[:, None], rounds)[:, 0] for c in curves])
    moved = [at_rounds(c.rounds, np.array(c.megabytes)[:, None], rounds)[:, 0] for c in curves if c.megabytes]
    times = [at_rounds(c.rounds, np.array(c.clock)[:, None], rounds)[:, 0] for c in curves if c.clock]
    final = np.array([[scores[s].get(c, math.nan) for c in clients] for s in scores])
    both = [s for s in scores if s in lone]
    gain = np.array([
        [metric.gain(scores[s].get(c, math.nan), lone[s].get(c, math.nan)) for c in clients] for s in both
    ])  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rounds that no seed has: NaN is the answer
        low, high = np.nanmin(score, axis=0), np.nanmax(score, axis=0)
    return {
        "rounds": rounds,
        "mean": _rounded(known_mean(score)),
        "low": _rounded(low),
        "high": _rounded(high),
        "megabytes": _rounded(known_mean(np.stack(moved))) if moved else None,
        "clock": _rounded(known_mean(np.stack(times))) if times else None,
        "final": packed(known_mean(final).astype(np.float32)),
        "gain": packed(known_mean(gain).astype(np.float32)) if both and not np.isnan(gain).all() else None,
    }


def loss_top(curves: Sequence[Sequence[float | None]]) -> float | None:
    """Up to where losses are drawn, where some are so far off that no other could be told apart; None: all of them.

    A method is usually at its first loss or below. What is beyond four times that of the method in the middle is off.

    >>> loss_top([[2.0, 1.0], [2.2, 0.5]]), loss_top([[2.0, 1.0], [2.0, 120000.0, 1.0], [2.0, 3.0]])
    (None, 3.0)
    """
    known = [[loss for loss in curve if loss is not None] for curve in curves]
    usual = [max(losses[0], float(np.median(losses))) for losses in known if losses]
    if not usual:
        return None
    near = [loss for losses in known for loss in losses if loss <= _OFF * float(np.median(usual))]
    return max(near) if len(near) < sum(map(len, known)) and near else None


def _losses(found: Measured, name: str, rounds: Sequence[int]) -> list[float | None] | None:
    """A method's mean loss over clients and seeds at some rounds; None where nobody has one."""
    mine = found.losses.get(name, {})
    known = [
        at_rounds(found.curves[name][seed].rounds, np.array(losses)[:, None], rounds)[:, 0]
        for seed, losses in mine.items()
    ]
    return _rounded(known_mean(np.stack(known))) if known else None


def _printed(table: Comparison) -> dict[str, Any]:
    headings, rows = cells(table)
    best = next(row for row in table.rows if row.name == table.best)
    return {
        "headings": headings,
        "rows": [[[cell.text, cell.bold] for cell in row] for row in rows],
        "notes": explanations(table),
        "best": {"name": best.name, "score": best.score.mean, "gaining": best.share_gaining},
        "csv": as_csv(table),
        "latex": as_latex(table),
        "markdown": as_markdown(table),
    }


def at_rounds(rounds: Sequence[int], values: Floats, wanted: Sequence[int]) -> Floats:
    """Rows of `values` (rounds, n) at the wanted rounds: the last known one; NaN outside the rounds there are."""
    place = np.searchsorted(rounds, wanted, side="right") - 1
    outside = (place < 0) | (np.asarray(wanted) > rounds[-1])
    return np.where(outside[:, None], np.nan, values[np.maximum(place, 0)])


def placed(values: Floats, run: RunFiles, clients: Sequence[str]) -> Floats:
    """Rows by the run's clients as rows by all clients of the scenario."""
    if tuple(clients) == run.clients:
        return values
    number = {c: i for i, c in enumerate(clients)}
    out = np.full((len(clients), *values.shape[1:]), np.nan)
    out[[number[c] for c in run.clients]] = values
    return out


def known_mean(values: Floats) -> Floats:
    """Mean over the first axis of what is known; NaN where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mean: Floats = np.nanmean(values, axis=0)
    return mean


def _rounded(values: Floats) -> list[float | None]:
    return [None if math.isnan(v) else round(float(v), 5) for v in values]
