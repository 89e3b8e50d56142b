"""Statistics of score tables: intervals, deciles and paired tests over clients and seeds.

A score table is an array (clients, seeds): the same clients, the same seeds, one table a method. Two things vary at
once and neither can be wished away. All clients of a seed share that seed's initial weights and batch orders, and all
seeds of a client share its data, so the C x S numbers are not C x S independent ones. Hence:

- *Interval*: the two-way random-effects interval of the mean. With the mean squares of clients, seeds and residual,
  Var(mean) = (MS_clients + MS_seeds - MS_residual) / (C S), Student's t with Satterthwaite's degrees of freedom. Three
  seeds that disagree give a wide interval however many clients there are; one seed speaks of clients only.
- *Test*: Wilcoxon's signed-rank test over the clients' mean differences, corrected by Holm over all pairs of methods.
- *Real*: the corrected p is below alpha and the interval of the difference, which knows about seeds, leaves out 0.

Clients of one federation also learn from each other, so both speak of clients like these in federations like this one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from fedquilt._util import wording

Floats = NDArray[np.float64]
_FEW = 13  # clients that differ, up to which ties are no matter of an approximation


@dataclass(frozen=True)
class Interval:
    """A mean and the interval around it; `half` is half its width."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def within(self, most: float) -> bool:
        """Whether it is an interval of differences that can be, from -most to most: two seeds may say nothing.

        >>> Interval(0.02, 0.01, 0.03).within(1), Interval(-0.26, -1.35, 0.83).within(1)
        (True, False)
        """
        return self.half < float("inf") and max(-self.low, self.high) <= most


def mean_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """The mean of a (clients, seeds) table and its two-way random-effects interval.

    With one seed it is Student's interval over clients, with one client the one over seeds.

    >>> i = mean_interval([[0.8], [0.9], [1.0]])
    >>> f"{i.mean:.2f} from {i.low:.3f} to {i.high:.3f}"
    '0.90 from 0.652 to 1.148'
    """
    x = score_table(values)
    clients, seeds = x.shape
    mean = float(x.mean())
    if x.size == 1:
        return Interval(mean, -math.inf, math.inf)
    rows, columns = x.mean(axis=1), x.mean(axis=0)
    ms_clients = seeds * float(((rows - mean) ** 2).sum()) / (clients - 1) if clients > 1 else 0.0
    ms_seeds = clients * float(((columns - mean) ** 2).sum()) / (seeds - 1) if seeds > 1 else 0.0
    free = (clients - 1) * (seeds - 1)
    ms_rest = float(((x - rows[:, None] - columns + mean) ** 2).sum()) / free if free else 0.0
    # A negative estimate of a variance component is read as zero: the variance is never below that of one way alone.
    square = max(ms_clients + ms_seeds - ms_rest, ms_clients, ms_seeds)
    if square <= 1e-24:
        return Interval(mean, mean, mean)
    spread = 0.0
    for ms, degrees in ((ms_clients, clients - 1), (ms_seeds, seeds - 1), (ms_rest, free)):
        spread += ms**2 / degrees if degrees else 0.0
    # Between the degrees of freedom of the scarcer way and those of all cells.
    ways = [n - 1 for n in (clients, seeds) if n > 1]
    degrees_of_freedom = min(max(square**2 / spread, min(ways)), x.size - 1)
    half = float(stats.t.ppf(0.5 + level / 2, degrees_of_freedom)) * math.sqrt(square / x.size)
    return Interval(mean, mean - half, mean + half)


def bounded(interval: Interval, low: float, high: float) -> Interval:
    """An interval without what cannot be: an accuracy is not above 1 however wide Student's t is.

    >>> bounded(Interval(0.9, 0.65, 1.15), 0, 1)
    Interval(mean=0.9, low=0.65, high=1)
    """
    return Interval(interval.mean, max(interval.low, low), min(interval.high, high))


