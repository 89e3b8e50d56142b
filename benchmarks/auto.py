"""Auto against fixed methods on a grid of federations: the rows behind its section in docs/results.md.

    python benchmarks/auto.py                                   # all cells, methods and three seeds not in results/ yet
    python benchmarks/auto.py --cells digits mnist-names --seeds 0 1 --methods auto fedavg --device cuda
    python benchmarks/auto.py --jobs 8 --minutes 10             # eight processes; nothing is begun after ten minutes
    python benchmarks/auto.py --table                           # what is kept, as a table

Rows are appended to results/auto.jsonl, a line for each run (cell, method, seed: scores of every read-out, bytes,
seconds, what was changed, adjusted Rand indices with the planted cohorts). A run that is there already is not repeated.
The clients of a cell are trained alone first, as those models vote too. What says most is run first: `auto` and FedAvg,
then methods that personalise, two ways to keep a copy of one's own near (`near-0.5`: half of the way to what all share,
and `auto` with Ditto's twin), and the others, each for all cells and seeds. The data come from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import splits
import torch
from auto_tables import RULE, Row, kept, safety, table, verdict

import fedquilt as fq
from fedquilt.authoring import Plan, Roster, State
from fedquilt.methods import FedAvg
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
TRUE_CLUSTERS = {"turned": 4, "names": 3, "pixels": 3}


def _has_modules(scenario: fq.Scenario) -> bool:
    """Whether the models declare ModFL's two modules."""
    units = getattr(scenario.clients[0].model(), "units", None)
    return isinstance(units, Mapping) and set(units) == {"configuration", "operation"}


@dataclass(frozen=True)
class Near(FedAvg):
    """FedAvg whose clients go only a part of the way from their own copies to what all share."""

    name: ClassVar[str] = "near"
    pull: float = 0.5

    def plan(self, state: State, roster: Roster) -> Plan:
        units = super().plan(state, roster).units
        return Plan(
            {u: fq.UnitPlan(p.circle, p.weight, self.pull) for u, p in units.items() if isinstance(p, fq.UnitPlan)}
        )


def settings_of(method: str, cell: str, scenario: fq.Scenario) -> tuple[str | fq.Method, dict[str, Any]] | None:
    """A method, or its name, and its settings in a cell; None where it does not apply."""
    if method.startswith("near-"):
        return Near(float(method.removeprefix("near-"))), {}
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


TIERS = (
    ("auto", "fedavg"),
    ("ditto", "fedamp", "clustered", "ifca", "modfl"),
    ("near-0.5", "near-0.2", "auto+ditto"),
    ("fedper", "fedrep", "modfl-found", "feddl", "fedmn"),
)
METHODS = ("auto", "local", *(method for tier in TIERS for method in tier if method != "auto"))


def run_cell(
    cell: str, seed: int, methods: Sequence[str], device: str = "auto", engine: str = "auto", threads: int | None = None
) -> Iterator[Row]:
    """The row of the clients alone, then one for each method; one that does not apply says so in its row."""
    scenario = CELLS[cell](seed)
    samples = [len(client.validation) for client in scenario.clients]
    row: Row = {
        "samples": samples,
        "cell": cell,
        "seed": seed,
        "rule": RULE,
        "commit": _commit(),
        "torch": torch.__version__,
    }
    how: dict[str, Any] = {"seed": seed, "device": device, "engine": engine, "threads": threads}
    how["evaluate_every"] = scenario.training.rounds
    alone = fq.run(scenario, "local", alone=False, readouts=["received"], **how)
    yield row | {"method": "local"} | _scores(alone)
    for method in methods:
        found = settings_of(method, cell, scenario)
        if found is None:
            yield row | {"method": method, "skipped": "it does not apply here"}
            continue
        name, settings = found
        try:
            readouts = ["received", "adapted", "fine-tuned", "vote"]
            result = fq.run(scenario, name, settings=settings or None, alone=alone, readouts=readouts, **how)
        except ValueError as error:  # a method that refuses a federation says why
            yield row | {"method": method, "skipped": str(error)}
            continue
        changes = {"changes": result.summary["changes"]} if "changes" in result.summary else {}
        yield row | {"method": method} | _scores(result) | changes | {"rand": _rand(result, scenario)}


def _scores(result: fq.Run) -> Row:
    """What a run took and what each client scored, in the order of clients; validation only of what is safe by it."""
    scores: dict[str, dict[str, list[float]]] = {"validation": {}, "test": {}}
    for line in result.rows:
        if line["split"] == "test" or line["readout"] in ("vote", "received"):
            scores[line["split"]].setdefault(line["readout"], []).append(round(line["accuracy"], 6))
    keys = ("engine", "megabytes_up", "megabytes_down")
    return {"seconds": round(result.seconds, 1)} | {key: result.summary[key] for key in keys} | scores


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


def append(path: Path, row: Row) -> None:
    """Write a row at the end of a file, one process at a time."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


Job = tuple[str, int, list[str]]  # a cell, a seed, and methods


def jobs_of(
    cells: Sequence[str], seeds: Sequence[int], methods: Sequence[str], done: set[tuple[str, str, int]]
) -> list[Job]:
    """What is left to do, what says most first."""
    found = []
    for tier in TIERS:
        for seed in seeds:
            for cell in cells:
                left = [m for m in tier if m in methods and (cell, m, seed) not in done]
                found += [(cell, seed, left)] if left else []
    return found


def work(job: Job, path: Path, until: float, device: str, engine: str, threads: int | None) -> None:
    """Run a job and keep its rows, each when it is there; nothing is begun after `until`."""
    cell, seed, methods = job
    if time.time() > until:
        return
    for row in run_cell(cell, seed, methods, device, engine, threads):
        append(path, row)
        means = {r: f"{100 * statistics.fmean(v):.1f}" for r, v in row.get("test", {}).items()}
        said = (means or row.get("skipped"), f"({row.get('seconds', 0)} s)")
        print(cell, row["method"], seed, *said, file=sys.stderr, flush=True)
        if time.time() > until:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS), metavar="CELL")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where rows are kept")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, on one GPU or on cores")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so long nothing more is begun")
    parser.add_argument("--table", action="store_true", help="only show what is kept")
    arguments = parser.parse_args()
    if arguments.table:
        rows = kept(arguments.out)
        print(f"{table(rows)}\n\n{verdict(rows)}\n\n{safety(rows)}")
        return
    arguments.out.parent.mkdir(exist_ok=True)
    done = {(row["cell"], row["method"], row["seed"]) for row in kept(arguments.out) if row.get("rule", 1) == RULE}
    jobs = jobs_of(arguments.cells, arguments.seeds, arguments.methods, done)
    until = time.time() + 60 * arguments.minutes
    threads = 1 if arguments.jobs > 1 else None
    go = partial(
        work, path=arguments.out, until=until, device=arguments.device, engine=arguments.engine, threads=threads
    )
    if arguments.jobs == 1:
        for job in jobs:
            go(job)
        return
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for _ in pool.imap_unordered(go, jobs):
            pass


if __name__ == "__main__":
    main()
