"""Small federations for grids of many runs, and many runs side by side: what attacks.py and privacy.py share.

Clients and data are those of `feddl-har` and `modfl-cameras`, by the same loaders; there are fewer of them, and their
networks are smaller than the papers', so that a run takes about a second on one core and clients still learn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.models import Modular, dense

Task = TypeVar("Task")
Row = TypeVar("Row")


class Signals(nn.Module):
    """FedDL's network for signals, narrower and with strides: two convolutions, a fully connected layer, the output."""

    def __init__(self, classes: int = 6, channels: int = 6, length: int = 128) -> None:
        super().__init__()
        self.input_shape = (channels, length)
        self.conv1 = nn.Conv1d(channels, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv1d(16, 24, 5, stride=2, padding=2)
        self.fc1 = nn.Linear(24 * (length // 16), 32)
        self.output = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.output(F.relu(self.fc1(x.flatten(1))))
        return out


class Pictures(Modular):
    """A network like ModFL's, much smaller: pictures of 16 x 16, patches of 4 x 4, FC 32 | FC 32, output."""

    def __init__(self, channels: int, pixels: int, classes: int = 9) -> None:
        super().__init__(partial(_camera_side, channels, pixels), partial(dense, 32, 32, classes))
        self.input_shape = (channels, pixels, pixels)


def _camera_side(channels: int, pixels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(pixels // 16), nn.Conv2d(channels, 16, 4, stride=4), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 4 * 4, 32), nn.ReLU(),
    )  # fmt: skip


_MODELS: dict[str, Callable[[tuple[int, ...], int], Callable[[], nn.Module]]] = {
    "feddl-har": lambda shape, classes: partial(Signals, classes, *shape),
    "modfl-cameras": lambda shape, classes: partial(Pictures, shape[0], shape[1], classes),
}


def federation(name: str, seed: int, settings: Mapping[str, Any], training: Mapping[str, Any]) -> fq.Scenario:
    """A scenario with these settings, its clients with small networks, trained in this way."""
    made = fq.scenarios.build(name, seed=seed, **settings)
    classes = len(made.label_names or ())
    clients = [
        fq.Client(
            each.name, _MODELS[name](tuple(each.train.x.shape[1:]), classes), each.train, each.validation, each.test,
            traits=each.traits, labels=each.labels,
        )
        for each in made.clients
    ]  # fmt: skip
    how = made.training.but(training)
    return fq.Scenario(made.name, clients, how, common=made.common, label_names=made.label_names)


def side_by_side(
    work: Callable[[Task], Row], tasks: Sequence[Task], jobs: int, minutes: float | None = None
) -> Iterator[tuple[Task, Row]]:
    """What `work` makes of tasks, as they come in, in so many processes of one thread each.

    Tasks are begun in their order. After so many `minutes` no more are begun. One that fails is told and left out.
    """
    end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    left, running = list(reversed(tasks)), dict[Future[Row], Task]()
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        while True:
            while left and len(running) < 2 * jobs and time.monotonic() < end:
                task = left.pop()
                running[pool.submit(work, task)] = task
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(done)
                if error := done.exception():
                    print(f"{task} failed: {error}", file=sys.stderr, flush=True)
                else:
                    yield task, done.result()
    if left:
        print(f"{len(left)} of {len(tasks)} runs are left; the same command goes on", file=sys.stderr, flush=True)


def kept(path: Path) -> list[dict[str, Any]]:
    """The rows of earlier runs; a line that was cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def keep(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row, whole; after a line that was cut short, on a line of its own."""
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            cut = file.read() != b"\n"
        else:
            cut = False
        file.write(b"\n" * cut + json.dumps(row).encode() + b"\n")
