"""What benchmarks/attacks.py prints of its rows: all of them, and the tables of docs/robust.md."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedquilt._util.wording import worst_decile


class Cell(NamedTuple):
    """One run."""

    scenario: str
    method: str
    rule: str
    attack: str  # "" for none
    liars: float
    seed: int


Rows = Mapping[Cell, Mapping[str, Any]]
Names = Sequence[str]


def table(rows: Rows, methods: Names, rules: Names, all_lies: Names) -> str:
    """Mean and worst decile, in per cent, over as many seeds as are told: a table a scenario and share of liars."""
    lines = []
    for scenario, share in _cells(rows):
        lies = [lie for lie in all_lies if any(c[0] == scenario and c[3:5] == (lie, share) for c in rows)]
        lines += [f"\n{scenario}, {share:.0%} of the clients lie (accuracy of the honest / of their worst decile, %)\n"]
        lines += _head("method | merge | nobody lies", lies)
        for method, rule in itertools.product(methods, rules):
            cell = Cell(scenario, method, rule, "", share, 0)
            lied = [_found(rows, cell._replace(attack=lie)) for lie in lies]
            honest = {row["seed"]: set(row["clients"]) for found in lied for row in found}
            clean = [row for row in _found(rows, cell._replace(liars=0.0)) if row["seed"] in honest]
            if honest:
                shown = [_told(clean, honest), *(_told(found, honest) for found in lied)]
                lines.append(_line(f"{method} | {rule}", shown))
    return "\n".join(lines)


def digest(rows: Rows, methods: Names, rules: Names, all_lies: Names) -> str:
    """Of each method and rule, over seeds: where nobody lies, on average over attacks, and under the worst of them.

    Then what attacks cost on average, which is paired: the same clients, seed by seed; FedAvg attack by attack; and,
    where clients are of two kinds, what each kind has. A seed counts where it has all of the attacks; how many do is
    told where it is not all. Impostors are left out, since most methods have none.
    """
    lines = []
    for scenario, share in _cells(rows):
        runs = {
            lie: sum(c[0] == scenario and c[3:5] == (lie, share) for c in rows) for lie in all_lies if lie != "impostor"
        }
        lies = [lie for lie in runs if 2 * runs[lie] >= max(runs.values())]
        seeds = sorted({c.seed for c in rows if c.scenario == scenario and c.liars == share})
        which = f"{scenario}, {share:.0%} of the clients lie by {', '.join(lies)}; seeds {', '.join(map(str, seeds))}"
        told, cost, fedavg = [], [], []
        for rule in rules:
            cell = Cell(scenario, "", rule, "", share, 0)
            found = [_over_seeds(rows, cell._replace(method=method), lies, seeds) for method in methods]
            if any(found):
                told.append(_line(rule, [_digested(each, lies, len(seeds)) for each in found]))
                cost.append(_line(rule, [_costs(each, len(seeds)) for each in found[1:]]))
                one_by_one = found[methods.index("fedavg")]
                columns = [[each.clean, *each.lied] for each in one_by_one]
                shown = [_spread(column) for column in zip(*columns, strict=True)]
                fedavg += [_line(rule + _of_seeds(len(columns), len(seeds)), shown)] if shown else []
        lines += [f"\n{which}: nobody lies; average and spread over seeds; worst (accuracy, %)\n"]
        lines += [*_head("merge", methods), *told]
        lines += ["\nWhat lies cost on average, in points of the same clients, and the spread over seeds\n"]
        lines += [*_head("merge", methods[1:]), *cost]
        lines += ["\nFedAvg attack by attack\n", *_head("merge | nobody lies", lies), *fedavg]
        lines += _by_kind(rows, scenario, share, (methods, rules, lies), seeds)
    return "\n".join(lines)


def _by_kind(
    rows: Rows, scenario: str, share: float, names: tuple[Names, Names, Names], seeds: Sequence[int]
) -> list[str]:  # fmt: skip
    """What each kind of client, by the first word of its name, has where nobody lies and on average over attacks."""
    methods, rules, lies = names
    everyone = {name for cell, row in rows.items() if cell.scenario == scenario for name in row["clients"]}
    kinds = sorted({name.partition("-")[0] for name in everyone})
    lines: list[str] = []
    for seed, kind in itertools.product(seeds, kinds if len(kinds) == 2 else ()):
        of_kind = {name for name in everyone if name.startswith(f"{kind}-")}
        shown = []
        for rule, method in itertools.product(rules, methods[1:]):
            found = _over_seeds(rows, Cell(scenario, method, rule, "", share, 0), lies, [seed], of_kind)
            if found:
                shown.append((rule, method, f"{found[0].clean:.1f}, {statistics.fmean(found[0].lied):.1f}"))
        if shown:
            liars = len(of_kind) - len(of_kind & _honest(rows, scenario, share, seed))
            lines += [f"\nseed {seed}, of {len(of_kind)} {kind} {liars} lie: nobody lies, average over attacks\n"]
            lines += _head("merge", methods[1:])
            for rule in dict.fromkeys(rule for rule, _, _ in shown):
                mine = {method: text for of, method, text in shown if of == rule}
                lines.append(_line(rule, [mine.get(method, "") for method in methods[1:]]))
    return lines


class _Seed(NamedTuple):
    """Accuracy of the honest with one seed, in per cent."""

    clean: float
    lied: list[float]  # by attack


def _over_seeds(
    rows: Rows, cell: Cell, lies: Names, seeds: Sequence[int], among: set[str] | None = None
) -> list[_Seed]:  # fmt: skip
    """A method and rule with the seeds that have all of it; columns are of the same clients."""
    found = []
    for seed in seeds:
        lied = [rows.get(cell._replace(attack=lie, seed=seed)) for lie in lies]
        clean = rows.get(cell._replace(attack="", liars=0.0, seed=seed))
        there = [row for row in lied if row is not None]
        if clean is None or (len(there) < len(lies) and cell.method != "alone"):
            continue
        honest = _honest(rows, cell.scenario, cell.liars, seed)
        who = honest if among is None else honest & among
        found.append(_Seed(100 * _mean(clean, who), [100 * _mean(row, who) for row in there]))
    return found


def _cells(rows: Rows) -> list[tuple[str, float]]:
    return sorted({(cell.scenario, cell.liars) for cell in rows if cell.liars})


def _honest(rows: Rows, scenario: str, share: float, seed: int) -> set[str]:
    return next(set(row["clients"]) for c, row in rows.items() if c[0] == scenario and c[4:] == (share, seed))


def _digested(found: Sequence[_Seed], lies: Names, seeds: int) -> str:
    told = [f"{statistics.fmean(each.clean for each in found):.1f}"] if found else []
    if found and found[0].lied:
        by_lie = [statistics.fmean(each) for each in zip(*(each.lied for each in found), strict=True)]
        told += [_spread([statistics.fmean(each.lied) for each in found])]
        told += [f"{min(by_lie):.1f} {lies[by_lie.index(min(by_lie))]}"]
    return ", ".join(told) + _of_seeds(len(found), seeds)


def _costs(found: Sequence[_Seed], seeds: int) -> str:
    if not found or not found[0].lied:
        return ""
    return _spread([each.clean - statistics.fmean(each.lied) for each in found]) + _of_seeds(len(found), seeds)


def _of_seeds(count: int, seeds: int) -> str:
    """How many seeds a cell is of, where it is not all."""
    return f" ({count})" if 0 < count < seeds else ""


def _spread(values: Sequence[float]) -> str:
    """A mean, and the standard deviation where there is more than one."""
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def _head(first: str, columns: Iterable[str]) -> list[str]:
    line = _line(first, columns)
    return [line, "|" + "---|" * (line.count("|") - 1)]


def _line(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _mean(row: Mapping[str, Any], among: set[str]) -> float:
    return statistics.fmean(value for name, value in row["clients"].items() if name in among)


def _found(rows: Rows, which: Cell) -> list[Mapping[str, Any]]:
    """The rows of a cell, of all seeds."""
    return [row for cell, row in rows.items() if cell[:5] == which[:5]]


def _told(found: Sequence[Mapping[str, Any]], honest: Mapping[int, set[str]]) -> str:
    """Mean and worst decile of the clients that are honest under attack, so that columns are of the same clients."""
    scores = [[value for name, value in row["clients"].items() if name in honest[row["seed"]]] for row in found]
    if not scores:
        return ""
    mean = statistics.mean(sum(each) / len(each) for each in scores)
    worst = statistics.mean(worst_decile(each) for each in scores)
    seeds = f" ({len(scores)})" if len(scores) > 1 else ""
    return f"{100 * mean:.1f} / {100 * worst:.1f}{seeds}"
