"""The five systems and their baselines on their own scenarios, on real data: the rows behind docs/results.md.

    python benchmarks/papers.py                      # everything that is not in results/ yet
    python benchmarks/papers.py feddl-har --seeds 3  # one experiment
    python benchmarks/papers.py --table              # what is in results/, as tables

Each experiment writes results/NAME.jsonl: a first line with the command, the commit and the settings, then one row per
seed, method, client, read-out and split, of the last round. A run that is there already is not repeated. The data come
from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fedquilt as fq

RESULTS = Path(__file__).parent.parent / "results"
BOTH = ("received", "adapted")
Methods = Mapping[str, tuple[str, Mapping[str, Any]]]  # how a row calls it -> method and its settings


@dataclass(frozen=True)
class Experiment:
    """A scenario with its settings, and the methods compared there."""

    scenario: str
    settings: Mapping[str, Any]
    training: Mapping[str, Any]
    methods: Methods
    readouts: tuple[str, ...] = BOTH
    why: str = ""
    own_training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own_readouts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # for who refuses one of them
    groups: Mapping[str, str] = field(default_factory=dict)  # how clients' names begin -> a column of their own


def _plain(*names: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: (name, {}) for name in names}


def _cameras(labels: int, settings: Mapping[str, Any], training: Mapping[str, Any], why: str) -> Experiment:
    # the paper's FedAvg federates each kind of device by itself
    per_device = {"fedavg-per-device": ("modfl", {"by": {"configuration": "device", "operation": "device"}})}
    return Experiment(
        "modfl-cameras", {"labels": labels, **settings}, training,
        _plain("local", "fedavg", "fedper", "modfl") | (per_device if labels == 9 else {}), why=why,
        groups={"gen2-": "colour %", "gen1-": "grey %"},
    )  # fmt: skip


_POOL = {"blocks": (2, 2, 2), "width": 128}  # the paper's pool for CIFAR, with blocks of a width for small clients
_FULL = "72 clients, 200 rounds as in the paper, with CIFAR-10 through two cameras for CIFAR-10 and STL-10"
_SMALL = "18 of 72 clients with 126 images each, 20 of 200 rounds"


def _wearables(labels: int, rounds: int = 100, lr: float = 0.01) -> Experiment:
    why = "2000 rounds at a rate of 0.001, as in the paper" if rounds == 2000 else f"{rounds} rounds at a rate of {lr}"
    return Experiment(
        "modfl-wearables", {"labels": labels}, {"rounds": rounds, "lr": lr},
        _plain("local", "fedavg", "fedper", "modfl"), why=why,
    )  # fmt: skip


_FEDEM = ("local", "fedavg", "fedprox", "clustered", "ditto", "fedrep", "apfl", "pfedme", "fedem")


def _fedem(model: str, fraction: float, rounds: int, why: str) -> Experiment:
    """FedEM's and kNN-Per's table, with FedMN's: 80 clients."""
    return Experiment(
        "fedem-cifar10", {"model": model, "fraction": fraction}, {"rounds": rounds},
        _plain(*_FEDEM) | {"fedmn": ("fedmn", _POOL)}, (*BOTH, "fine-tuned-chosen", "knn"), why=why,
        own_readouts={"fedmn": BOTH}, own_training={"pfedme": {"momentum": 0.0}},
    )  # fmt: skip


def _feddl(interval: int, epochs: int, why: str) -> Experiment:
    """FedDL's own regime: 8 users with at most 80 windows, one scale for all."""
    return Experiment(
        "feddl-har", {"clients": 8, "scale": "all", "windows": 80}, {"epochs": epochs},
        _plain("local", "fedavg", "pfedme") | {
            "fedper": ("fedper", {"personal": 3}),  # the paper's K
            "feddl": ("feddl", {"interval": interval}),
            "feddl-average": ("feddl", {"interval": interval, "linkage": "average"}),
        }, BOTH, why=why,
    )  # fmt: skip


_EPOCHS, _STEPS = "R = 30 read as epochs", "R = 30 read as steps: 15 epochs of two steps"


