"""How fast a round is: fedquilt beside the loop over clients that a competent researcher writes.

Three workloads, the same maths on both sides, rounds interleaved in one process so that a noisy machine is noisy for
both. A round is choosing clients, batching, training and merging; nothing is evaluated. A GPU is waited for after each
of the rounds of the loop, which are hundreds of steps, and after every 25 of ours: nothing else waits for it. Run it
with

    python benchmarks/engine.py                       # CPU
    python benchmarks/engine.py --device cuda --json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import torch
from torch import Tensor, nn

import fedquilt as fq


def har_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(9, 32, 5), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(32, 64, 5), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(),
        nn.Linear(64 * 29, 128), nn.ReLU(), nn.Linear(128, 6),
    )  # fmt: skip


def cifar_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.AvgPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 64, 256), nn.ReLU(),
        nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 9),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(60, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Workload:
    """Clients of one size with made-up data, and how they train."""

    name: str
    model: Callable[[], nn.Module]
    clients: int
    samples: int
    shape: tuple[int, ...]
    classes: int
    training: fq.Training

    def data(self) -> list[tuple[Tensor, Tensor]]:
        make = torch.Generator().manual_seed(0)
        return [
            (torch.randn(self.samples, *self.shape, generator=make),
             torch.randint(0, self.classes, (self.samples,), generator=make))
            for _ in range(self.clients)
        ]  # fmt: skip


WORKLOADS = (
    Workload("W1", har_cnn, 30, 224, (9, 128), 6, fq.Training(optimiser="sgd", lr=0.01, batch=32)),
    Workload("W2", cifar_cnn, 36, 243, (3, 32, 32), 9, fq.Training(optimiser="adam", lr=0.001, batch=16)),
    Workload("W3", mlp, 1000, 50, (60,), 10, fq.Training(optimiser="sgd", lr=0.1, batch=10, share=0.1)),
)


class Loop:
    """FedAvg as a loop over clients with PyTorch's ordinary optimisers."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self.work, self.device = work, device
        torch.manual_seed(0)
        self.model = work.model().to(device)
        self.data = [(x.to(device), y.to(device)) for x, y in work.data()]
        self.value = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def round(self) -> None:
        work, training = self.work, self.work.training
        chosen = torch.randperm(work.clients)[: max(1, round(training.share * work.clients))].tolist()
        total = {name: torch.zeros_like(tensor) for name, tensor in self.value.items()}
        samples = sum(len(self.data[i][1]) for i in chosen)
        for i in chosen:
            self.model.load_state_dict(self.value)
            make = torch.optim.SGD if training.optimiser == "sgd" else torch.optim.Adam
            optimiser = make(self.model.parameters(), lr=training.lr)
            x, y = self.data[i]
            order = torch.randperm(len(y), device=self.device)
            for at in range(0, len(y), training.batch):
                index = order[at : at + training.batch]
                optimiser.zero_grad()
                nn.functional.cross_entropy(self.model(x[index]), y[index]).backward()
                optimiser.step()
            with torch.no_grad():
                for name, tensor in self.model.state_dict().items():
                    total[name] += tensor * (len(y) / samples)
        self.value = total


class Ours:
    """The same through fedquilt."""

    def __init__(self, work: Workload, device: torch.device, engine: str) -> None:
        clients = [fq.Client(f"c{i}", work.model, train=pair) for i, pair in enumerate(work.data())]
        training = work.training.but({"rounds": 10**6})
        scenario = fq.Scenario(work.name, clients, training)
        self.federation = fq.Federation(scenario, fq.methods.FedAvg(), engine=engine, device=str(device))

    def round(self) -> None:
        self.federation.step(evaluate=False)


def seconds(work: Callable[[], None], device: torch.device, rounds: int = 1) -> float:
    """The time of one of some rounds."""
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def peak(work: Workload, side: str, device: torch.device, engine: str) -> float:
    """Peak memory of one side alone, in MiB: on a GPU what it allocates, on a CPU that of a process of its own."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # what libraries keep of what was measured before
        _two_rounds(work, side, device, engine)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    command = [sys.executable, __file__, "--peak", side, "--only", work.name, "--engine", engine]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def own_peak(work: Callable[[], None]) -> float:
    """The most memory, in MiB, that this process and its workers have together while they work; shared pages once."""
    if not Path("/proc/self/smaps_rollup").exists():
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    done, most = Event(), 0.0

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, _held())

    watcher = Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return most


def _held() -> float:
    """The memory in MiB of this process and its workers: of theirs what they do not share, code and libraries once."""
    pid = os.getpid()
    total = _sum(Path(f"/proc/{pid}/status"), "RssFile:")
    for one in [str(pid), *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]:
        with contextlib.suppress(OSError):  # a worker may have ended
            total += _sum(Path(f"/proc/{one}/smaps_rollup"), "Pss_Anon:", "Pss_Shmem:")
    return total


def _sum(path: Path, *keys: str) -> float:
    return sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(keys)) / 2**10


def _two_rounds(work: Workload, side: str, device: torch.device, engine: str) -> None:
    runner = Loop(work, device) if side == "loop" else Ours(work, device, engine)
    for _ in range(2):
        runner.round()
    if isinstance(runner, Ours):
        runner.federation.close()


def measure(work: Workload, device: torch.device, engine: str, rounds: int) -> dict[str, float | str]:
    loop_peak, ours_peak = (peak(work, side, device, engine) for side in ("loop", "ours"))
    loop = Loop(work, device)
    loop.round()
    ours = Ours(work, device, engine)
    for _ in range(4):
        ours.round()
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        times.append((seconds(loop.round, device), seconds(ours.round, device, 25 if device.type == "cuda" else 1)))
    loop_ms, ours_ms = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    chosen = ours.federation.simulation.engines[0]
    ours.federation.close()
    return {
        "loop_ms": round(loop_ms, 3),
        "fedquilt_ms": round(ours_ms, 3),
        "ratio": round(loop_ms / ours_ms, 2),
        "engine": chosen,
        "loop_peak_mib": round(loop_peak),
        "peak_mib": round(ours_peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds a side (medians are shown)")
    parser.add_argument("--only", nargs="*", default=[work.name for work in WORKLOADS])
    parser.add_argument("--peak", choices=["loop", "ours"], help="only print the peak memory of one side, in MiB")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.peak:
        (work,) = (work for work in WORKLOADS if work.name in arguments.only)
        print(own_peak(lambda: _two_rounds(work, arguments.peak, device, arguments.engine)))
        return
    found = {}
    for work in WORKLOADS:
        if work.name in arguments.only:
            found[work.name] = result = measure(work, device, arguments.engine, arguments.rounds)
            print(
                f"{work.name}  loop {result['loop_ms']:>9} ms   fedquilt {result['fedquilt_ms']:>9} ms   "
                f"{result['ratio']}x  ({result['engine']}, peak {result['loop_peak_mib']} -> {result['peak_mib']} MiB)",
                flush=True,
            )
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
