"""Summaries of runs as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fedquilt._util.metric import ACCURACY, metric_of
from fedquilt._util.wording import megabytes

Summary = Mapping[str, Any]


def summary_table(summaries: Sequence[Summary]) -> Table:
    """A row a run: its score with the spread over clients, worst decile, gain over alone, megabytes, seconds.

    The score is accuracy, or what else leads. The best mean is bold.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    with_gain = any(s.get("gain_over_alone") is not None for s in summaries)
    table.add_column("method")
    metric = metric_of(summaries[0]) if summaries else ACCURACY
    key = metric.name
    table.add_column(metric.heading, justify="right")
    table.add_column(f"worst\ndecile{metric.unit}", justify="right")
    if with_gain:
        table.add_column("gain over\nalone", justify="right")
        table.add_column("clients\ngaining", justify="right")
    table.add_column("MB\nup", justify="right")
    table.add_column("MB\ndown", justify="right")
    table.add_column("seconds", justify="right")
    known = [s[f"{key}_mean"] for s in summaries if s[f"{key}_mean"] is not None]
    best = (max if metric.higher else min)(known, default=None)
    for s in summaries:
        score = s[f"{key}_mean"]
        shown = "–" if score is None else metric.around(score, s[f"{key}_std"], wide=4)
        cells = [s["method"], shown, metric.show(s.get(f"{key}_worst_decile"))]
        if with_gain:
            of_all = s.get("share_gaining")
            alone = s["method"] == "local"
            cells.append("–" if alone else metric.show(s.get("gain_over_alone"), sign=True))
            cells.append("–" if alone or of_all is None else f"{100 * of_all:.0f} %")
        cells += [megabytes(s["megabytes_up"]), megabytes(s["megabytes_down"]), f"{s['seconds']:.1f}"]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if score == best and len(summaries) > 1 else "")
    return table


def what_it_says(summary: Summary) -> str:
    """Which numbers these are: read-out, split, round, clients.

    >>> s = {"readout": "received", "split": "test", "rounds": 20, "clients_measured": 24}
    >>> what_it_says(s)
    "Accuracy on test data after round 20, read-out 'received': mean ± standard deviation over 24 clients."
    """
    if not summary["clients_measured"]:
        return f"Nothing was measured on {summary['split']} data: no client has such samples."
    liars = summary.get("liars")
    told = f" The {liars} who lie ({summary['attack']}) are not counted." if liars else ""
    metric = metric_of(summary)
    name, lower = metric.name[0].upper() + metric.name[1:], "" if metric.higher else " (lower is better)"
    return (
        f"{name}{lower} on {summary['split']} data after round {summary['rounds']}, read-out '{summary['readout']}': "
        f"mean ± standard deviation over {summary['clients_measured']} clients.{told}"
    )


def in_full(summary: Summary) -> str:
    """What privacy a run has, and how much of its rounds is noise.

    >>> in_full({"privacy": "Private with epsilon 8.", "noise_multiplier": 2.0, "clip": 0.5, "signal_to_noise": 0.031})
    'Private with epsilon 8. Noise 2 times the clip 0.5; a round moves a model at most 0.031 times as far as its noise.'
    """
    ratio = summary.get("signal_to_noise")
    told = "" if ratio is None else f"; a round moves a model at most {ratio:.2g} times as far as its noise"
    return f"{summary['privacy']} Noise {summary['noise_multiplier']:.3g} times the clip {summary['clip']:.3g}{told}."