EXPERIMENTS: dict[str, Experiment] = {
    "feddl-har-8-epochs-2": _feddl(2, 30, _EPOCHS), "feddl-har-8-epochs-8": _feddl(8, 30, _EPOCHS),
    "feddl-har-8-steps-2": _feddl(2, 15, _STEPS), "feddl-har-8-steps-8": _feddl(8, 15, _STEPS),
    "feddl-har": Experiment(
        "feddl-har", {}, {},
        _plain("local", "fedavg", "fedper") | {
            "feddl": ("feddl", {}), "feddl-average": ("feddl", {"linkage": "average"}),
        }, BOTH, why="40 rounds of 30 local epochs, as in the paper",
    ),
    "modfl-wearables-4": _wearables(4), "modfl-wearables-2": _wearables(2), "modfl-wearables-5": _wearables(5),
    **{f"modfl-wearables-{p}-2000": _wearables(p, 2000, 0.001) for p in (2, 4, 5)},
    "modfl-cameras-3": _cameras(3, {}, {}, _FULL),
    "modfl-cameras-6": _cameras(6, {}, {}, _FULL),
    "modfl-cameras-9": _cameras(9, {}, {}, _FULL),
    "modfl-cameras-small-3": _cameras(3, {"clients": 18, "fraction": 0.15}, {"rounds": 20}, _SMALL),
    "modfl-cameras-small-6": _cameras(6, {"clients": 18, "fraction": 0.15}, {"rounds": 20}, _SMALL),
    "animals-labels": Experiment(
        "animals-labels", {}, {},
        {
            "score-sharing": ("score-sharing", {}), "score-sharing-literal": ("score-sharing", {"normalise": False}),
            "score-sharing-own": ("score-sharing", {"normalise": False, "protocol": "paper", "scored": "own"}),
        }, ("received", "own"), why="100 images a label and round and 48 x 48 pixels, not 500 and 128 x 128",
    ),
    "thesis-mnist": Experiment(
        "thesis-mnist", {}, {}, _plain("local", "fedavg"), (*BOTH, "best-of-both", "averaged"),
        why="100 rounds of one epoch, as in the thesis",
    ),
    "thesis-cifar10": Experiment(
        "thesis-cifar10", {"fraction": 0.1}, {"rounds": 50}, _plain("local", "fedavg"),
        (*BOTH, "best-of-both", "averaged"), why="a tenth of the images, 50 of 100 rounds",
    ),
    "thesis-cifar10-full": Experiment(
        "thesis-cifar10", {}, {}, _plain("local", "fedavg"), (*BOTH, "best-of-both", "averaged"),
        why="100 rounds of one epoch, as in the thesis",
    ),
    "fedrep-cifar10": Experiment(
        "fedrep-cifar10", {}, {},
        _plain("local", "fedavg", "fedprox", "lg-fedavg", "fedper", "fedrep", "ditto", "apfl", "per-fedavg"),
        (*BOTH, "fine-tuned-chosen"), why="100 clients with two classes each, 100 rounds of a tenth of them",
        own_training={"per-fedavg": {"momentum": 0.0}},
    ),
    "fedem-cifar10-cnn": _fedem("small-cnn", 1.0, 200, "all images and rounds, a network of two convolutions"),
    "fedem-cifar10-mobilenet": _fedem("mobilenet-v2", 0.25, 100, "a quarter of the images, 100 of 200 rounds"),
    "fedem-cifar10": Experiment(
        "fedem-cifar10", {"fraction": 0.05, "clients": 20, "model": "small-cnn"}, {"rounds": 20, "batch": 32},
        _plain("local", "fedavg", "fedprox") | {
            "fedmn": ("fedmn", _POOL), "fedmn-concat": ("fedmn", {**_POOL, "joint": "concat"}),
        },
        (*BOTH, "fine-tuned"),
        why="a twentieth of the images, 20 of 80 clients, a small CNN for MobileNet-v2, 20 of 200 rounds",
    ),
}  # fmt: skip


def run_one(experiment: Experiment, name: str, seed: int, device: str, engine: str) -> Iterator[dict[str, Any]]:
    """The last round of one method with one seed, row by row."""
    method, settings = experiment.methods[name]
    scenario = fq.scenarios.build(experiment.scenario, seed=seed, **experiment.settings)
    training = scenario.training.but({**experiment.training, **experiment.own_training.get(name, {})})
    readouts = ("received",) if method == "local" else experiment.own_readouts.get(name, experiment.readouts)
    start = time.perf_counter()
    result = fq.run(
        scenario, method, seed=seed, settings=settings, training=training, readouts=readouts, device=device,
        engine=engine, alone=False, evaluate_every=training.rounds,
    )  # fmt: skip
    summary = result.summary
    yield {
        "run": name, "seed": seed, "seconds": round(time.perf_counter() - start, 1), "engine": summary["engine"],
        "megabytes_up": summary["megabytes_up"], "megabytes_down": summary["megabytes_down"],
        "plan": str(result.plan).split("\n"),
    }  # fmt: skip
    for row in result.rows:
        kept = ("round", "client", "readout", "split", "accuracy", "f1", "samples")
        yield {"method": name, "seed": seed, **{key: row[key] for key in kept}}


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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", help="only these; default: all of an experiment")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where rows are kept")
    parser.add_argument("--table", action="store_true", help="only show what is kept")
    arguments = parser.parse_args()
    kept: Path = arguments.out
    if arguments.table:
        print("\n".join(table(kept / f"{t}.jsonl") for t in EXPERIMENTS if (kept / f"{t}.jsonl").is_file()))
        return
    console = Console(stderr=True)
    wrong = set(arguments.experiments) - set(EXPERIMENTS)
    if wrong:
        parser.error(f"there is no experiment {', '.join(sorted(wrong))}; there are {', '.join(EXPERIMENTS)}")
    kept.mkdir(exist_ok=True)
    for title in arguments.experiments or EXPERIMENTS:
        experiment, path = EXPERIMENTS[title], kept / f"{title}.jsonl"
        if not path.is_file():
            header = {
                "experiment": title, "command": f"python benchmarks/papers.py {title}", "commit": commit(),
                "scenario": experiment.scenario, "settings": dict(experiment.settings),
                "training": dict(experiment.training), "scaled": experiment.why, "torch": torch.__version__,
                "python": platform.python_version(), "device": arguments.device,
            }  # fmt: skip
            path.write_text(json.dumps(header) + "\n")
        for seed in range(arguments.seeds):
            for name in experiment.methods:
                if (name, seed) in done(path) or (arguments.methods and name not in arguments.methods):
                    continue
                lines = list(run_one(experiment, name, seed, arguments.device, arguments.engine))
                with path.open("a") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in lines))
                scores = {line["readout"]: [] for line in lines if line.get("split") == "test"}  # type: ignore[var-annotated]
                for line in lines:
                    if line.get("split") == "test":
                        scores[line["readout"]].append(line["accuracy"])
                means = "  ".join(f"{k} {100 * sum(v) / len(v):.2f}" for k, v in scores.items())
                console.print(f"{title} {name} seed {seed}: {means}  ({lines[0]['seconds']} s)", highlight=False)
                sys.stderr.flush()


if __name__ == "__main__":
    main()
