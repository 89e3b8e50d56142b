"""Auto against fixed methods on a grid of federations: the rows behind its section in docs/results.md.

    python benchmarks/auto.py                                   # all cells, methods and three seeds not in results/ yet
    python benchmarks/auto.py --cells digits mnist-names --seeds 0 1 --methods auto fedavg --device cuda
    python benchmarks/auto.py --table                           # what is kept, as a table

Rows are appended to results/auto.jsonl, a line for each run (cell, method, seed: scores of every read-out, bytes,
seconds, the plan, adjusted Rand indices with the planted cohorts, how many clients are worse than alone). A run that is
there already is not repeated. The data come from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import splits
import torch

import fedquilt as fq
from fedquilt.readouts import READOUTS
from fedquilt.sharing import adjusted_rand, circles_by_trait

RESULTS = Path(__file__).parent.parent / "results" / "auto.jsonl"
Builder = Callable[[int], fq.Scenario]


def _cell(name: str, training: Mapping[str, Any] | None = None, **settings: Any) -> Builder:
    def build(seed: int) -> fq.Scenario:
        made = fq.scenarios.build(name, seed=seed, **settings)
        return fq.Scenario(
            made.name, made.clients, made.training.but(training or {}), common=made.common,
            label_names=made.label_names,
        )  # fmt: skip

    return build


CELLS: dict[str, Builder] = {
    "digits": _cell("digits"),
    "digits-renamed": _cell("digits", renamed=3),
    **{f"modfl-cameras-{p}": _cell("modfl-cameras", {"rounds": 100}, labels=p, clients=36) for p in (3, 6, 9)},
    **{f"modfl-wearables-{p}": _cell("modfl-wearables", {"rounds": 100, "lr": 0.01}, labels=p) for p in (2, 4, 5)},
    "feddl-har": _cell("feddl-har", {"epochs": 10}),
    "fedem-cifar10": _cell(
        "fedem-cifar10", {"rounds": 100, "batch": 32}, fraction=0.05, clients=20, model="small-cnn"
    ),
    "thesis-mnist": _cell("thesis-mnist"),
    "thesis-cifar10": _cell("thesis-cifar10", {"rounds": 50}, fraction=0.1),
    **{f"mnist-{kind}": partial(splits.mnist, kind) for kind in splits.KINDS},
    **{f"cifar10-{kind}": partial(splits.cifar, kind) for kind in splits.KINDS},
}  # fmt: skip
UNPLANTED = ("iid", "dirichlet-0.5", "dirichlet-0.1", "labels-2")
TRUE_CLUSTERS = {"turned": 4, "names": 3, "pixels": 3}


def _has_modules(scenario: fq.Scenario) -> bool:
    """Whether the models declare ModFL's two modules."""
    units = getattr(scenario.clients[0].model(), "units", None)
    return isinstance(units, Mapping) and set(units) == {"configuration", "operation"}


def settings_of(method: str, cell: str, scenario: fq.Scenario) -> tuple[str, dict[str, Any]] | None:
    """A method's name and its settings in a cell; None where it does not apply."""
    cohorts = {client.traits.get("cohort") for client in scenario.clients}
    if method in ("modfl", "modfl-found"):
        how = "found" if method == "modfl-found" else "cohort"
        if method == "modfl" and (None in cohorts or len(cohorts) < 2):
            return None
        below = {"configuration": "device"} if _has_modules(scenario) else {"configuration": "everyone"}
        cut = {} if _has_modules(scenario) else {"split": -1}
        return "modfl", {"by": {**below, "operation": how}, **cut}
    if method == "ifca":
        clusters = TRUE_CLUSTERS.get(cell.partition("-")[2], len(cohorts - {None}))
        return ("ifca", {"clusters": clusters}) if clusters > 1 else None
    if method == "feddl" and scenario.common is None:
        return None
    return method, {}


METHODS = (
    "auto", "local", "fedavg", "fedper", "fedrep", "ditto", "ifca", "clustered", "fedamp", "modfl", "modfl-found",
    "feddl", "fedmn",
)  # fmt: skip


def run_one(cell: str, method: str, seed: int, device: str, engine: str) -> dict[str, Any]:
    """One run as a row; a method that does not apply to a cell says so in its row."""
    scenario = CELLS[cell](seed)
    row: dict[str, Any] = {"cell": cell, "method": method, "seed": seed}
    found = settings_of(method, cell, scenario)
    if found is None:
        return row | {"skipped": "it does not apply here"}
    name, settings = found
    readouts = [r for r in ("received", "adapted", "fine-tuned", "vote") if r in READOUTS]
    start = time.perf_counter()
    try:
        result = fq.run(
            scenario, name, seed=seed, settings=settings, device=device, engine=engine, alone=False,
            readouts=["received"] if name == "local" else readouts, evaluate_every=scenario.training.rounds,
        )  # fmt: skip
    except ValueError as error:  # a method that refuses a federation says why
        return row | {"skipped": str(error)}
    row |= {"seconds": round(time.perf_counter() - start, 1), "commit": _commit(), "torch": torch.__version__}
    row |= {key: result.summary[key] for key in ("engine", "megabytes_up", "megabytes_down")}
    row["plan"] = str(result.plan).split("\n")
    row["decisions"] = result.summary.get("decisions", [])
    row["rand"] = _rand(result, scenario)
    for split in ("validation", "test"):
        row[split] = {}
        for line in result.rows:
            if line["split"] == split:
                row[split].setdefault(line["readout"], {})[line["client"]] = line["accuracy"]
    return row


