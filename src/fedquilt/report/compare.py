"""Which differences between methods are real: methods side by side on the same clients and seeds.

The statistics, and why they are these, are in `statistics.py`. A difference is called *real* when Wilcoxon's p over
clients, corrected by Holm over all pairs of methods, is below alpha, and the interval of the mean difference, which
also allows for the spread over seeds, leaves out 0. A method is *level with the best* unless that interval, of the
difference to the best, is above 0: with few clients Wilcoxon's p cannot fall below alpha, and is no reason to put a
method that is far behind among the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedquilt._util.metric import ACCURACY, Metric
from fedquilt.report.statistics import (
    Floats,
    Interval,
    bounded,
    holm,
    mean_interval,
    score_table,
    seed_deviation,
    share_gaining,
    signed_rank,
    without_noise,
    worst_decile,
)


@dataclass(frozen=True)
class Difference:
    """How much better `first` is than `second`, over the same clients and seeds: above 0 is better."""

    first: str
    second: str
    interval: Interval
    p: float
    p_holm: float
    real: bool
    clients_better: float
    clients_worse: float
    seeds_better: int
    seeds_worse: int

    def turned(self) -> Difference:
        """The same difference seen from the other side."""
        interval = Interval(-self.interval.mean, -self.interval.high, -self.interval.low)
        shares = (self.clients_worse, self.clients_better, self.seeds_worse, self.seeds_better)
        return Difference(self.second, self.first, interval, self.p, self.p_holm, self.real, *shares)


@dataclass(frozen=True)
class Reached:
    """The first evaluated round whose mean score reached the target, and the megabytes moved by then."""

    round: int
    megabytes: float | None


@dataclass(frozen=True)
class Curve:
    """One run's mean score over rounds, with the megabytes moved so far (up and down, all clients)."""

    rounds: Sequence[int]
    score: Sequence[float]
    megabytes: Sequence[float] | None = None
    clock: Sequence[float] | None = None  # virtual seconds, where clients declare their hardware


@dataclass(frozen=True)
class Further:
    """A method's mean on another test set: `name` for machines, `heading` and `meaning` for people."""

    name: str
    heading: str
    meaning: str
    mean: float | None
    over_seeds: float | None = None


@dataclass(frozen=True)
class MethodRow:
    """One line of a comparison."""

    name: str
    score: Interval  # within what the metric can be
    over_seeds: float | None  # standard deviation of the means of seeds
    spread: float
    worst_decile: float
    gain: Interval | None
    share_gaining: float | None
    rounds_to_target: float | None
    megabytes_to_target: float | None
    seeds_reaching: int
    megabytes: float | None
    best: bool
    level_with_best: bool
    against_reference: Difference | None
    attack: str = ""  # how some of its clients lied
    further: tuple[Further, ...] = ()  # the same test sets in every row


@dataclass(frozen=True)
class Comparison:
    """A comparison of methods on the same clients and seeds; `rows` keep the order given."""

    rows: tuple[MethodRow, ...]
    differences: tuple[Difference, ...]
    clients: int
    seeds: int
    level: float
    best: str
    reference: str | None
    target: float | None
    notes: tuple[str, ...] = field(default=())
    metric: Metric = ACCURACY

    def difference(self, first: str, second: str) -> Difference:
        """How much better `first` is than `second`, whichever way round it was computed."""
        for d in self.differences:
            if (d.first, d.second) == (first, second):
                return d
            if (d.second, d.first) == (first, second):
                return d.turned()
        raise KeyError(f"no comparison of '{first}' with '{second}': compared are {[r.name for r in self.rows]}")


def reached(curve: Curve, target: float, metric: Metric = ACCURACY) -> Reached | None:
    """When a run first reached the target; None if it never did.

    >>> reached(Curve([1, 2, 3], [0.5, 0.8, 0.9], [10, 20, 30]), 0.8)
    Reached(round=2, megabytes=20.0)
    """
    for i, (at, score) in enumerate(zip(curve.rounds, curve.score, strict=True)):
        if metric.gain(float(without_noise(score)), float(without_noise(target))) >= 0:
            return Reached(int(at), None if curve.megabytes is None else float(curve.megabytes[i]))
    return None


