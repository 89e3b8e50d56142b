"""What privacy costs: accuracy against epsilon, the tables of docs/privacy.md.

    python benchmarks/privacy.py --jobs 16                 # all runs that are not in results/ yet
    python benchmarks/privacy.py feddl-har --seeds 0       # one scenario, one seed
    python benchmarks/privacy.py --table                   # what is in results/, as tables
    python benchmarks/privacy.py --account                 # noise and epsilon, by the accountant, into results/

Each scenario writes results/privacy-NAME.jsonl, one row a seed, method and promise, of the last round. A run that is
there already is not repeated. The data come from FEDQUILT_DATA. What the accountant says of these runs is kept in
results/privacy-accounted.json, so that they can be run where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from small import federation, keep, kept, side_by_side

import fedquilt as fq
from fedquilt.privacy import accountant

RESULTS = Path(__file__).parent.parent / "results"
ACCOUNTED = RESULTS / "privacy-accounted.json"
PROMISES: dict[str, dict[str, Any] | None] = {
    "none": None,  # no privacy at all
    "inf": {"noise": 0.0},  # clipped, without noise
    "8": {"epsilon": 8.0},
    "32": {"epsilon": 32.0},
    "2": {"epsilon": 2.0},
}
LONG = "alone, long"  # clients that train alone, ten times as long: how far the others are from trained
SCENARIOS: dict[str, dict[str, Any]] = {
    "feddl-har": {
        "settings": {"clients": 30, "donors": 0, "windows": 60},
        "training": {"rounds": 8, "epochs": 4, "batch": 16, "optimiser": "sgd", "lr": 0.1, "decay": 1.0},
        "dp": {"clip": 1.0},
        "methods": {"alone": "local", LONG: "local", "fedavg": "fedavg", "fedper": "fedper"},
    },
    "modfl-cameras": {
        "settings": {"clients": 180, "labels": 6, "cohorts": 2, "fraction": 1.0},
        "training": {"rounds": 15, "epochs": 2, "batch": 27, "optimiser": "adam", "lr": 0.01, "decay": 1.0},
        "dp": {"clip": 2.0},
        "methods": {"alone": "local", LONG: "local", "fedavg": "fedavg", "modfl": "modfl"},
    },
}


class Cell(NamedTuple):
    """One run."""

    scenario: str
    seed: int
    method: str
    promise: str


def grid(scenarios: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All runs, seed by seed; who shares nothing needs no noise."""
    return [
        Cell(name, seed, method, promise)
        for seed in seeds
        for promise in PROMISES
        for name in scenarios
        for method, kind in SCENARIOS[name]["methods"].items()
        if kind != "local" or promise == "none"
    ]


@lru_cache(maxsize=2)
def built(name: str, seed: int) -> fq.Scenario:
    """A federation, once a process."""
    return federation(name, seed, SCENARIOS[name]["settings"], SCENARIOS[name]["training"])


def run(cell: Cell, device: str = "cpu") -> dict[str, Any]:
    """One run as a row."""
    if importlib.util.find_spec("dp_accounting") is None:
        remember()
    what, scenario, asked = SCENARIOS[cell.scenario], built(cell.scenario, cell.seed), PROMISES[cell.promise]
    rounds = scenario.training.rounds * (10 if cell.method == LONG else 1)
    done = fq.run(
        scenario, what["methods"][cell.method], seed=cell.seed, rounds=rounds, alone=False, evaluate_every=rounds,
        privacy=None if asked is None else fq.Privacy(**what["dp"], **asked), device=device, engine="vectorised",
    )  # fmt: skip
    keys = ("accuracy_mean", "accuracy_worst_decile", "clients", "rounds", "epsilon", "noise_multiplier")
    found = {key: done.summary.get(key) for key in (*keys, "signal_to_noise", "seconds")}
    return {**cell._asdict(), **found, "settings": {key: what[key] for key in ("settings", "training", "dp")}}


def account() -> None:
    """Ask the accountant all that these runs will, and keep its answers."""
    noises, epsilons = {}, {}
    for what in SCENARIOS.values():
        rounds, use = what["training"]["rounds"], accountant.Use()
        for asked in PROMISES.values():
            if asked is None or "epsilon" not in asked:
                continue
            privacy = accountant.found(fq.Privacy(**what["dp"], **asked), use, rounds)
            noises[_question(asked["epsilon"], privacy.delta, use, rounds, False)] = privacy.found
            for after in range(1, rounds + 1):
                for fine in (False, True):
                    put = (privacy.found, use.rate, after, privacy.delta, fine, False)
                    epsilons[_question(*put)] = accountant.epsilon_of(*put)
    ACCOUNTED.write_text(json.dumps({"noise": noises, "epsilon": epsilons}, indent=1) + "\n", encoding="utf-8")


def remember() -> None:
    """Answer what the accountant would, from what it said."""
    said = json.loads(ACCOUNTED.read_text(encoding="utf-8"))

    def noise_for(*question: Any) -> float:
        return float(said["noise"][_question(*question)])

    def epsilon_of(*question: Any) -> float:
        return float("inf") if question[0] == 0 else float(said["epsilon"][_question(*question)])

    vars(accountant).update(noise_for=noise_for, epsilon_of=epsilon_of)


def _question(*parts: Any) -> str:
    return " ".join(str(part) for part in parts)


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a scenario that are there."""
    return kept(RESULTS / f"privacy-{name}.jsonl")


def table(name: str) -> str:
    """Mean accuracy over clients and seeds, in per cent, with the spread over seeds; a row a promise."""
    found = rows(name)
    methods = list(SCENARIOS[name]["methods"])
    lines = [f"| epsilon on {name} | noise | {' | '.join(methods)} |", f"|{'---|' * (len(methods) + 2)}"]
    for promise in ("none", "inf", "32", "8", "2"):
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


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=[], metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, in a process of one thread each")
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true", help="print what is kept, and run nothing")
    parser.add_argument("--account", action="store_true", help="ask the accountant, keep what it says, run nothing")
    told = parser.parse_args()
    names = told.scenarios or list(SCENARIOS)
    if told.account:
        account()
        return
    if not told.table:
        done = {Cell(*(row[key] for key in Cell._fields)) for name in names for row in rows(name)}
        due = [cell for cell in grid(names, told.seeds) if cell not in done]
        work = partial(run, device=told.device)
        for number, (cell, row) in enumerate(side_by_side(work, due, told.jobs, told.minutes), 1):
            keep(RESULTS / f"privacy-{cell.scenario}.jsonl", row)
            told_now = f"{row['accuracy_mean']:.3f} in {row['seconds']:.1f} s"
            print(f"{number}/{len(due)} {' '.join(map(str, cell))}: {told_now}", file=sys.stderr, flush=True)
    for name in names:
        print(table(name))


if __name__ == "__main__":
    main()
