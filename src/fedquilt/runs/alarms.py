"""Clients that somebody should look at: worse than they were, or worse than alone, by more than chance explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fedquilt._util.metric import Metric
from fedquilt.results import Row, final

_ERRORS = 2.0  # standard errors of a difference of two shares
_SHARE = 0.1  # of a score that is no share itself
_NAMED = 5  # alarms that are told one by one


def alarms(rows: Sequence[Row], alone: Sequence[Row], readout: str, metric: Metric) -> list[str]:
    """A sentence for each client whose score fell from what it was, or is below that of the same client alone.

    What it was is looked for on validation samples, or on test samples where there are no others; what it is alone is
    compared on test samples. Clients without a score are left out.

    >>> first = {"client": "a", "readout": "received", "split": "test", "accuracy": 0.9, "samples": 100, "round": 1}
    >>> alarms([first, {**first, "accuracy": 0.6, "round": 9}], [], "received", Metric("accuracy", percent=True))
    ['a fell from accuracy 90.0 % in round 1 to 60.0 %']
    """
    mine = [row for row in rows if row["readout"] == readout and row.get(metric.name) is not None and "liar" not in row]
    fallen = [told for series in _by_client(mine).values() if (told := _fallen(series, metric))]
    bar = final(alone, "received", "test") or final(alone, "adapted", "test")
    behind = [
        told
        for client, row in final(mine, readout, "test").items()
        if client in bar and (told := _behind(client, row, bar[client], metric))
    ]
    return fallen + behind


def in_short(found: Sequence[str]) -> str:
    """Alarms as one sentence; empty where there are none.

    >>> in_short(["a fell", "b fell"])
    'Look at: a fell; b fell.'
    """
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"Look at: {'; '.join(found[:_NAMED])}{more}." if found else ""


def _by_client(rows: Iterable[Row]) -> Mapping[str, list[Row]]:
    """Each client's rows on validation samples, or on test samples where it has no others, round by round."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row["split"] in ("validation", "test"):
            found.setdefault(row["client"], {}).setdefault(row["split"], []).append(row)
    return {client: splits.get("validation", splits.get("test", [])) for client, splits in found.items()}


def _fallen(series: Sequence[Row], metric: Metric) -> str:
    last = series[-1]
    best = max(series, key=lambda row: metric.gain(row[metric.name], 0.0))  # of equally good ones the first
    if not metric.gain(best[metric.name], last[metric.name]) > _margin(best, last, metric):
        return ""
    then, now = (f"{metric.show(row[metric.name])}{metric.unit}" for row in (best, last))
    moved = "fell" if metric.higher else "rose"
    return f"{last['client']} {moved} from {metric.name} {then} in round {best['round']} to {now}"


def _behind(client: str, row: Row, alone: Row, metric: Metric) -> str:
    if alone.get(metric.name) is None or not metric.gain(alone[metric.name], row[metric.name]) > _margin(
        row, alone, metric
    ):
        return ""
    now, bar = (f"{metric.show(each[metric.name])}{metric.unit}" for each in (row, alone))
    return f"{client} has {metric.name} {now}, alone it would have {bar}"


def _margin(one: Row, other: Row, metric: Metric) -> float:
    """What two scores may differ by without saying anything."""
    if not metric.percent:
        return _SHARE * max(abs(float(row[metric.name])) for row in (one, other))
    # of shares near 0 or 1 the error is that of one sample more or less
    shares = [(row[metric.name] * row["samples"] + 1) / (row["samples"] + 2) for row in (one, other)]
    return _ERRORS * math.sqrt(sum(p * (1 - p) / row["samples"] for p, row in zip(shares, (one, other), strict=True)))
