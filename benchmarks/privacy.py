"""What privacy costs: accuracy against epsilon, the table of docs/privacy.md.

    python benchmarks/privacy.py                       # all runs that are not in results/ yet
    python benchmarks/privacy.py feddl-har --seeds 1   # one scenario
    python benchmarks/privacy.py --table               # what is in results/, as tables

Each scenario writes results/privacy-NAME.jsonl, one row a seed, method and promise, of the last round. A run that is
there already is not repeated. The data come from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedquilt as fq

RESULTS = Path(__file__).parent.parent / "results"
PROMISES: dict[str, dict[str, Any] | None] = {
    "none": None,  # no privacy at all
    "inf": {"noise": 0.0},  # clipped, without noise
    "32": {"epsilon": 32.0},
    "8": {"epsilon": 8.0},
    "2": {"epsilon": 2.0},
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "feddl-har": {
        "settings": {},
        "training": {"rounds": 5, "epochs": 2, "lr": 0.05},
        "dp": {"clip": 1.0},
        "methods": {"local": {}, "fedavg": {}},
    },
    "modfl-cameras": {
        "settings": {"labels": 6, "clients": 18, "fraction": 0.15, "cohorts": 3},
        "training": {"rounds": 10},
        "dp": {"clip": 1.0, "smallest": 2},
        "methods": {"local": {}, "fedavg": {}, "modfl": {}},
    },
}


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=[], metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    told = parser.parse_args()
    for name in told.scenarios or SCENARIOS:
        if not told.table:
            measure(name, told.seeds)
        print(table(name))


def measure(name: str, seeds: int) -> None:
    """The runs of a scenario that are not there yet."""
    what, path = SCENARIOS[name], RESULTS / f"privacy-{name}.jsonl"
    done = {(row["seed"], row["method"], row["promise"]) for row in rows(name)}
    for seed in range(seeds):
        scenario = None
        for promise, asked in PROMISES.items():
            for method, settings in what["methods"].items():
                if (seed, method, promise) in done or (method == "local" and asked is not None):
                    continue  # who shares nothing needs no noise
                scenario = scenario or fq.scenarios.build(name, seed=seed, **what["settings"])
                privacy = None if asked is None else fq.Privacy(**what["dp"], **asked)
                rounds = what["training"]["rounds"]
                run = fq.run(
                    scenario, method, seed=seed, settings=settings, training=what["training"], privacy=privacy,
                    alone=False, evaluate_every=rounds,
                )  # fmt: skip
                keys = ("accuracy_mean", "accuracy_worst_decile", "clients", "rounds", "epsilon", "noise_multiplier")
                found = {key: run.summary.get(key) for key in (*keys, "signal_to_noise", "seconds")}
                row = {"seed": seed, "method": method, "promise": promise, **found, "settings": plain(what)}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{name} seed {seed} {method} {promise}: {found['accuracy_mean']:.3f}", flush=True)


def plain(what: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a row, beside what it says itself."""
    return {key: value for key, value in what.items() if key != "methods"}


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a scenario that are there."""
    path = RESULTS / f"privacy-{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def table(name: str) -> str:
    """Mean accuracy over clients and seeds, in per cent, with the spread over seeds; a row a promise."""
    found = rows(name)
    methods = list(SCENARIOS[name]["methods"])
    lines = [f"| epsilon on {name} | noise | {' | '.join(methods)} |", f"|{'---|' * (len(methods) + 2)}"]
    for promise in PROMISES:
        of_all = [row for row in found if row["promise"] == promise]
        if not of_all:
            continue
        noise = next((row["noise_multiplier"] for row in of_all if row["noise_multiplier"] is not None), None)
        cells = []
        for method in methods:
            scores = [100 * row["accuracy_mean"] for row in of_all if row["method"] == method]
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            cells.append(f"{statistics.fmean(scores):.1f}{spread}" if scores else "")
        lines.append(f"| {promise} | {'' if noise is None else f'{noise:.2f}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
