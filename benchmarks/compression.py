"""What fewer bytes cost: accuracy beside megabytes, the tables of docs/compression.md.

    python benchmarks/compression.py                     # all runs that are not in results/ yet
    python benchmarks/compression.py digits --seeds 0    # one scenario, one seed
    python benchmarks/compression.py --table             # what is in results/, as tables

Each scenario writes results/compression-NAME.jsonl, one row a seed, method and compression, of the last round. A run
that is there already is not repeated. The data of feddl-har come from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from small import federation, keep, kept, side_by_side

import fedquilt as fq

RESULTS = Path(__file__).parent.parent / "results"
KINDS = {
    "float32": fq.Compression(),
    "float16 up and down": fq.Compression("float16", "float16"),
    "int8": fq.Compression("int8"),
    "int8 up, float16 down": fq.Compression("int8", "float16"),
    "topk, 10 %": fq.Compression("topk", kept=0.1),
    "topk, 1 %": fq.Compression("topk", kept=0.01),
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "digits": {"settings": {"clients": 12}, "training": {"rounds": 15}, "methods": ("fedavg", "fedper")},
    "feddl-har": {
        "settings": {"clients": 30, "donors": 0, "windows": 60},
        "training": {"rounds": 12, "epochs": 4, "batch": 16, "optimiser": "sgd", "lr": 0.1, "decay": 1.0},
        "methods": ("fedavg", "fedper"),
    },
}


class Cell(NamedTuple):
    """One run."""

    scenario: str
    seed: int
    method: str
    kind: str


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=[], metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seeds", default="0,1,2", metavar="N,...")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, in processes of one thread")
    parser.add_argument("--minutes", type=float, help="after so many no more runs are begun")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true")
    told = parser.parse_args()
    names = told.scenarios or list(SCENARIOS)
    if not told.table:
        done = {(name, row["seed"], row["method"], row["kind"]) for name in names for row in kept(path_of(name))}
        cells = [cell for cell in grid(names, [int(seed) for seed in told.seeds.split(",")]) if cell not in done]
        for cell, row in side_by_side(partial(measure, told.device), cells, told.jobs, told.minutes):
            keep(path_of(cell.scenario), row)
            print(f"{cell}: {row['accuracy_mean']:.3f}, {row['megabytes_up']:.3f} MB up", flush=True)
    for name in names:
        print(f"\n{table(name)}")


def grid(names: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All runs, seed by seed."""
    return [
        Cell(name, seed, method, kind)
        for seed in seeds
        for name in names
        for kind in KINDS
        for method in SCENARIOS[name]["methods"]
    ]


def measure(device: str, cell: Cell) -> dict[str, Any]:
    """A run's row."""
    what = SCENARIOS[cell.scenario]
    if cell.scenario == "digits":
        made = fq.scenarios.build("digits", seed=cell.seed, **what["settings"])
    else:
        made = federation(cell.scenario, cell.seed, what["settings"], what["training"])
    run = fq.run(
        made, cell.method, seed=cell.seed, training=what["training"], compress=KINDS[cell.kind], alone=False,
        device=device, threads=1, evaluate_every=what["training"]["rounds"],
    )  # fmt: skip
    keys = ("accuracy_mean", "accuracy_worst_decile", "megabytes_up", "megabytes_down", "clients", "rounds", "seconds")
    decides = {"settings": what["settings"], "training": what["training"], "compress": KINDS[cell.kind].text}
    return {
        "seed": cell.seed,
        "method": cell.method,
        "kind": cell.kind,
        **{key: run.summary[key] for key in keys},
    } | decides


def path_of(name: str) -> Path:
    """Where the rows of a scenario are."""
    return RESULTS / f"compression-{name}.jsonl"


def table(name: str) -> str:
    """Mean accuracy over clients and seeds, in per cent, with the spread over seeds, beside megabytes of a run."""
    found, methods = kept(path_of(name)), SCENARIOS[name]["methods"]
    heads = [f"{method} | MB up | MB down" for method in methods]
    lines = [f"| {name} | {' | '.join(heads)} |", f"|{'---|' * (3 * len(methods) + 1)}"]
    for kind in KINDS:
        cells = []
        for method in methods:
            mine = [row for row in found if (row["kind"], row["method"]) == (kind, method)]
            scores = [100 * row["accuracy_mean"] for row in mine]
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            cells.append(f"{statistics.fmean(scores):.1f}{spread}" if scores else "")
            cells += [
                f"{statistics.fmean(row[f'megabytes_{way}'] for row in mine):.2f}" if mine else ""
                for way in ("up", "down")
            ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
