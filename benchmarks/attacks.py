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
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from attack_tables import Cell, digest, table
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
        print((table if args.table else digest)(rows, tuple(METHODS), RULES, LIES))
        return
    due = [cell for cell in grid(args) if cell not in rows]
    work = partial(run, device=args.device)
    for number, (cell, row) in enumerate(side_by_side(work, due, args.jobs, args.minutes), 1):
        keep(RESULTS, row)
        told = f"{row['accuracy_mean']:.3f} / {row['accuracy_worst_decile']:.3f} in {row['seconds']:.1f} s"
        print(f"{number}/{len(due)} {' '.join(str(part) for part in cell)}: {told}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
