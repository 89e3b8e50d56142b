"""What a federation costs against the number of clients, of ranks, and the size of its model; and the picture of it.

Clients are those of W3 in `engine.py`, with ten validation and ten test samples more, under FedPer, whose heads stay
home. Every number of clients has a process of its own. Seconds are those of processors, so that a machine that is busy
with other things does not show; memory is the most that the process had. What was found before is not measured again.

    python benchmarks/scale.py --plots                # into results/scale.json and docs/images/scale.svg
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import moved
from torch import nn

import fedquilt as fq
from fedquilt.runs.folder import RunFolder

CLIENTS = (100, 1000, 10_000, 100_000)
RANKS = (1, 2, 4)
HIDDEN = (64, 256, 1024)
SENT = ("mean", "median", "krum")
HERE = Path(__file__).resolve().parent
_WARM = 3  # rounds in which engines are found, and steps traced
_ROUNDS = 5


def mlp(hidden: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(60, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def scenario(clients: int = 100, a_round: int = 100, hidden: int = 64, rounds: int = 10**6) -> fq.Scenario:
    """Clients of W3's kind; their samples lie in one array, as they would in a file that is mapped into memory."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 70, 60, generator=make)
    y = torch.randint(0, 10, (clients, 70), generator=make)
    model = partial(mlp, hidden)
    made = [
        fq.Client(f"c{i}", model, (x[i, :50], y[i, :50]), (x[i, 50:60], y[i, 50:60]), (x[i, 60:], y[i, 60:]))
        for i in range(clients)
    ]
    share = min(1.0, a_round / clients)
    return fq.Scenario("w3", made, fq.Training(optimiser="sgd", lr=0.1, batch=10, share=share, rounds=rounds))


class Laps:
    """Processor seconds between calls."""

    def __init__(self) -> None:
        self.at = time.process_time()

    def __call__(self) -> float:
        before, self.at = self.at, time.process_time()
        return self.at - before