def compare(
    scores: Mapping[str, ArrayLike],
    *,
    alone: ArrayLike | None = None,
    curves: Mapping[str, Sequence[Curve]] | None = None,
    reference: str | None = None,
    target: float | None = None,
    level: float = 0.95,
    metric: Metric = ACCURACY,
) -> Comparison:
    """Compare methods on the same clients and seeds.

    Arguments: `scores` one (clients, seeds) table a method; `alone` the same clients trained by themselves; `curves`
    one `Curve` a seed for "rounds and megabytes to `target`"; `reference` the method every other is set against;
    `metric` what the scores are, and so which way is better.

    >>> steady = [[0.70 + 0.01 * c] for c in range(8)]
    >>> better = [[0.75 + 0.012 * c] for c in range(8)]
    >>> c = compare({"fedavg": steady, "feddl": better}, reference="fedavg")
    >>> c.best, c.difference("feddl", "fedavg").real
    ('feddl', True)
    """
    if not scores:
        raise ValueError("nothing to compare: give at least one method's scores")
    tables = {name: score_table(values) for name, values in scores.items()}
    shapes = {table.shape for table in tables.values()}
    if len(shapes) > 1:
        told = ", ".join(f"'{name}' {table.shape}" for name, table in tables.items())
        raise ValueError(f"methods are compared on the same clients and seeds, but the tables differ: {told}")
    if reference is not None and reference not in tables:
        raise ValueError(f"the reference '{reference}' is not among the methods compared: {', '.join(tables)}")
    (clients, seeds), alpha = shapes.pop(), 1 - level
    by_oneself = None if alone is None else np.broadcast_to(score_table(alone), (clients, seeds))

    pairs = list(itertools.combinations(tables, 2))
    way = 1.0 if metric.higher else -1.0
    p_values = [signed_rank(tables[a], tables[b]) for a, b in pairs]
    differences = []
    for (a, b), p, corrected in zip(pairs, p_values, holm(p_values), strict=True):
        table = way * (tables[a] - tables[b])
        interval, by_seed = mean_interval(table, level), without_noise(table.mean(axis=0))
        differences.append(
            Difference(
                a, b, interval, p, corrected,
                real=corrected < alpha and not interval.low <= 0 <= interval.high,
                clients_better=share_gaining(way * tables[a], way * tables[b]),
                clients_worse=share_gaining(way * tables[b], way * tables[a]),
                seeds_better=int((by_seed > 0).sum()),
                seeds_worse=int((by_seed < 0).sum()),
            )
        )  # fmt: skip
    best = max(tables, key=lambda name: way * float(without_noise(tables[name].mean())))  # of equals the first
    found = Comparison((), tuple(differences), clients, seeds, level, best, reference, target)

    rows = []
    for name, table in tables.items():
        runs = list((curves or {}).get(name, ()))
        hits = [] if target is None else [hit for hit in (reached(c, target, metric) for c in runs) if hit is not None]
        # The median over all seeds, where a seed that never arrives counts as infinitely late.
        late = [math.inf] * (len(runs) - len(hits))
        moved = [float(c.megabytes[-1]) for c in runs if c.megabytes is not None and len(c.megabytes)]
        rows.append(
            MethodRow(
                name=name,
                score=bounded(mean_interval(table, level), metric.low, metric.high),
                over_seeds=seed_deviation(table),
                spread=float(table.mean(axis=1).std(ddof=1)) if clients > 1 else 0.0,
                worst_decile=worst_decile(table, metric.higher),
                gain=None if by_oneself is None else mean_interval(way * (table - by_oneself), level),
                share_gaining=None if by_oneself is None else share_gaining(way * table, way * by_oneself),
                rounds_to_target=_median([hit.round for hit in hits] + late),
                megabytes_to_target=_median([hit.megabytes for hit in hits if hit.megabytes is not None] + late),
                seeds_reaching=len(hits),
                megabytes=_median(moved),
                best=name == best,
                level_with_best=name == best or found.difference(best, name).interval.low <= 0,
                against_reference=None if reference in (None, name) else found.difference(name, str(reference)),
            )
        )
    notes = _notes(clients, seeds, len(pairs), alpha)
    return Comparison(tuple(rows), tuple(differences), clients, seeds, level, best, reference, target, notes, metric)


def pair_up(
    scores: Mapping[str, Mapping[Any, Mapping[str, float]]],
) -> tuple[list[str], list[Any], dict[str, Floats], list[str]]:
    """From {method: {seed: {client: score}}} to tables over the clients and seeds that all methods have.

    Returns clients, seeds, tables and notes on what was left out. Methods without a common seed are paired over clients
    alone, each averaged over its own seeds (the seeds returned are then empty).

    >>> clients, seeds, tables, notes = pair_up({"a": {0: {"x": 0.5, "y": 0.7}}, "b": {0: {"x": 0.6}, 1: {"x": 0.8}}})
    >>> clients, seeds, tables["b"].tolist()
    (['x'], [0], [[0.6]])
    >>> notes
    ['clients without a score in every run are left out: 1', 'seeds not run by every method are left out: 1']
    """
    every = {seed: None for by_seed in scores.values() for seed in by_seed}
    seeds = [s for s in every if all(s in by_seed for by_seed in scores.values())]
    used = {name: (seeds or list(by_seed)) for name, by_seed in scores.items()}
    names = {c: None for name, by_seed in scores.items() for s in used[name] for c in by_seed[s]}
    clients = [
        c for c in names
        if all(math.isfinite(by_seed[s].get(c, math.nan)) for name, by_seed in scores.items() for s in used[name])
    ]  # fmt: skip
    tables = {}
    for name, by_seed in scores.items():
        table = np.array([[by_seed[s][c] for s in used[name]] for c in clients], dtype=np.float64)
        table = table.reshape(len(clients), len(used[name]))
        tables[name] = table if seeds else table.mean(axis=1, keepdims=True)
    notes = []
    if len(names) > len(clients):
        notes.append(f"clients without a score in every run are left out: {len(names) - len(clients)}")
    if not seeds:
        notes.append("the methods have no seed in common: each is averaged over its own seeds, paired over clients")
    elif len(every) > len(seeds):
        lost = ", ".join(str(s) for s in every if s not in seeds)
        notes.append(f"seeds not run by every method are left out: {lost}")
    return clients, seeds, tables, notes


def _median(numbers: Sequence[float]) -> float | None:
    if not numbers:
        return None
    middle = float(np.median(numbers))
    return middle if math.isfinite(middle) else None


def _notes(clients: int, seeds: int, comparisons: int, alpha: float) -> tuple[str, ...]:
    notes = []
    if comparisons and comparisons * 2.0 ** (1 - clients) >= alpha:
        needed = math.floor(math.log2(comparisons / alpha)) + 2
        notes.append(
            f"with {clients} clients and {comparisons} comparisons no p-value can fall below {alpha:.2g}: "
            f"differences can be marked as real from {needed} clients on"
        )
    if seeds == 1:
        notes.append("one seed: intervals speak of the spread over clients, not of what another seed would give")
    return tuple(notes)
