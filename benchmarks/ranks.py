"""What ranks cost and bring: rounds in N ranks beside one process with as many workers, and the bytes between ranks.

Both sides are processes that stay; they do their rounds by turns, and medians are compared. W1 and W3 are those of
`engine.py`. What leaves a rank in a round is counted where it is handed to torch.distributed, beside what it would be
if every copy went to every rank.

    python benchmarks/ranks.py --ranks 2                  # W1 and W3, FedAvg
    python benchmarks/ranks.py --bytes                    # bytes of a few merges and methods
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from engine import WORKLOADS, Workload

import fedquilt as fq
from fedquilt.core.ranks import among, join, ranks

BYTES = (("fedavg", "mean"), ("fedper", "mean"), ("fedavg", "median"), ("fedavg", "krum"), ("ifca", "mean"))


def federation(work: Workload, engine: str, method: str = "fedavg", merge: str = "mean") -> fq.Federation:
    clients = [fq.Client(f"c{i}", work.model, some) for i, some in enumerate(work.data())]
    scenario = fq.Scenario(work.name, clients, work.training.but({"rounds": 10**6}))
    return fq.Federation(
        scenario, fq.methods.METHODS[method](), device="cpu", engine=engine, rule=fq.sharing.pick(merge)
    )


def serve(what: dict[str, Any]) -> None:
    """One process of a side: it does as many rounds as it is told, and says how long they took and what left it."""
    torch.set_num_threads(1)
    (work,) = (work for work in WORKLOADS if work.name == what["work"])
    with among(join()):
        run = federation(work, what["engine"], what["method"], what["merge"])
        here = ranks()
        for line in sys.stdin:
            start, sent = time.perf_counter(), here.sent if here else 0
            for _ in range(int(line)):
                run.step(evaluate=False)
            found = {"seconds": time.perf_counter() - start, "sent": here.sent - sent if here else 0}
            found["numbers"] = sum(values.value.shape[1] for values in run.server.all_values)
            print(json.dumps(found | {"engine": run.backend.engines}), flush=True)
        run.close()


class Side:
    """Processes that do rounds together when they are told."""

    def __init__(self, size: int | None, **what: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = []
        for rank in range(size or 1):
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port} if size else {}
            told = {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in where.items()}} if size else {}
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", json.dumps(what)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **told}
            self.processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )

    def rounds(self, count: int) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self.processes if process.stdout is not None]

    def close(self) -> None:
        for process in self.processes:
            process.communicate()


def beside(work: str, size: int, turns: int, rounds: int) -> dict[str, Any]:
    """Seconds a round of so many ranks, and of one process whose engine may have as many workers."""
    sides = {
        "ranks": Side(size, work=work, engine="vectorised", method="fedavg", merge="mean"),
        "one process": Side(None, work=work, engine="auto", method="fedavg", merge="mean"),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    engines = {name: side.rounds(3)[0]["engine"] for name, side in sides.items()}
    for _ in range(turns):
        for name, side in sides.items():
            found[name].append(max(each["seconds"] for each in side.rounds(rounds)) / rounds)
    for side in sides.values():
        side.close()
    ratios = [ranked / alone for ranked, alone in zip(found["ranks"], found["one process"], strict=True)]
    middle = {name: round(1000 * statistics.median(each), 2) for name, each in found.items()}
    return {
        "workload": work, "ranks": size, "ms a round": middle, "engines": engines,
        "ranks for one process": round(statistics.median(ratios), 2), "turns": [round(r, 2) for r in ratios],
    }  # fmt: skip


def moved(work: str, size: int, method: str, merge: str) -> dict[str, Any]:
    """Bytes that leave a rank in a round, the most of all ranks, and what copies to all would be."""
    side = Side(size, work=work, engine="sequential", method=method, merge=merge)
    side.rounds(1)
    found = side.rounds(2)
    side.close()
    (of,) = (each for each in WORKLOADS if each.name == work)
    a_round = max(1, round(of.training.share * of.clients))
    copies = -(-a_round // size) * found[0]["numbers"] * 4 * (size - 1)
    sent = max(each["sent"] for each in found) // 2
    return {"workload": work, "ranks": size, "method": method, "merge": merge, "bytes": sent, "copies": copies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=["W1", "W3"])
    parser.add_argument("--bytes", action="store_true", help="count what goes between ranks")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return
    for work in arguments.only:
        if arguments.bytes:
            for method, merge in BYTES:
                print(json.dumps(moved(work, arguments.ranks, method, merge)), flush=True)
        else:
            print(json.dumps(beside(work, arguments.ranks, arguments.turns, 20 if work == "W3" else 2)), flush=True)


if __name__ == "__main__":
    main()
