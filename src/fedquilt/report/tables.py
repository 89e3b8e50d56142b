"""A comparison as a table: text for the terminal, CSV, LaTeX and Markdown.

Scores are printed as papers do, with the standard deviation over seeds; beside them their interval.
Bold: the best method and those that are not significantly behind it. An arrow: really better or worse than the
reference.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from fedquilt._util.metric import ACCURACY, Metric
from fedquilt._util.wording import megabytes
from fedquilt.report.compare import Comparison, Further, MethodRow
from fedquilt.report.escapes import latex_escape, markdown_escape, one_line, spreadsheet_safe
from fedquilt.report.statistics import Interval, ranks

_RANK = "rank by mean, worst decile, gaining"
_DISPENSABLE = ("p (Holm)", "95 % interval", "MB to", "rank", "clients gaining", "MB a seed", "worst decile")


@dataclass(frozen=True)
class Cell:
    """One cell: its text and whether it is among the best."""

    text: str
    bold: bool = False


def cells(comparison: Comparison) -> tuple[list[str], list[list[Cell]]]:
    """Headings and rows as all printed forms show them; columns nobody has numbers for are left out."""
    rows, metric, unit = comparison.rows, comparison.metric, comparison.metric.unit
    columns: list[tuple[str, list[Cell]]] = [
        ("method", [Cell(r.name, r.level_with_best) for r in rows]),
        *([("attack", [Cell(r.attack or "–") for r in rows])] if any(r.attack for r in rows) else []),
        (metric.heading, [Cell(_as_papers(r, metric), r.level_with_best) for r in rows]),
        (f"{100 * comparison.level:.0f} % interval", [Cell(_from_to(r.score, metric)) for r in rows]),
        (f"worst decile{unit}", [Cell(metric.show(r.worst_decile)) for r in rows]),
    ]
    if any(r.gain for r in rows):
        columns.append(("gain over alone", [Cell(shown_interval(r.gain, metric, sign=True)) for r in rows]))
        columns.append(("clients gaining %", [Cell(_number(r.share_gaining, 100, ".0f")) for r in rows]))
    for at, other in enumerate(rows[0].further):
        heading = other.heading + unit
        columns.append((heading, [Cell(_mean_and_deviation(r.further[at], metric)) for r in rows]))
    if comparison.target is not None:
        goal = f"{metric.show(comparison.target)}{unit}"
        columns.append((f"rounds to {goal}", [Cell(_reaching(r, comparison.seeds)) for r in rows]))
        if any(r.megabytes_to_target is not None for r in rows):
            columns.append((f"MB to {goal}", [Cell(megabytes(r.megabytes_to_target)) for r in rows]))
    if any(r.megabytes is not None for r in rows):
        columns.append(("MB a seed", [Cell(megabytes(r.megabytes)) for r in rows]))
    if len(rows) > 2:
        columns.append((_RANK, [Cell(told) for told in _ranked(rows, metric)]))
    if comparison.reference is not None and len(rows) > 1:
        columns.append((f"against {comparison.reference}", [Cell(_against(r, metric)) for r in rows]))
        columns.append(("p (Holm)", [Cell(_p(r)) for r in rows]))
    return [title for title, _ in columns], [list(row) for row in zip(*(column for _, column in columns), strict=True)]


def as_text(comparison: Comparison, width: int = 80) -> Table:
    """A table for `rich.print` that many columns wide; names are text, never markup.

    Cells are not broken: what there is no room for is left out, the least important first, and named below.

    >>> from fedquilt.report.compare import compare
    >>> as_text(compare({"local": [[0.5]] * 6, "feddl": [[0.75]] * 6}, reference="local")).row_count
    2
    """
    headings, rows = cells(comparison)
    widths = [_width(heading, [row[i].text for row in rows]) for i, heading in enumerate(headings)]
    shown, left_out = list(range(len(headings))), []
    for dispensable in _DISPENSABLE:
        at = next((i for i in shown if headings[i].startswith(dispensable)), None)
        if at is not None and sum(widths[i] + 1 for i in shown) - 1 > width:
            shown.remove(at)
            left_out.append(headings[at])
    told = explanations(comparison)
    if left_out:
        told.append(f"No room here for: {'; '.join(left_out)}. A wider terminal or another --format has them.")
    table = Table(caption="\n".join(told), caption_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i in shown:
        # headings are broken into lines, so that cells need not be
        table.add_column(Text(textwrap.fill(headings[i], widths[i])), justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[i].text, style="bold" if row[i].bold else "") for i in shown))
    return table


def as_csv(comparison: Comparison) -> str:
    """Every number of the comparison, unrounded, one line a method.

    >>> from fedquilt.report.compare import compare
    >>> print(as_csv(compare({"local": [[0.5], [0.75]]})).splitlines()[1].split(",")[:2])
    ['local', '0.625']
    """
    lines, out = records(comparison), io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({key: spreadsheet_safe(v) if isinstance(v, str) else v for key, v in line.items()})
    return out.getvalue()


def records(comparison: Comparison) -> list[dict[str, str | float | bool | None]]:
    """Every number of the comparison by name, one dict a method."""
    found, attacked = [], any(row.attack for row in comparison.rows)
    for r in comparison.rows:
        d = r.against_reference
        line: dict[str, str | float | bool | None] = {"method": r.name, **({"attack": r.attack} if attacked else {})}
        line |= _spread_out(comparison.metric.name, r.score) | {"deviation_over_seeds": r.over_seeds}
        line |= {"spread_over_clients": r.spread, "worst_decile": r.worst_decile}
        line |= _spread_out("gain", r.gain) | {"share_gaining": r.share_gaining, "target": comparison.target}
        for other in r.further:
            line |= {other.name: other.mean, f"{other.name}_deviation_over_seeds": other.over_seeds}
        line |= {"rounds_to_target": r.rounds_to_target, "megabytes_to_target": r.megabytes_to_target}
        line |= {"seeds_reaching": r.seeds_reaching, "megabytes": r.megabytes}
        line |= {"best": r.best, "level_with_best": r.level_with_best, "reference": comparison.reference}
        line |= _spread_out("difference", d.interval if d else None)
        line |= {"p": d.p if d else None, "p_holm": d.p_holm if d else None, "real": d.real if d else None}
        found.append(line | {"clients": comparison.clients, "seeds": comparison.seeds})
    return found


def as_latex(comparison: Comparison) -> str:
    """A `tabular` for the packages booktabs and amssymb, its explanations as comments below.

    >>> from fedquilt.report.compare import compare
    >>> print(as_latex(compare({"fed_avg": [[0.5], [0.5]]})).splitlines()[4])
    \\textbf{fed\\_avg} & \\textbf{50.0} & 50.0 to 50.0 & 50.0 \\\\
    """
    headings, rows = cells(comparison)

    def line(texts: Sequence[str]) -> str:
        return " & ".join(texts) + r" \\"

    body = [line([_styled(cell, latex_escape, r"\textbf{{{}}}") for cell in row]) for row in rows]
    return "\n".join(
        [rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule", line([latex_escape(h) for h in headings]),
         r"\midrule", *body, r"\bottomrule", r"\end{tabular}",
         *(f"% {one_line(note)}" for note in explanations(comparison)), ""]
    )  # fmt: skip


def as_markdown(comparison: Comparison) -> str:
    """A Markdown table with its explanations below.

    >>> from fedquilt.report.compare import compare
    >>> print(as_markdown(compare({"fed|avg": [[0.5], [0.5]]})).splitlines()[2])
    | **fed\\|avg** | **50.0** | 50.0 to 50.0 | 50.0 |
    """
    headings, rows = cells(comparison)
    lines = [
        "| " + " | ".join(markdown_escape(h) for h in headings) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(headings) - 1)) + "|",
        *("| " + " | ".join(_styled(cell, markdown_escape, "**{}**") for cell in row) + " |" for row in rows),
    ]
    return "\n".join([*lines, "", *(f"{markdown_escape(note)}  " for note in explanations(comparison))]).rstrip() + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {"csv": as_csv, "latex": as_latex, "markdown": as_markdown}


def explanations(comparison: Comparison) -> list[str]:
    """What the signs mean, and what the numbers cannot say."""
    c = comparison
    clients, seeds = _count(c.clients, "client"), _count(c.seeds, "seed")
    name = c.metric.name[0].upper() + c.metric.name[1:]
    told = [f"{name}: mean over {clients} and {seeds}{', ± standard deviation over seeds' if c.seeds > 1 else ''}."]
    if not c.metric.higher:
        told.append("Lower is better; gains and differences are above 0 where it is lower.")
    told.append(f"Intervals (of differences: ± half, if possible) are {100 * c.level:.0f} % over clients and seeds.")
    if len(c.rows) > 1:
        told.append(f"Bold: the best method ({c.best}) and those not significantly behind it (paired interval).")
    told += [f"{other.heading[0].upper()}{other.heading[1:]}: {other.meaning}." for other in c.rows[0].further]
    if any(r.megabytes is not None for r in c.rows):
        told.append("MB: sent and received by all clients together in the run of one seed, the median over seeds.")
    if c.reference is not None and len(c.rows) > 1:
        told.append(
            f"▲ ▼: really better or worse than {c.reference} (Wilcoxon over clients, Holm over all pairs, and the "
            "interval of the difference leaves out 0)."
        )
    names = {row.name for row in c.rows} | {"local"}  # which are written as they are, several with commas
    named = [note.partition(":")[0].split(", ")[0] in names for note in c.notes]
    return told + [(note if at else note[0].upper() + note[1:]) + "." for note, at in zip(c.notes, named, strict=True)]


def shown_interval(interval: Interval | None, metric: Metric = ACCURACY, sign: bool = False) -> str:
    """An interval as its metric is shown; the mean alone where it holds what no difference of two scores can be.

    >>> shown_interval(Interval(0.912, 0.9, 0.924)), shown_interval(Interval(0.02, 0.01, 0.03), sign=True)
    ('91.2 ± 1.2', '+2.0 ± 1.0')
    """
    mean = metric.show(None if interval is None else interval.mean, sign)
    most = metric.high - metric.low
    return f"{mean} ± {metric.show(interval.half)}" if interval is not None and interval.within(most) else mean


def _as_papers(row: MethodRow, metric: Metric) -> str:
    """A mean with its standard deviation over seeds, where there are several."""
    return metric.show(row.score.mean) + ("" if row.over_seeds is None else f" ± {metric.show(row.over_seeds)}")


def _mean_and_deviation(found: Further, metric: Metric) -> str:
    """The same of another test set."""
    return metric.show(found.mean) + ("" if found.over_seeds is None else f" ± {metric.show(found.over_seeds)}")


def _from_to(interval: Interval, metric: Metric) -> str:
    """The interval of a score; none where one number is all there is."""
    nothing = (interval.low, interval.high) == (metric.low, metric.high)
    return "–" if nothing else f"{metric.show(interval.low)} to {metric.show(interval.high)}"


def _ranked(rows: Sequence[MethodRow], metric: Metric) -> list[str]:
    """Each method's places by mean, by worst decile and, where it is known, by clients gaining over alone."""
    way = 1.0 if metric.higher else -1.0
    numbers = [[way * r.score.mean for r in rows], [way * r.worst_decile for r in rows]]
    gaining = [r.share_gaining for r in rows if r.share_gaining is not None]
    by = [ranks(each) for each in [*numbers, *([gaining] if len(gaining) == len(rows) else [])]]
    return [", ".join(str(place) for place in places) for places in zip(*by, strict=True)]


