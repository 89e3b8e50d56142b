"""The five systems and their baselines on their own scenarios, on real data: the rows behind docs/results.md.

    python benchmarks/papers.py                                    # everything that is not in results/ yet
    python benchmarks/papers.py feddl-har --seeds 3                # one experiment
    python benchmarks/papers.py --device cuda --jobs 8 --minutes 8 # runs side by side, for a while
    python benchmarks/papers.py --table                            # what is in results/, as tables

Each experiment of experiments.py writes results/NAME.jsonl: a first line with the command, the commit and the settings;
for each seed and method a line about the run, with its mean accuracy over the rounds; then a row for each client and
read-out, of the last round's test samples. The first seed of everything comes first. A run that is there already is not
repeated, so whoever stops it goes on later. The data come from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from experiments import EXPERIMENTS

import fedquilt as fq

RESULTS = Path(__file__).parent.parent / "results"
LOOKS = 10  # how often a run is measured


class Task(NamedTuple):
    """A run to be made."""

    title: str  # of the experiment
    method: str  # as its rows call it
    seed: int
    device: str
    engine: str
    at_once: int | None  # clients in a stack, where several runs share a GPU's memory


def run_one(task: Task) -> Iterator[dict[str, Any]]:
    """One method with one seed: the line about the run, then the rows of its last round."""
    experiment, name, seed = EXPERIMENTS[task.title], task.method, task.seed
    method, settings = experiment.methods[name]
    built = {**experiment.settings, **experiment.own_settings.get(name, {})}
    scenario = fq.scenarios.build(experiment.scenario, seed=seed, **built)
    training = scenario.training.but({**experiment.training, **experiment.own_training.get(name, {})})
    readouts = ("received",) if method == "local" else experiment.own_readouts.get(name, experiment.readouts)
    start = time.perf_counter()
    result = fq.run(
        scenario, method, seed=seed, settings=settings, training=training, readouts=readouts, device=task.device,
        engine=task.engine, clients_at_once=task.at_once, alone=False, evaluate_every=max(1, training.rounds // LOOKS),
    )  # fmt: skip
    scores: dict[str, dict[str, dict[int, list[float]]]] = {}  # split, read-out, round
    for row in result.rows:
        mine = scores.setdefault(row["split"], {}).setdefault(row["readout"], {})
        mine.setdefault(row["round"], []).append(row["accuracy"])
    means = {
        split: {r: {n: round(statistics.fmean(v), 5) for n, v in rounds.items()} for r, rounds in by_readout.items()}
        for split, by_readout in scores.items()
    }
    summary = result.summary
    yield {
        "run": name, "seed": seed, "seconds": round(time.perf_counter() - start, 1), "engine": summary["engine"],
        "device": task.device, "commit": commit(), "megabytes_up": summary["megabytes_up"],
        "megabytes_down": summary["megabytes_down"], "over_rounds": means, "plan": str(result.plan).split("\n"),
    }  # fmt: skip
    for row in result.rows:
        if row["round"] == training.rounds and row["split"] == "test":
            shown = {key: round(row[key], 5) for key in ("accuracy", "f1")}
            kept = {key: row[key] for key in ("round", "client", "readout", "split", "samples")}
            yield {"method": name, "seed": seed, **kept, **shown}


def attempt(task: Task) -> tuple[Task, list[dict[str, Any]], str]:
    """A run's lines, or why there are none: in a worker, where one that fails is not to end the others."""
    try:
        return task, list(run_one(task)), ""
    except Exception as error:
        return task, [], f"{type(error).__name__}: {error}"