def measure(clients: int, a_round: int, hidden: int, everybody: bool = False) -> dict[str, float]:
    """What one federation costs; with `everybody` all clients took part before it is kept and goes on."""
    lap = Laps()
    made = scenario(clients, a_round, hidden)
    found = {"data": lap()}
    federation = fq.Federation(made, fq.methods.FedPer(), engine="vectorised")
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        options: dict[str, Any] = {"engine": "vectorised", "clients_at_once": None, "merge": {"name": "mean"}}
        options |= {"evaluate_every": 10**6, "checkpoint_every": 5, "alone": False, "unseen": 0}
        folder.start(federation, options)
        found["start"] = lap()
        for _ in range(_WARM):
            federation.step(evaluate=False)
        rounds = []
        for _ in range(_ROUNDS):
            lap()
            folder.round(federation, federation.step(evaluate=False))
            rounds.append(lap())
        found["round"] = statistics.median(rounds)
        if everybody:
            for family_state in federation.simulation.family_states:
                fresh = sorted(family_state.store.fresh)
                for at in range(0, len(fresh), 10_000):
                    some = fresh[at : at + 10_000]
                    family_state.store.put(some, family_state.store.take(some))
        lap()
        folder.checkpoint(federation, {})
        found["checkpoint, first"] = lap()
        federation.step(evaluate=False)
        lap()
        folder.checkpoint(federation, {})
        found["checkpoint"] = lap()
        federation.evaluate()
        found["evaluation"] = lap()
        folder.lock.release()
        again = fq.Federation(made, fq.methods.FedPer(), engine="vectorised")
        lap()
        RunFolder(Path(place) / "run").restore(again)
        found["resume"] = lap()
    found["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return found


def in_ranks(ranks: int | None) -> float:
    """Processor seconds of a whole run of W3 by so many ranks, all together; None: by one process without ranks."""
    with tempfile.TemporaryDirectory() as place:
        words = ["run", f"{Path(__file__).resolve()}:scenario", "fedper", "--set", "clients=400", "a_round=400"]
        words += ["--rounds", "40", "--evaluate-every", "40", "--no-alone", "--engine", "vectorised"]
        command = [sys.executable, "-m", "fedquilt", *words, "--out", str(Path(place) / "run"), "--json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        more = [] if ranks is None else ["--ranks", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def apart(**how: Any) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(how)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(how, {key: round(value, 2) for key, value in found.items()}, flush=True)
    return found


def everything(path: Path) -> dict[str, Any]:
    """All that is plotted, kept in a file as it is found."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    wanted: dict[str, dict[str, Callable[[], Any]]] = {
        "clients": {str(n): partial(apart, clients=n, a_round=100, hidden=64) for n in CLIENTS},
        "model": {str(n): partial(apart, clients=100, a_round=100, hidden=n) for n in HIDDEN},
        "limit": {"100000": partial(apart, clients=100_000, a_round=1000, hidden=64, everybody=True)},
        "ranks": {"none": partial(in_ranks, None), **{str(n): partial(in_ranks, n) for n in RANKS}},
        "bytes": {
            f"{merge}, {n} ranks": partial(moved, "W3", n, "fedavg", merge) for merge in SENT for n in RANKS if n > 1
        },
    }
    for kind, some in wanted.items():
        for name, work in some.items():
            if name not in found.setdefault(kind, {}):
                found[kind][name] = work()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def plot(found: dict[str, Any], path: Path) -> None:
    """Four pictures."""
    import matplotlib
    import matplotlib.ticker

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "scale", "font.size": 8, "legend.fontsize": 7}
    import matplotlib.pyplot as plt

    figure, ((clients, model), (ranks, sent)) = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
    numbers = sorted(int(n) for n in found["clients"])
    for key in ("start", "round", "checkpoint", "resume", "evaluation"):
        clients.loglog(numbers, [found["clients"][str(n)][key] for n in numbers], marker="o", markersize=3, label=key)
    clients.set(xlabel="clients, 100 of them a round", ylabel="processor seconds", title="clients")
    clients.legend()
    weights = [71 * int(n) + 10 for n in found["model"]]
    for key in ("round", "evaluation"):
        model.loglog(weights, [each[key] for each in found["model"].values()], marker="o", markersize=3, label=key)
    model.set(xlabel="weights of a model, 100 clients, all in a round", ylabel="processor seconds", title="model")
    model.legend()
    for axis in (model.xaxis, model.yaxis):  # labels between powers of ten would lie on each other
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    ranks.bar(list(found["ranks"]), list(found["ranks"].values()), width=0.6)
    ranks.set(xlabel="ranks", ylabel="processor seconds of a run, all ranks", title="ranks")
    for at, merge in enumerate(SENT):
        several = [found["bytes"][f"{merge}, {n} ranks"] for n in RANKS if n > 1]
        places = [2 * place + 0.4 * at for place in range(len(several))]
        sent.bar(places, [each["bytes"] / 1000 for each in several], width=0.4, label=merge)
    ends = [2 * place + 0.4 * len(SENT) for place in range(len(several))]
    sent.bar(ends, [each["copies"] / 1000 for each in several], width=0.4, label="all copies to all", color="lightgrey")
    sent.set_xticks([place - 0.6 for place in ends], [f"{each['ranks']} ranks" for each in several])
    sent.set(ylabel="kB leaving a rank in a round", title="between ranks")
    sent.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plots", action="store_true", help="measure what is not known yet, and draw it")
    parser.add_argument("--found", type=Path, default=HERE.parent / "results" / "scale.json")
    parser.add_argument("--one", help="one federation, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(**json.loads(arguments.one))))
    if arguments.plots:
        plot(everything(arguments.found), HERE.parent / "docs" / "images" / "scale.svg")


if __name__ == "__main__":
    main()
