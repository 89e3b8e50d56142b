"""Which method to use, from runs of several on the same clients and seeds: chosen on validation samples, told by test.

A method answers by the vote where it was read out, else as it declares. The one with the best mean over clients and
seeds on validation samples is advised; test samples, which no choice saw, say how good it is, how sure that is, and who
gains and who loses against training alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedquilt._util.metric import Metric
from fedquilt._util.wording import megabytes
from fedquilt.report.compare import Comparison, MethodRow, compare, pair_up
from fedquilt.report.comparison_data import Group, final_scores, measured
from fedquilt.report.read_runs import RunFiles
from fedquilt.report.statistics import Floats, mean_interval, without_noise

ADVICE = "advice.json"  # beside the runs of a race: what to make of them
VOTE, BAR = "vote", "local"
_HOPELESS, _SURE = 0.02, 0.99  # behind the best by more than so much, at that level
_FAR = 0.05  # the same as a share of the best, of metrics that are no shares themselves
_CHEAPER = 0.8  # of the bytes
_NAMED = 6  # clients and decisions that are named at most


@dataclass(frozen=True)
class Advice:
    """What to use, in sentences and in numbers."""

    method: str
    readout: str
    sentences: tuple[str, ...]
    next: tuple[str, ...]
    facts: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        told = {"method": self.method, "readout": self.readout, **self.facts}
        return told | {"sentences": list(self.sentences), "next": list(self.next)}


def answers_by(group: Group) -> str:
    """The read-out that a method is judged and used with."""
    voted = all((VOTE, "validation") in run.series for run in group.runs)
    return VOTE if voted else group.runs[0].reading[0]


def on(split: str, groups: Sequence[Group]) -> tuple[list[str], dict[str, Floats]]:
    """The clients that all runs measured on a split, and a table (clients, seeds) a method."""
    scores = {g.name: measured([g], (answers_by(g), split)).scores.get(g.name, {}) for g in groups}
    clients, _, tables, _ = pair_up(scores)
    return clients, tables


def hopeless(groups: Sequence[Group]) -> dict[str, float]:
    """How far methods are behind the best one on validation samples, those for whom more seeds would not help.

    Clients alone are the bar, and stay.
    """
    _, tables = on("validation", groups)
    metric = groups[0].runs[0].metric
    way = 1.0 if metric.higher else -1.0
    best = max(tables, key=lambda name: way * float(tables[name].mean()))
    far = _HOPELESS if metric.percent else _FAR * abs(float(tables[best].mean()))
    behind = {
        name: mean_interval(way * (tables[best] - table), _SURE) for name, table in tables.items() if name != best
    }
    return {name: gap.mean for name, gap in behind.items() if gap.low > far and name != BAR}


def advise(
    groups: Sequence[Group], scenario: str, stopped: Mapping[str, float] | None = None, seeds: int = 1, also: str = ""
) -> Advice:
    """What to use on a scenario, of what its runs say; `stopped` are the methods that were hopeless, and how far,
    `also` the options that commands on this scenario need."""
    _, chosen_on = on("validation", groups)
    metric = groups[0].runs[0].metric
    way = 1.0 if metric.higher else -1.0
    order = sorted(chosen_on, key=lambda name: -way * float(without_noise(chosen_on[name].mean())))
    best, others = order[0], order[1:]
    by_name = {group.name: group for group in groups}
    clients, tables = on("test", groups)
    alone = _alone(by_name[BAR].runs, clients) if BAR in by_name else None
    curves = {name: list(measured([group]).curves[name].values()) for name, group in by_name.items()}
    table = compare(tables, alone=alone, curves=curves, reference=best, metric=metric)
    rows = {row.name: row for row in table.rows}
    readout = answers_by(by_name[best])
    gains = None if alone is None else way * (tables[best].mean(1) - alone.mean(1))
    sentences = [
        _use(best, readout, len(clients), seeds),
        _how_good(rows[best], metric),
        *([_how_sure(table, best, others[0])] if others else []),
        _cost(rows, best, len(clients)),
        *([_who(clients, gains, metric)] if gains is not None and best != BAR else []),
        *_level(table, rows, best),
        *([_stopped(stopped, metric)] if stopped else []),
        *_found(by_name.get("auto")),
    ]
    facts = {
        "validation": {name: float(chosen_on[name].mean()) for name in order},
        "metric": metric.told(),
        "test": {name: rows[name].score.mean for name in order},
        "megabytes": {name: rows[name].megabytes for name in order},
        "gains": {} if gains is None else dict(zip(clients, gains.tolist(), strict=True)),
        "stopped": dict(stopped or {}),
    }
    commands = _next(scenario, best, readout, table, others, seeds)
    whole = tuple(f"fedquilt {words}{also}   # {why}" for words, why in commands)
    return Advice(best, readout, tuple(sentences), whole, facts)


def _alone(runs: Sequence[RunFiles], clients: Sequence[str]) -> Floats:
    """(clients, seeds) the clients by themselves, with the model that they trained and nothing else."""
    scores = [final_scores(run, run.series[run.reading]) for run in runs]
    return np.array([[mine[client] for mine in scores] for client in clients])


# --- sentences --------------------------------------------------------------------------------------------------------


def _use(best: str, readout: str, clients: int, seeds: int) -> str:
    told = f"chosen on the validation samples of {clients} clients, {seeds} seed{'s' if seeds > 1 else ''}"
    if best == BAR:
        return f"Let clients train alone ('{BAR}', read out by '{readout}'): no federation does better here ({told})."
    return f"Use '{best}', and let clients answer by the read-out '{readout}' ({told})."


def _score(value: float, metric: Metric) -> str:
    """A score with its unit, or with its name where it has none."""
    return f"{metric.show(value)}{metric.unit}" if metric.percent else f"{metric.name} {metric.show(value)}"


def _by(value: float, metric: Metric) -> str:
    """How much better, above 0 whichever way is better."""
    return metric.show(value, sign=True) + (" points" if metric.percent else "")


def _how_good(row: MethodRow, metric: Metric) -> str:
    told = f"On test samples, which no choice saw, clients score {_score(row.score.mean, metric)} with it"
    if row.gain is not None:
        low, high = metric.show(row.gain.low, sign=True), metric.show(row.gain.high, sign=True)
        told += f", {_by(row.gain.mean, metric)} over training alone (95 % interval {low} to {high})"
    told += f"; the worst decile of clients {_score(row.worst_decile, metric)}"
    return f"{told}." if metric.higher else f"{told}. Lower is better, and gains are above 0 where it is lower."


def _how_sure(table: Comparison, best: str, second: str) -> str:
    gap = table.difference(best, second)
    metric = table.metric
    low, high = (metric.show(end, sign=True) for end in (gap.interval.low, gap.interval.high))
    word = "that is real" if gap.real else "which may be chance"
    told = f"{_by(gap.interval.mean, metric)} on test samples (95 % interval {low} to {high}), {word}"
    return f"How sure: against the next best on validation samples, '{second}', it is {told}."


def _cost(rows: Mapping[str, MethodRow], best: str, clients: int) -> str:
    mine, usual = rows[best].megabytes, rows["fedavg"].megabytes if "fedavg" in rows else None
    if mine is None:
        return "What it moves was not counted."
    told = f"It moves {megabytes(mine / clients)} MB a client in the whole run, sent and received"
    return told + (f", {mine / usual:.2f} times what FedAvg moves." if usual and best != "fedavg" else ".")


def _who(clients: Sequence[str], gains: Floats, metric: Metric) -> str:
    worse = sorted((float(g), c) for g, c in zip(gains, clients, strict=True) if without_noise(g) < 0)
    told = f"Who gains: {int((without_noise(gains) > 0).sum())} of {len(clients)} clients over training alone"
    if not worse:
        return f"{told}; nobody loses."
    names = ", ".join(f"{client} ({metric.show(gain, sign=True)})" for gain, client in worse[:_NAMED])
    more = f" and {len(worse) - _NAMED} more" if len(worse) > _NAMED else ""
    return f"{told}; {len(worse)} {'lose' if len(worse) > 1 else 'loses'}: {names}{more}."


def _level(table: Comparison, rows: Mapping[str, MethodRow], best: str) -> list[str]:
    """Methods that are not behind, and cheaper."""
    mine, found = rows[best].megabytes, []
    for row in table.rows:
        if row.name != best and mine and row.megabytes is not None and row.megabytes < _CHEAPER * mine:
            gap = table.difference(best, row.name)
            if gap.interval.low <= 0:
                share = f"{100 * row.megabytes / mine:.0f} % of its bytes" if row.megabytes else "no bytes at all"
                found.append(
                    f"Not clearly behind it, with {share}: '{row.name}' ({_score(row.score.mean, table.metric)})."
                )
    return found


def _stopped(stopped: Mapping[str, float], metric: Metric) -> str:
    told = ", ".join(
        f"'{name}' ({metric.show(gap)}{' points' if metric.percent else ''} behind)" for name, gap in stopped.items()
    )
    return f"Stopped after the first seed, as too far behind on validation samples: {told}."


def _found(group: Group | None) -> list[str]:
    """What auto decided in its first run."""
    if group is None:
        return []
    changes = group.runs[0].summary.get("changes") or []
    if not changes:
        return ["What auto found: no evidence that any unit should be shared by fewer than all."]
    told = [str(sentence).partition("; rejected")[0] for sentence in changes[:_NAMED]]
    return [f"What auto found (seed {group.runs[0].seed}): {sentence}." for sentence in told]


def _next(
    scenario: str, best: str, readout: str, table: Comparison, others: Sequence[str], seeds: int
) -> list[tuple[str, str]]:  # fmt: skip
    """Commands, and why."""
    found = [(f"run {scenario} {best} --readouts received,{readout}", "train it, and keep the models")]
    if others and not table.difference(best, others[0]).real:
        found.append((f"advise {scenario} --seeds {2 * seeds}", "is the difference real?"))
    if best not in (BAR, "auto"):
        found.append((f"compare {scenario} {best} --sweep KEY=A,B,C", "its settings, by validation data"))
    if best == "auto":
        found.append((f"compare {scenario} auto auto+fedavgm auto+ditto --seeds {seeds}", "auto with more"))
    if best == BAR:
        found.append((f"compare {scenario} --methods all", "whether any other method helps"))
    return found