def seed_deviation(values: ArrayLike) -> float | None:
    """The standard deviation over seeds of the mean over clients, as papers print it; None of one seed.

    >>> seed_deviation([[0.25, 0.75], [0.5, 1.0], [0.0, 0.5]]), seed_deviation([[0.5], [0.7]])
    (0.3535533905932738, None)
    """
    means = score_table(values).mean(axis=0)
    return float(means.std(ddof=1)) if len(means) > 1 else None


def ranks(values: Sequence[float]) -> list[int]:
    """Places from the highest number down; what is equal shares the better place.

    >>> ranks([0.5, 0.9, 0.9, 0.7])
    [4, 1, 1, 3]
    """
    clean = without_noise(values).tolist()
    return [1 + sum(other > value for other in clean) for value in clean]


def worst_decile(values: ArrayLike, higher: bool = True) -> float:
    """Mean over the worst tenth of the clients (at least one), each client first averaged over its seeds.

    `higher` says whether more is better.

    >>> worst_decile([[c / 20] for c in range(20)])
    0.025
    """
    return wording.worst_decile(score_table(values).mean(axis=1).tolist(), higher)


def share_gaining(values: ArrayLike, alone: ArrayLike) -> float:
    """Share of the clients whose mean over seeds is above the one they reach alone; a tie is no gain.

    >>> share_gaining([[0.9], [0.8], [0.7], [0.9]], [[0.8], [0.8], [0.8], [0.8]])
    0.5
    """
    return float((_client_differences(values, alone) > 0).mean())


def signed_rank(first: ArrayLike, second: ArrayLike) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test over the clients' mean differences (1 where all are equal).

    >>> signed_rank([[0.5], [0.6], [0.7], [0.8], [0.9]], [[0.4], [0.4], [0.4], [0.4], [0.4]])
    0.0625
    """
    differences = _client_differences(first, second)
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    sizes = stats.rankdata(abs(differences))
    if len(differences) <= _FEW and len(np.unique(sizes)) < len(sizes):  # ties
        return _counted(sizes, differences > 0)
    with warnings.catch_warnings():
        # Older SciPy warns that few clients make the normal approximation rough; `compare` says so in its notes.
        warnings.simplefilter("ignore", UserWarning)
        return float(stats.wilcoxon(differences).pvalue)


def _counted(sizes: Floats, up: NDArray[np.bool_]) -> float:
    """The exact p-value where ranks tie, from how many choices of signs have each sum of ranks.

    SciPy does what is done here, one choice of signs at a time: minutes for the pairs of forty methods.
    """
    halves = np.rint(2 * sizes).astype(int)  # ranks that tie are whole or end in a half
    ways = np.zeros(halves.sum() + 1)
    ways[0] = 1
    for half in halves:
        ways[half:] += ways[:-half].copy()
    at = halves[up].sum()
    return float(min(1.0, 2 * min(ways[: at + 1].sum(), ways[at:].sum()) / ways.sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the adjusted p-values, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def without_noise(values: ArrayLike) -> Floats:
    """Numbers without the last digits that sums leave behind: what is equal on paper is equal here, in ranks and signs.

    >>> bool(0.3 - 0.2 == 0.1), bool(without_noise(0.3 - 0.2) == without_noise(0.1))
    (False, True)
    """
    return np.asarray(values, dtype=np.float64).round(12)


def score_table(values: ArrayLike) -> Floats:
    """The values as an array (clients, seeds) of finite numbers, or an error that says what is wrong."""
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(f"a score table has the shape (clients, seeds) and at least one of each, not {table.shape}")
    if not np.isfinite(table).all():
        client, seed = np.argwhere(~np.isfinite(table))[0]
        raise ValueError(f"client number {client} has no finite score in seed number {seed}; leave it out of the table")
    return table


def _client_differences(first: ArrayLike, second: ArrayLike) -> Floats:
    """Differences of the clients' means; equal ones tie in ranks as they do on paper."""
    return without_noise(score_table(first).mean(axis=1) - score_table(second).mean(axis=1))
