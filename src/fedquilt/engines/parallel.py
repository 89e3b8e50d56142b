"""Clients spread over worker processes, one thread each: the way of a CPU where arithmetic, not Python, is the cost.

Workers are forked once, with the module and the samples already in memory; rows and whatever the method prepared lie in
shared memory, so that a round moves nothing but a few numbers through pipes. Each worker takes the next client, or the
next stack of clients, that nobody has taken.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedquilt._util.shared_memory import common_zeros, is_common, keep_freed_memory
from fedquilt.engines.engine import Engine, TrainingJob, TrainingSpec
from fedquilt.engines.memory_budget import how_many_a_worker
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.vectorised import Vectorised

_PATIENCE = 2.0  # seconds that idle workers get to end by themselves


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Whether this process can fork workers: the system must know how, and a daemon's children are forbidden.

    Where PyTorch sees a GPU, a process that has ever computed a gradient has threads that a fork of it would miss.
    """
    knows = "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon
    return knows and not torch.cuda.is_available()


class Parallel:
    """Sequential training in several processes."""

    name: ClassVar[str] = "parallel"
    stacks: ClassVar[bool] = False

    def __init__(self, recipe: TrainingSpec, workers: int | None = None) -> None:
        if recipe.device.type != "cpu":
            raise ValueError(f"the engine '{self.name}' is for the CPU; take engine='vectorised' on a GPU")
        if not can_fork():
            raise ValueError(
                f"the engine '{self.name}' forks processes, which cannot be done here; take another one, or hide a GPU "
                "that is not wanted with CUDA_VISIBLE_DEVICES="
            )
        self.recipe = recipe
        self.most = 1  # clients that a worker takes at once
        self.workers = min(workers or cores(), len(recipe.samples.count))
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.shared: dict[str, Tensor] = {}
        self.home: Tensor | None = None
        self.owner = os.getpid()

    def train(self, job: TrainingJob) -> Tensor:
        try:
            return self._train(job)
        except BaseException:  # an interrupted job leaves answers in the pipes: these workers are of no more use
            self.close(patience=0.0)
            raise

    def _train(self, job: TrainingJob) -> Tensor:
        k = len(job.members)
        tensors = {"rows": job.rows, **{f"extra {name}": value for name, value in job.extras.items()}}
        if job.scale is not None:
            tensors["scale"] = job.scale
        if not self._fits(tensors):
            self._start(tensors)
        at_home = self.home is not None and self.home.data_ptr() == job.rows.data_ptr() and len(self.home) == k
        for name, value in tensors.items():
            if not (at_home and name == "rows"):
                self.shared[name][:k] = value
        # The longest first: the last client to finish is then a short one.
        turn = self._shares(sorted(range(k), key=lambda at: -self.recipe.samples.count[job.members[at]]))
        self.next.value = 0
        for pipe in self.pipes:
            pipe.send((at_home, job.members, turn, job.round, job.lr))
        losses = torch.zeros(k)
        for pipe in self.pipes:
            trouble, done = _answer(pipe)
            if trouble:
                raise RuntimeError(f"a worker failed while training:\n{trouble}")
            for places, found in done:
                losses[places] = torch.tensor(found)
        if not at_home:
            job.rows.copy_(self.shared["rows"][:k])
        return losses

    def _shares(self, places: list[int]) -> list[list[int]]:
        """What workers take at once: as many clients as they may, and as many shares for one worker as for another."""
        rounds = -(-len(places) // (self.most * self.workers))
        size = -(-len(places) // (rounds * self.workers))
        return [places[at : at + size] for at in range(0, len(places), size)]

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the workers' shared memory has a place for these."""
        return self.shared.keys() == tensors.keys() and all(
            len(have := self.shared[name]) >= len(value)
            and have.shape[1:] == value.shape[1:]
            and have.dtype == value.dtype
            for name, value in tensors.items()
        )

    def _start(self, tensors: Mapping[str, Tensor]) -> None:
        self.close()
        context = multiprocessing.get_context("fork")
        # Rows that workers can write to where they rest need not travel; others have room that costs nothing yet.
        self.home = tensors["rows"] if is_common(tensors["rows"]) else None
        self.shared = {name: common_zeros(tuple(value.shape), value.dtype) for name, value in tensors.items()}
        self.next = context.Value("q", 0)
        for _ in range(self.workers):
            here, there = context.Pipe()
            self.pipes.append(here)
            args = (there, tuple(self.pipes), self._engine, self.shared, self.home, self.next)
            process = context.Process(target=_work, args=args, daemon=True)
            with warnings.catch_warnings():
                # Forking beside other threads is safe here: a worker uses nothing that they could hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            self.processes.append(process)

    def _engine(self) -> Engine:
        """What a worker trains with."""
        return Sequential(self.recipe)

    def close(self, patience: float = _PATIENCE) -> None:
        """End the workers: idle ones by themselves, others after a while."""
        if self.owner != os.getpid():  # a copy of an engine in a worker
            return
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # whoever is gone already needs no word
                pipe.send(None)
            pipe.close()
        end = time.monotonic() + patience
        for process in self.processes:
            process.join(timeout=max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self.processes, self.pipes, self.shared, self.home = [], [], {}, None

    def __del__(self) -> None:
        if hasattr(self, "owner"):
            self.close()


class ParallelStacks(Parallel):
    """Stacks of a few clients in several processes: a stack that fits a core's cache beats one of all clients."""

    name: ClassVar[str] = "parallel-stacks"
    stacks: ClassVar[bool] = True

    def _start(self, tensors: Mapping[str, Tensor]) -> None:
        self.most = how_many_a_worker(self.recipe, _extras_of(tensors))
        # made before forking, a table of all samples is there once for all workers
        self.recipe.samples.table(np.zeros(1, dtype=np.int64), self.recipe.device)
        super()._start(tensors)

    def _engine(self) -> Engine:
        return Vectorised(self.recipe)


def _extras_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the method prepared, among the tensors of a job."""
    return {name.removeprefix("extra "): value for name, value in tensors.items() if name.startswith("extra ")}


Done = list[tuple[list[int], list[float]]]  # places in the job, and their losses


def _answer(pipe: Connection) -> tuple[str, Done]:
    try:
        trouble, done = pipe.recv()
    except (EOFError, OSError):
        raise ChildProcessError("a worker process ended by itself (was it killed, or out of memory?)") from None
    return trouble, done


def _work(
    pipe: Connection, inherited: tuple[Connection, ...], make: Callable[[], Engine], shared: Mapping[str, Tensor],
    home: Tensor | None, turn_of: Any,
) -> None:  # fmt: skip
    """A worker's life: take jobs until it is told to end, or the pipe closes because the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends its workers
    for end in inherited:  # the parent's ends: while a copy of one is open here, closing it there would go unnoticed
        end.close()
    torch.set_num_threads(1)
    gc.freeze()  # looking for garbage in what is there already would copy memory that is shared with the parent
    keep_freed_memory()
    engine, extras = make(), _extras_of(shared)
    while True:
        try:
            order = pipe.recv()
        except (EOFError, OSError):
            return
        if order is None:
            return
        at_home, members, turn, round_, lr = order
        done: Done = []
        trouble = ""
        try:
            rows = home if at_home and home is not None else shared["rows"]
            job = TrainingJob(rows, members, round_, lr, shared.get("scale"), extras)
            while True:
                with turn_of.get_lock():
                    place, turn_of.value = turn_of.value, turn_of.value + 1
                if place >= len(turn):
                    break
                mine = job.some(turn[place])
                done.append((turn[place], engine.train(mine).tolist()))
                if mine.rows.data_ptr() != rows[turn[place][0]].data_ptr():  # a copy of the rows
                    rows[turn[place]] = mine.rows
        except Exception:
            trouble = traceback.format_exc()
        try:
            pipe.send((trouble, done))
        except OSError:  # nobody waits for it any more
            return
