"""What the rows of benchmarks/auto.py say, as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RULE = 2  # of `auto` and the vote, counted up where they change: scores by another are not compared
UNPLANTED = ("iid", "dirichlet-0.5", "dirichlet-0.1", "labels-2")
Row = dict[str, Any]
BySeed = Mapping[int, Sequence[float]]
Scores = dict[tuple[str, str, str], dict[int, list[float]]]  # by cell, method and read-out; by seed, client by client


def kept(path: Path) -> list[Row]:
    """Rows that can be compared: of each cell the runs of `auto` and the votes by its newest rule, and all the rest."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    newest: dict[str, int] = {}
    for row in rows:
        if row["method"] == "auto":
            newest[row["cell"]] = max(row.get("rule", 1), newest.get(row["cell"], 1))
    found: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        key, now = (row["cell"], row["method"], row["seed"]), row.get("rule", 1) == newest.get(row["cell"], 1)
        if row["method"] == "auto" and not now:
            continue
        for split in {"validation", "test"} & row.keys():
            scores = {r: list(v.values()) if isinstance(v, dict) else v for r, v in row[split].items()}
            row[split] = {readout: each for readout, each in scores.items() if now or readout != "vote"}
        if key not in found or now:
            found[key] = row
    return list(found.values())


def table(rows: list[Row]) -> str:
    """Mean test accuracy in percent by cell (mean over seeds), of every method with its best read-out in hindsight."""
    scores: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        for readout, clients in row.get("test", {}).items():
            mine = scores.setdefault((row["cell"], row["method"]), {}).setdefault(readout, [])
            mine.append(100 * statistics.fmean(clients))
    methods = list(dict.fromkeys(method for _, method in scores))
    text = [f"| cell | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for cell in dict.fromkeys(cell for cell, _ in scores):
        cells = []
        for method in methods:
            found = scores.get((cell, method), {})
            seeds = max(map(len, found.values()), default=0)  # read-outs of fewer seeds do not count
            by = {readout: statistics.fmean(v) for readout, v in found.items() if len(v) == seeds}
            best = max(by, key=by.__getitem__, default="")
            cells.append(f"{by[best]:.1f} {best}" if best else "-")
        text.append(f"| {cell} | {' | '.join(cells)} |")
    return "\n".join(text)


def verdict(rows: list[Row]) -> str:
    """Auto with the vote against the best fixed method and read-out in hindsight, cell by cell, and against FedAvg+.

    Differences are paired by seed, with their standard error, or by client where there is one seed. A method counts in
    a cell where it ran all of auto's seeds. FedAvg+ is FedAvg adapted or fine-tuned, whichever is better in hindsight.
    """
    scores: Scores = {}
    for row in rows:
        for readout, clients in row.get("test", {}).items():
            scores.setdefault((row["cell"], row["method"], readout), {})[row["seed"]] = clients
    text = [
        "| cell | auto, vote | best fixed in hindsight | difference | FedAvg+ | worse than alone | Rand |",
        "|---" * 7 + "|",
    ]
    gaps, ahead = [], []
    for cell in dict.fromkeys(cell for cell, method, _ in scores if method == "auto"):
        mine = scores[cell, "auto", "vote"]
        means = {
            key: _mean(each, mine) for key, each in scores.items() if key[0] == cell and mine.keys() <= each.keys()
        }
        best = max((key for key in means if not key[1].startswith("auto")), key=means.__getitem__)
        gap, error = _difference(mine, scores[best])
        plus = [means[key] for key in ((cell, "fedavg", "adapted"), (cell, "fedavg", "fine-tuned")) if key in means]
        alone = scores.get((cell, "local", "received"), {})
        worse = [sum(a < b for a, b in zip(mine[s], alone[s], strict=True)) for s in mine if s in alone]
        ours = [row for row in rows if (row["cell"], row["method"]) == (cell, "auto")]
        which = min if cell.endswith(UNPLANTED) else max
        found = [which(row["rand"].values(), default=1.0) for row in ours]
        old = "" if ours[0].get("rule", 1) == RULE else " (an earlier rule)"
        cells = (
            f"{cell}{old}", f"{_mean(mine, mine):.1f}", f"{means[best]:.1f} {best[1]}, {best[2]}",
            f"{gap:+.1f} ± {error:.1f}", f"{max(plus):.1f}" if plus else "-",
            f"{', '.join(map(str, worse))} of {len(next(iter(mine.values())))}",
            ", ".join(f"{index:.2f}" for index in found),
        )  # fmt: skip
        text.append(f"| {' | '.join(cells)} |")
        if plus and not old:  # a cell where there is something to be compared with
            gaps.append((gap, error))
            ahead.append(_mean(mine, mine) - max(plus))
    if gaps:
        within = sum(gap >= -error for gap, error in gaps)
        worst, mean = min(gap for gap, _ in gaps), statistics.fmean(ahead)
        text.append(
            f"\nOf {len(gaps)} cells by rule {RULE}: within an error of the best in {within}; the worst {worst:+.1f}; "
            f"{mean:+.1f} against FedAvg+ in the mean."
        )
    return "\n".join(text)


def safety(rows: list[Row]) -> str:
    """How many clients end below alone with auto's vote: on test samples, and on validation by more than two errors."""
    alone = {(row["cell"], row["seed"]): row for row in rows if row["method"] == "local"}
    clients = below = surely = 0
    for row in rows:
        other = alone.get((row["cell"], row["seed"]))
        if row["method"] != "auto" or row.get("rule", 1) != RULE or other is None:
            continue
        clients += len(row["test"]["vote"])
        below += sum(a < b for a, b in zip(row["test"]["vote"], other["test"]["received"], strict=True))
        samples = row["samples"]
        for p, q, n in zip(row["validation"]["vote"], other["validation"]["received"], samples, strict=True):
            surely += bool(n) and p < q - 2 * ((p * (1 - p) + q * (1 - q)) / n) ** 0.5
    return (
        f"Of {clients} clients {below} are below alone on test samples, {surely} on validation by more than two errors."
    )


def _difference(mine: BySeed, other: BySeed) -> tuple[float, float]:
    """The mean difference in points, and its standard error: over seeds, or over clients where there is one."""
    gaps = [_mean(mine, [seed]) - _mean(other, [seed]) for seed in mine]
    if len(gaps) == 1:
        (seed,) = mine
        gaps = [100 * (a - b) for a, b in zip(mine[seed], other[seed], strict=True)]
    return statistics.fmean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5


def _mean(by_seed: BySeed, seeds: Iterable[int]) -> float:
    """Per cent, over clients and some seeds."""
    return 100 * statistics.fmean(statistics.fmean(by_seed[seed]) for seed in seeds)
