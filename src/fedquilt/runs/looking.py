"""Ways to look at a run: in a few lines, as a data frame, as curves, as a picture in a notebook."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt._util.metric import metric_of
from fedquilt._util.wording import megabytes
from fedquilt.report.quilt import Quilt
from fedquilt.results import Row
from fedquilt.runs.alarms import in_short

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fedquilt.runs.result import Run

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_CODE = '<pre style="line-height:1.2">{code}</pre>'


def in_words(summary: Mapping[str, Any]) -> str:
    """A summary in a few lines: what ran, what it reached, against what, and at what cost."""
    s, metric = summary, metric_of(summary)
    key, unit = metric.name, metric.unit
    lines = [f"{s['method']} on {s['scenario']}, seed {s['seed']}: {s['clients']} clients, {s['rounds']} rounds"]
    if s[f"{key}_mean"] is None:
        lines.append(f"nothing was measured on {s['split']} data")
    else:
        lines.append(
            f"{key} {metric.around(s[f'{key}_mean'], s[f'{key}_std'])}{unit} on {s['split']} data, "
            f"read-out '{s['readout']}' (mean ± standard deviation over clients; worst decile "
            f"{metric.show(s[f'{key}_worst_decile'])}{'' if metric.higher else '; lower is better'})"
        )
    if s.get("gain_over_alone") is not None and s["method"] != "local":
        lines.append(
            f"gain over alone {metric.show(s['gain_over_alone'], sign=True)} (alone {metric.show(s['alone_mean'])}"
            f"{unit}); "
            f"{100 * s['share_gaining']:.0f} % of the clients gain"
        )
    lines += other_tests(s)
    lines.append(
        f"{megabytes(s['megabytes_up'])} MB up, {megabytes(s['megabytes_down'])} MB down, {s['seconds']:.1f} s"
        + (f"; {s['virtual_seconds']:.4g} virtual s" if "virtual_seconds" in s else "")
        + (f", {s['late_updates']} updates were too late" if s.get("late_updates") else "")
    )
    if s.get("alarms"):
        lines.append(in_short(s["alarms"]))
    return "\n".join([*lines, *(s[key] for key in ("nothing_split", "compression", "privacy", "trouble") if key in s)])


def other_tests(summary: Mapping[str, Any]) -> list[str]:
    """What models are worth on everyone's test samples, and to clients that were held out, where it was asked for."""
    s, metric, lines = summary, metric_of(summary), []
    if "everyone_mean" in s:
        without = s["everyone_left_out"]
        told = f"; {without:.0f} samples a client, of other sensors or labels, are left out" if without else ""
        lines.append(f"{metric.name} {metric.show(s['everyone_mean'])}{metric.unit} on everyone's test data{told}")
    if "unseen_mean" in s:
        gain = metric.show(s["unseen_gain_over_alone"], sign=True)
        who = f"{len(s['unseen'])} unseen clients after they" if len(s["unseen"]) > 1 else "1 unseen client after it"
        lines.append(f"{metric.name} {metric.show(s['unseen_mean'])}{metric.unit} on {who} joined, {gain} over alone")
    return lines + ([s["unseen_refused"]] if "unseen_refused" in s else [])


def as_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a data frame."""
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a data frame needs pandas, which is not installed: pip install pandas; `run.rows` is a plain list"
        ) from None
    return pd.DataFrame(rows)


def drawn(run: Run, path: str | Path | None) -> Figure:
    """The leading metric and the loss over rounds, in the mean, side by side, a line a read-out and split."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("drawing curves needs matplotlib: pip install 'fedquilt[plots]'") from None
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    metric = run.federation.scenario.task.metric
    lead = f"{metric.name}, %" if metric.percent else metric.name
    for axes, key, title in zip(figure.subplots(1, 2), (metric.name, "loss"), (lead, "loss"), strict=True):
        scale = 100 if key == metric.name and metric.percent else 1
        for number, ((readout, split), points) in enumerate(curves(run.rows, key).items()):
            colour = _COLOURS[number // 2 % len(_COLOURS)]
            style = "-" if split == "test" else "--"
            values = [scale * value for value in points.values()]
            axes.plot(list(points), values, style, color=colour, marker=".", label=f"{readout}, {split}")
        axes.set_xlabel("round")
        axes.set_ylabel(f"{title} (mean over clients)")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    if path is not None:
        figure.savefig(path)
    return figure


def curves(rows: Sequence[Row], key: str) -> dict[tuple[str, str], dict[int, float]]:
    """The mean over clients of a number of the rows, by read-out and split, then by round.

    >>> row = {"readout": "received", "split": "test", "round": 1}
    >>> curves([{**row, "loss": 1.0}, {**row, "loss": 2.0}, {**row, "loss": None}], "loss")
    {('received', 'test'): {1: 1.5}}
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        if row.get(key) is not None:
            found.setdefault((row["readout"], row["split"]), {}).setdefault(row["round"], []).append(row[key])
    return {
        reading: {at: sum(values) / len(values) for at, values in sorted(points.items())}
        for reading, points in found.items()
    }


def as_html(run: Run) -> str:
    """The words and the quilt of the last plan, for a notebook."""
    from rich.console import Console

    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Quilt(run.plan, [client.name for client in run.federation.scenario.clients]))
    picture = console.export_html(inline_styles=True, code_format=_CODE)
    return f"<pre>{html.escape(str(run))}</pre>{picture}"