def keep(path: Path, title: str, lines: list[dict[str, Any]], device: str) -> None:
    """Adds a run to its file in one piece, whoever else adds to it; not one that is there already."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.stat().st_size:
            file.write(json.dumps(_header(title, device)) + "\n")
            file.flush()
        if (lines[0]["run"], lines[0]["seed"]) not in done(path):
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def _header(title: str, device: str) -> dict[str, Any]:
    experiment = EXPERIMENTS[title]
    return {
        "experiment": title, "command": f"python benchmarks/papers.py {title}", "commit": commit(),
        "scenario": experiment.scenario, "settings": dict(experiment.settings), "training": dict(experiment.training),
        "scaled": experiment.why, "torch": torch.__version__, "python": platform.python_version(), "device": device,
    }  # fmt: skip


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def done(path: Path) -> set[tuple[str, int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {(line["run"], line["seed"]) for line in lines if "run" in line}


def table(path: Path) -> str:
    """Test accuracy of each method and read-out: mean and spread over seeds of the mean over clients, in percent.

    Where an experiment has groups of clients, each has a column besides.
    """
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    columns = {"": "accuracy %", **EXPERIMENTS[header["experiment"]].groups}
    scores: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    moved: dict[str, list[float]] = {}
    for line in lines:
        if "run" in line:
            moved.setdefault(line["run"], []).append(line["megabytes_up"] + line["megabytes_down"])
        elif line["split"] == "test":
            mine = scores.setdefault((line["method"], line["readout"]), {})
            mine.setdefault(line["seed"], {})[line["client"]] = 100 * line["accuracy"]
    titles = ["method", "read-out", *columns.values(), "worst client %", "MB moved", "seeds"]
    text = [
        f"### {header['experiment']}", "",
        f"{header['scaled']}; `{header['command']}`, commit {header['commit'][:9]}.", "",
        f"| {' | '.join(titles)} |", "|---" * len(titles) + "|",
    ]  # fmt: skip
    for (method, readout), seeds in scores.items():
        by_column = [[_mean(values, begins) for values in seeds.values()] for begins in columns]
        worst = statistics.fmean(min(values.values()) for values in seeds.values())
        cells = [method, readout, *map(_with_spread, by_column), f"{worst:.1f}"]
        text.append(f"| {' | '.join(cells)} | {statistics.fmean(moved[method]):.1f} | {len(seeds)} |")
    return "\n".join(text) + "\n"


def _mean(of_clients: Mapping[str, float], begins: str) -> float:
    """Over the clients whose names begin so."""
    return statistics.fmean(score for client, score in of_clients.items() if client.startswith(begins))


def _with_spread(means: list[float]) -> str:
    spread = f" ± {statistics.stdev(means):.2f}" if len(means) > 1 else ""
    return f"{statistics.fmean(means):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to this less 1; default: 3")
    parser.add_argument("--methods", nargs="*", help="only these; default: all of an experiment")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, in processes of one thread; default: 1")
    parser.add_argument("--at-once", type=int, help="clients in a stack, for runs that share a GPU's memory")
    parser.add_argument("--minutes", type=float, help="stop after so long; what is not finished by then is left out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where rows are kept")
    parser.add_argument("--table", action="store_true", help="only show what is kept")
    arguments = parser.parse_args()
    kept: Path = arguments.out
    titles = arguments.experiments or list(EXPERIMENTS)
    wrong = set(titles) - set(EXPERIMENTS)
    if wrong:
        parser.error(f"there is no experiment {', '.join(sorted(wrong))}; there are {', '.join(EXPERIMENTS)}")
    if arguments.table:
        print("\n".join(table(kept / f"{t}.jsonl") for t in titles if (kept / f"{t}.jsonl").is_file()))
        return
    kept.mkdir(exist_ok=True)
    there = {title: done(kept / f"{title}.jsonl") for title in titles}
    engine = arguments.engine
    if engine == "auto" and arguments.jobs > 1 and (arguments.device == "cpu" or not torch.cuda.is_available()):
        engine = "vectorised"  # the cores are taken
    tasks = [
        Task(title, name, seed, arguments.device, engine, arguments.at_once)
        for seed in range(arguments.seeds)
        for title in titles
        for name in EXPERIMENTS[title].methods
        if (name, seed) not in there[title] and (not arguments.methods or name in arguments.methods)
    ]
    good = True
    for task, lines, why in runs(tasks, arguments.jobs, arguments.minutes):
        said = f"{task.title} {task.method} seed {task.seed}:"
        if why:
            good = False
            print(f"{said} failed: {why}", file=sys.stderr)
            continue
        keep(kept / f"{task.title}.jsonl", task.title, lines, task.device)
        last = {readout: list(rounds.values())[-1] for readout, rounds in lines[0]["over_rounds"]["test"].items()}
        means = "  ".join(f"{readout} {100 * mean:.2f}" for readout, mean in last.items())
        print(f"{said} {means}  ({lines[0]['seconds']} s)", file=sys.stderr, flush=True)
    sys.exit(not good)


def runs(tasks: list[Task], jobs: int, minutes: float | None) -> Iterator[tuple[Task, list[dict[str, Any]], str]]:
    """All runs as they come, so many side by side; those that are under way when time is over are ended."""
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    if jobs == 1:  # here, where an engine may have workers of its own
        for number, task in enumerate(tasks):
            if time.monotonic() > end:
                print(f"time is over; {len(tasks) - number} runs are not made", file=sys.stderr)
                return
            yield attempt(task)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        found = pool.imap_unordered(attempt, tasks)
        for number in range(len(tasks)):
            try:
                yield found.next(None if minutes is None else max(end - time.monotonic(), 0.1))
            except multiprocessing.TimeoutError:
                print(f"time is over; {len(tasks) - number} runs are not made", file=sys.stderr)
                return


if __name__ == "__main__":
    main()