def _rand(result: fq.Run, scenario: fq.Scenario) -> dict[str, float]:
    """By unit, how well its circles agree with the cohorts; each private client is a circle of its own."""
    cohorts = circles_by_trait([client.traits.get("cohort") for client in scenario.clients])
    if bool((cohorts < 0).any()):
        return {}
    circles = {u: plan.circle for u, plan in result.plan.units.items() if isinstance(plan, fq.UnitPlan)}
    own = -1 - torch.arange(len(cohorts))
    return {unit: adjusted_rand(torch.where(circle < 0, own, circle), cohorts) for unit, circle in circles.items()}


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def kept(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Mean test accuracy in percent by cell (mean over seeds), of every method with its best read-out in hindsight."""
    scores: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        for readout, clients in row.get("test", {}).items():
            mine = scores.setdefault((row["cell"], row["method"]), {}).setdefault(readout, [])
            mine.append(100 * statistics.fmean(clients.values()))
    methods = [m for m in METHODS if any(method == m for _, method in scores)]
    text = [f"| cell | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for cell in dict.fromkeys(cell for cell, _ in scores):
        cells = []
        for method in methods:
            by = {readout: statistics.fmean(v) for readout, v in scores.get((cell, method), {}).items()}
            best = max(by, key=by.__getitem__, default="")
            cells.append(f"{by[best]:.1f} {best}" if best else "-")
        text.append(f"| {cell} | {' | '.join(cells)} |")
    return "\n".join(text)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Auto with the vote against the best fixed method and read-out in hindsight, cell by cell, and against FedAvg+.

    Differences are paired by seed, with their standard error; a method counts in a cell where it ran all of auto's
    seeds. FedAvg+ is FedAvg fine-tuned for a round or for ten epochs, whichever is better in hindsight.
    """
    scores: dict[tuple[str, str, str], dict[int, dict[str, float]]] = {}
    for row in rows:
        for readout, clients in row.get("test", {}).items():
            scores.setdefault((row["cell"], row["method"], readout), {})[row["seed"]] = clients
    text = [
        "| cell | auto, vote | best fixed in hindsight | difference | FedAvg+ | worse than alone | Rand |",
        "|---" * 7 + "|",
    ]
    for cell in dict.fromkeys(cell for cell, method, _ in scores if method == "auto"):
        mine = scores[cell, "auto", "vote"]
        means = {
            key: _mean(each, mine) for key, each in scores.items() if key[0] == cell and mine.keys() <= each.keys()
        }
        best = max((key for key in means if key[1] != "auto"), key=means.__getitem__)
        gaps = [_mean(mine, [seed]) - _mean(scores[best], [seed]) for seed in mine]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        plus = max(means.get((cell, "fedavg", readout), 0.0) for readout in ("adapted", "fine-tuned"))
        alone = scores.get((cell, "local", "received"), {})
        worse = [sum(mine[s][c] < alone[s][c] for c in mine[s]) for s in mine if s in alone]
        planted = not cell.endswith(UNPLANTED)
        ours = [row["rand"].values() for row in rows if (row["cell"], row["method"]) == (cell, "auto")]
        found = [(max if planted else min)(each, default=1.0) for each in ours]
        text.append(
            f"| {cell} | {_mean(mine, mine):.1f} | {means[best]:.1f} {best[1]}, {best[2]} | "
            f"{statistics.fmean(gaps):+.1f} ± {error:.1f} | {plus:.1f} | {', '.join(map(str, worse))} of "
            f"{len(next(iter(mine.values())))} | {', '.join(f'{index:.2f}' for index in found)} |"
        )
    return "\n".join(text)


def _mean(by_seed: Mapping[int, Mapping[str, float]], seeds: Iterable[int]) -> float:
    """Per cent, over clients and some seeds."""
    return 100 * statistics.fmean(statistics.fmean(by_seed[seed].values()) for seed in seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS), metavar="CELL")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where rows are kept")
    parser.add_argument("--table", action="store_true", help="only show what is kept")
    arguments = parser.parse_args()
    if arguments.table:
        print(f"{table(kept(arguments.out))}\n\n{verdict(kept(arguments.out))}")
        return
    arguments.out.parent.mkdir(exist_ok=True)
    done = {(row["cell"], row["method"], row["seed"]) for row in kept(arguments.out)}
    for seed in arguments.seeds:
        for cell in arguments.cells:
            for method in arguments.methods:
                if (cell, method, seed) in done or method not in {*fq.methods.METHODS, "modfl-found"}:
                    continue
                row = run_one(cell, method, seed, arguments.device, arguments.engine)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                means = {r: f"{100 * statistics.fmean(v.values()):.1f}" for r, v in row.get("test", {}).items()}
                print(cell, method, seed, means or row.get("skipped"), f"({row.get('seconds', 0)} s)", file=sys.stderr)


if __name__ == "__main__":
    main()
