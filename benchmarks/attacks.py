"""What merges and methods bear: rule x attack x share of liars, the rows behind docs/robust.md.

    python benchmarks/attacks.py                                # what docs/robust.md shows and is not in results/ yet
    python benchmarks/attacks.py --grid whole                   # every rule x attack x share x method
    python benchmarks/attacks.py --rules mean median --cells feddl-har --attacks alie --liars 0.2 --seeds 0
    python benchmarks/attacks.py --table                        # what is kept, as tables

Rows are appended to results/attacks.jsonl, a line for each run: accuracy of the honest clients on test data after the
last round, mean and worst decile, with the read-out that the method is reported with. A run that is there already is
not repeated, so an interrupted grid goes on where it was. The data come from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedquilt as fq
from fedquilt import attacks
from fedquilt._util.wording import worst_decile
from fedquilt.sharing import pick

RESULTS = Path(__file__).parent.parent / "results" / "attacks.jsonl"
SHARES = (0.1, 0.2, 0.4)
LIES = tuple(attacks.ATTACKS)


def _har(seed: int) -> fq.Scenario:
    """20 people with about 40 windows each, 6 rounds of 3 epochs."""
    made = fq.scenarios.build("feddl-har", seed=seed, clients=20, windows=40)
    return _with(made, {"rounds": 6, "epochs": 3, "batch": 8, "optimiser": "adam", "lr": 0.001, "decay": 1.0})


def _cameras(seed: int) -> fq.Scenario:
    """10 clients on two cameras, two cohorts with 6 of 9 labels each, a twentieth of the pictures, 8 rounds."""
    made = fq.scenarios.build("modfl-cameras", seed=seed, clients=10, cohorts=2, fraction=0.05)
    return _with(made, {"rounds": 8})


def _with(made: fq.Scenario, training: Mapping[str, Any]) -> fq.Scenario:
    how = made.training.but(training)
    return fq.Scenario(made.name, made.clients, how, common=made.common, label_names=made.label_names)


CELLS: dict[str, Callable[[int], fq.Scenario]] = {"feddl-har": _har, "modfl-cameras": _cameras}
METHODS: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {  # name, settings by cell, read-out
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
    "mean", "median", "trimmed-mean", "geometric-median", "krum", "norm-bound", "centred-clipping", "fltrust",
    "nnm+krum", "nnm+trimmed-mean", "bucketing+median",
)  # fmt: skip


class Block(NamedTuple):
    """A part of the grid: all of its runs, seed by seed."""

    cells: Sequence[str]
    methods: Sequence[str]
    rules: Sequence[str]
    lies: Sequence[str]  # "" for none
    liars: Sequence[float]


_HAR, _TWO = ("feddl-har",), ("mean", "nnm+trimmed-mean")
SHOWN = (  # what docs/robust.md shows
    Block(_HAR, tuple(METHODS), _TWO, ("", "label-flip", "alie", "ipm"), (0.2,)),
    Block(_HAR, ("fedavg",), RULES, ("ipm",), (0.2,)),
    Block(_HAR, ("fedavg", "ditto"), _TWO, ("ipm",), (0.1, 0.4)),
    Block(("modfl-cameras",), ("fedavg", "auto+vote"), _TWO, ("", "ipm"), (0.2,)),
    Block(_HAR, ("modfl-found", "auto+vote"), _TWO, ("impostor",), (0.2,)),
)


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


def run(cell: Cell, scenario: fq.Scenario) -> dict[str, Any]:
    """One run as a row."""
    name, by_cell, readout = METHODS[cell.method]
    start = time.perf_counter()
    lie = attacks.pick(cell.attack, liars=cell.liars) if cell.attack else None
    result = fq.run(
        scenario, name, seed=cell.seed, settings=by_cell.get(cell.scenario), readouts=(readout,), alone=False,
        merge=rule_of(cell.rule, cell.liars), attack=lie,
        evaluate_every=scenario.training.rounds, device="cpu", engine="sequential",
    )  # fmt: skip
    rows = [row for row in result.last_rows(readout) if "liar" not in row]
    scores = sorted(row["accuracy"] for row in rows)
    return {
        **cell._asdict(),
        "readout": readout,
        "honest": len(scores),
        "liars_drawn": len(result.federation.liars),
        "accuracy_mean": sum(scores) / len(scores),
        "accuracy_worst_decile": worst_decile(scores),
        "clients": {row["client"]: row["accuracy"] for row in rows},
        "rounds": scenario.training.rounds,
        "seconds": round(time.perf_counter() - start, 2),
        "version": fq.__version__,
    }


def applies(cell: Cell) -> bool:
    """Whether there is anything to run: fltrust wants samples on the server, an impostor a method with reports."""
    if cell.rule == "fltrust" and cell.scenario != "feddl-har":
        return False
    return cell.attack != "impostor" or cell.method in ("modfl-found", "auto+vote")


def grid(args: argparse.Namespace) -> Iterator[Cell]:
    """The runs of a grid, seed by seed."""
    asked = Block(args.cells, args.methods, args.rules or RULES, ("", *args.attacks), args.liars)
    blocks = SHOWN if args.rules is None and args.grid == "shown" else (asked,)
    for seed, block in itertools.product(args.seeds, blocks):
        for which in itertools.product(block.cells, block.methods, block.rules, block.lies):
            scenario, method, rule, lie = which
            for share in block.liars if lie else (0.0,):
                yield Cell(scenario, method, rule, lie, share, seed)


def kept() -> dict[Cell, dict[str, Any]]:
    """The rows of earlier runs; a line cut short is left out."""
    found = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[Cell(*(row[key] for key in Cell._fields))] = row
    return found


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
    parser.add_argument("--grid", choices=("shown", "whole"), default="shown")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rules", nargs="+", choices=RULES)
    parser.add_argument("--attacks", nargs="+", choices=LIES, default=list(LIES))
    parser.add_argument("--liars", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what is kept, and run nothing")
    args = parser.parse_args(words)
    rows = kept()
    if args.table:
        print(table(rows))
        return
    torch.set_num_threads(args.threads)
    due = [cell for cell in dict.fromkeys(grid(args)) if applies(cell) and cell not in rows]
    built: tuple[tuple[str, int], fq.Scenario] | None = None
    for number, cell in enumerate(due, 1):
        if built is None or built[0] != (cell.scenario, cell.seed):
            built = (cell.scenario, cell.seed), CELLS[cell.scenario](cell.seed)
        row = run(cell, built[1])
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        told = f"{row['accuracy_mean']:.3f} / {row['accuracy_worst_decile']:.3f} in {row['seconds']:.1f} s"
        print(f"{number}/{len(due)} {' '.join(str(part) for part in cell)}: {told}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