def _width(heading: str, texts: Sequence[str]) -> int:
    """The columns that a column of the table takes: its widest cell, or the longest word of its heading."""
    return max(len(text) for text in (*heading.split(), *texts))


def _styled(cell: Cell, escape: Callable[[str], str], bold: str) -> str:
    return bold.format(escape(cell.text)) if cell.bold else escape(cell.text)


def _spread_out(name: str, interval: Interval | None) -> dict[str, str | float | bool | None]:
    low, mean, high = (None, None, None) if interval is None else (interval.low, interval.mean, interval.high)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _number(value: float | None, scale: float, form: str) -> str:
    return "–" if value is None else format(value * scale, form)


def _reaching(row: MethodRow, seeds: int) -> str:
    if row.rounds_to_target is None:
        return f"– ({row.seeds_reaching} of {seeds})" if row.seeds_reaching else "–"
    some = f" ({row.seeds_reaching} of {seeds})" if row.seeds_reaching < seeds else ""
    return f"{row.rounds_to_target:g}{some}"


def _against(row: MethodRow, metric: Metric) -> str:
    d = row.against_reference
    if d is None:
        return "–"
    return shown_interval(d.interval, metric, sign=True) + ((" ▲" if d.interval.mean > 0 else " ▼") if d.real else "")


def _p(row: MethodRow) -> str:
    if row.against_reference is None:
        return "–"
    p = row.against_reference.p_holm
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
