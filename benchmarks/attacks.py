"""What merges and methods bear: rule x attack x share of liars, the rows behind docs/robust.md.

    python benchmarks/attacks.py --jobs 16                      # every rule x attack x share x method, three seeds
    python benchmarks/attacks.py --jobs 16 --minutes 6          # as far as that goes
    python benchmarks/attacks.py --rules mean median --cells feddl-har --attacks alie --liars 0.2 --seeds 0
    python benchmarks/attacks.py --table                        # what is kept, as tables; --digest: in short

Rows are appended to results/attacks.jsonl, a line for each run: accuracy of the honest clients on test data after the
last round, mean and worst decile, with the read-out that the method is reported with. A run that is there already is
not repeated, so an interrupted grid goes on where it was. First comes seed 0 of everything, then the next; of a seed
first what is clean, then a fifth of liars, two fifths, a tenth. The data come from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from small import federation, keep, kept, side_by_side

import fedquilt as fq
from fedquilt import attacks
from fedquilt._util.wording import worst_decile
from fedquilt.sharing import pick

RESULTS = Path(__file__).parent.parent / "results" / "attacks.jsonl"
SHARES = (0.2, 0.4, 0.1)
LIES = tuple(attacks.ATTACKS)
# Settings and training of each federation, picked on clean runs of seed 0: short, and clients learn.
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "feddl-har": (  # 20 people with about 60 windows each
        {"clients": 20, "windows": 60},
        {"rounds": 10, "epochs": 2, "batch": 16, "optimiser": "adam", "lr": 0.005, "decay": 1.0},
    ),
    "modfl-cameras": (  # 20 clients on two cameras, two cohorts with 6 of 9 labels each, a quarter of the pictures
        {"clients": 20, "labels": 6, "cohorts": 2, "fraction": 0.25},
        {"rounds": 20, "epochs": 1, "batch": 42, "optimiser": "adam", "lr": 0.01, "decay": 1.0},
    ),
}
METHODS: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {  # name, settings by cell, read-out
    "alone": ("local", {}, "received"),
    "fedavg": ("fedavg", {}, "received"),
    "fedper": ("fedper", {}, "received"),
    "ditto": ("ditto", {}, "adapted"),
    "modfl-found": (
        "modfl",
        {
            "feddl-har": {"by": {"configuration": "everyone", "operation": "found"}, "split": -1},
            "modfl-cameras": {"by": {"configuration": "device", "operation": "found"}},
        },
        "received",
    ),
    "auto+vote": ("auto", {}, "vote"),
}
RULES = (
    "mean", "nnm+trimmed-mean", "nnm+krum", "median", "trimmed-mean", "geometric-median", "krum", "norm-bound",
    "centred-clipping", "fltrust", "bucketing+median",
)  # fmt: skip


class Cell(NamedTuple):
    """One run."""

    scenario: str
    method: str
    rule: str
    attack: str  # "" for none
    liars: float
    seed: int


def rule_of(name: str, liars: float) -> fq.sharing.Rule:
    """A rule that is told the share of liars, where it asks for it: a little more, so that none is cut by rounding."""
    expects = min(0.49, liars + 0.02) if liars else 0.1
    settings: dict[str, Any] = {}
    if "trimmed-mean" in name:
        settings["share"] = expects
    if "krum" in name or "nnm" in name:
        settings["byzantine"] = expects
    return pick(name, **settings)


@lru_cache(maxsize=2)
def built(name: str, seed: int) -> fq.Scenario:
    """A federation, once a process."""
    settings, training = CELLS[name]
    return federation(name, seed, settings, training)


def run(cell: Cell, device: str = "cpu") -> dict[str, Any]:
    """One run as a row."""
    name, by_cell, readout = METHODS[cell.method]
    scenario = built(cell.scenario, cell.seed)
    start = time.perf_counter()
    lie = attacks.pick(cell.attack, liars=cell.liars) if cell.attack else None
    result = fq.run(
        scenario, name, seed=cell.seed, settings=by_cell.get(cell.scenario), readouts=(readout,), alone=False,
        merge=rule_of(cell.rule, cell.liars), attack=lie,
        evaluate_every=scenario.training.rounds, device=device, engine="vectorised",
    )  # fmt: skip
    rows = [row for row in result.last_rows(readout) if "liar" not in row]
    scores = sorted(row["accuracy"] for row in rows)
    return {
        **cell._asdict(),
        "accuracy_mean": round(sum(scores) / len(scores), 5),
        "accuracy_worst_decile": round(worst_decile(scores), 5),
        "clients": {row["client"]: round(row["accuracy"], 4) for row in rows},  # the honest alone
        "rounds": scenario.training.rounds,
        "seconds": round(time.perf_counter() - start, 2),
        "torch": torch.__version__,
    }


def applies(cell: Cell) -> bool:
    """Whether there is anything to run.

    fltrust wants samples on the server, an impostor a method with reports, and clients alone hear no liar.
    """
    if cell.method == "alone" and (cell.rule != "mean" or cell.attack):
        return False
    if cell.rule == "fltrust" and cell.scenario != "feddl-har":
        return False
    return cell.attack != "impostor" or cell.method in ("modfl-found", "auto+vote")


def grid(args: argparse.Namespace) -> Iterator[Cell]:
    """The runs that are asked for, the most telling first."""
    lied = [(lie, share) for share in args.liars for lie in args.attacks]
    for seed, (lie, share), rule in itertools.product(args.seeds, [("", 0.0), *lied], args.rules):
        for scenario, method in itertools.product(args.cells, args.methods):
            cell = Cell(scenario, method, rule, lie, share, seed)
            if applies(cell):
                yield cell


def rows_kept() -> dict[Cell, dict[str, Any]]:
    """The rows of earlier runs."""
    return {Cell(*(row[key] for key in Cell._fields)): row for row in kept(RESULTS)}


def table(rows: Mapping[Cell, Mapping[str, Any]]) -> str:
    """Mean and worst decile, in per cent, over as many seeds as are told: a table a scenario and share of liars."""
    lines = []
    for scenario, share in sorted({(cell.scenario, cell.liars) for cell in rows if cell.liars}):
        lies = [lie for lie in LIES if any(c[0] == scenario and c[3:5] == (lie, share) for c in rows)]
        lines += [f"\n{scenario}, {share:.0%} of the clients lie (accuracy of the honest / of their worst decile, %)\n"]
        lines += ["| method | merge | nobody lies | " + " | ".join(lies) + " |", "|---|---|" + "---|" * (len(lies) + 1)]
        for method, rule in itertools.product(METHODS, RULES):
            lied = [_found(rows, Cell(scenario, method, rule, lie, share, 0)) for lie in lies]
            honest = {row["seed"]: set(row["clients"]) for found in lied for row in found}
            clean = [row for row in _found(rows, Cell(scenario, method, rule, "", 0.0, 0)) if row["seed"] in honest]
            if honest:
                cells = [_told(clean, honest), *(_told(found, honest) for found in lied)]
                lines.append(f"| {method} | {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def digest(rows: Mapping[Cell, Mapping[str, Any]]) -> str:
    """Of each method and rule, over seeds: where nobody lies, on average over attacks, and under the worst of them.

    Then what attacks cost on average, which is paired: the same clients, seed by seed. A seed counts where it has all
    of the attacks; how many do is told where it is not all. Impostors are left out, since most methods have none.
    """
    lines = []
    for scenario, share in sorted({(c.scenario, c.liars) for c in rows if c.liars}):
        runs = {
            lie: sum(c[0] == scenario and c[3:5] == (lie, share) for c in rows) for lie in LIES if lie != "impostor"
        }
        lies = [lie for lie in runs if 2 * runs[lie] >= max(runs.values())]
        seeds = sorted({c.seed for c in rows if c.scenario == scenario and c.liars == share})
        which = f"{scenario}, {share:.0%} of the clients lie by {', '.join(lies)}; seeds {', '.join(map(str, seeds))}"
        told, cost = [], []
        for rule in RULES:
            found = [_over_seeds(rows, Cell(scenario, method, rule, "", share, 0), lies, seeds) for method in METHODS]
            if any(found):
                told.append(f"| {rule} | " + " | ".join(_digested(each, lies, len(seeds)) for each in found) + " |")
                cost.append(f"| {rule} | " + " | ".join(_costs(each, len(seeds)) for each in found) + " |")
        head = [f"| merge | {' | '.join(METHODS)} |", "|---|" + "---|" * len(METHODS)]
        lines += [f"\n{which}: nobody lies; average and spread over seeds; worst (accuracy, %)\n", *head, *told]
        lines += [
            "\nWhat lies cost on average, in points of the same clients, and the spread over seeds\n",
            *head,
            *cost,
        ]
    return "\n".join(lines)


class _Seed(NamedTuple):
    """Accuracy of the honest with one seed, in per cent."""

    clean: float
    lied: list[float]  # by attack


def _over_seeds(
    rows: Mapping[Cell, Mapping[str, Any]], cell: Cell, lies: Sequence[str], seeds: Sequence[int]
) -> list[_Seed]:
    """A method and rule with the seeds that have all of it; columns are of the same clients."""
    found = []
    for seed in seeds:
        lied = [rows.get(cell._replace(attack=lie, seed=seed)) for lie in lies]
        clean = rows.get(cell._replace(attack="", liars=0.0, seed=seed))
        there = [row for row in lied if row is not None]
        if clean is None or (len(there) < len(lies) and cell.method != "alone"):
            continue
        honest = next(
            set(row["clients"]) for c, row in rows.items() if c[0] == cell.scenario and c[4:] == (cell.liars, seed)
        )
        found.append(_Seed(100 * _mean(clean, honest), [100 * _mean(row, honest) for row in there]))
    return found


def _digested(found: Sequence[_Seed], lies: Sequence[str], seeds: int) -> str:
    told = [f"{statistics.fmean(each.clean for each in found):.1f}"] if found else []
    if found and found[0].lied:
        by_lie = [statistics.fmean(each) for each in zip(*(each.lied for each in found), strict=True)]
        told += [_spread([statistics.fmean(each.lied) for each in found])]
        told += [f"{min(by_lie):.1f} {lies[by_lie.index(min(by_lie))]}"]
    return ", ".join(told) + (f" ({len(found)})" if 0 < len(found) < seeds else "")


def _costs(found: Sequence[_Seed], seeds: int) -> str:
    if not found or not found[0].lied:
        return ""
    told = _spread([each.clean - statistics.fmean(each.lied) for each in found])
    return told + (f" ({len(found)})" if len(found) < seeds else "")


def _spread(values: Sequence[float]) -> str:
    """A mean, and the standard deviation where there is more than one."""
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def _mean(row: Mapping[str, Any], among: set[str]) -> float:
    return statistics.fmean(value for name, value in row["clients"].items() if name in among)


def _found(rows: Mapping[Cell, Mapping[str, Any]], which: Cell) -> list[Mapping[str, Any]]:
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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=LIES, default=list(LIES))
    parser.add_argument("--liars", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, in a process of one thread each")
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true", help="print what is kept, and run nothing")
    parser.add_argument("--digest", action="store_true", help="print its digest, and run nothing")
    args = parser.parse_args(words)
    rows = rows_kept()
    if args.table or args.digest:
        print(table(rows) if args.table else digest(rows))
        return
    due = [cell for cell in grid(args) if cell not in rows]
    work = partial(run, device=args.device)
    for number, (cell, row) in enumerate(side_by_side(work, due, args.jobs, args.minutes), 1):
        keep(RESULTS, row)
        told = f"{row['accuracy_mean']:.3f} / {row['accuracy_worst_decile']:.3f} in {row['seconds']:.1f} s"
        print(f"{number}/{len(due)} {' '.join(str(part) for part in cell)}: {told}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
