"""Clients spread over worker processes, one thread each: the way of a CPU where arithmetic, not Python, is the cost.

Workers are forked once, with the module and the samples already in memory; rows lie in shared memory, so that a round
moves nothing but a few numbers through pipes. Each worker takes the next client that nobody has taken.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedquilt.training.engine import Job, Recipe
from fedquilt.training.sequential import Sequential


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Parallel:
    """Sequential training in several processes."""

    name: ClassVar[str] = "parallel"

    def __init__(self, recipe: Recipe, workers: int | None = None) -> None:
        if recipe.device.type != "cpu":
            raise ValueError("the engine 'parallel' is for the CPU; take engine='vectorised' on a GPU")
        self.recipe = recipe
        self.workers = min(workers or cores(), len(recipe.samples.count))
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.rows: Tensor | None = None

    def train(self, job: Job) -> Tensor:
        k = len(job.members)
        if self.rows is None or len(self.rows) < k:
            self._start(k)
        assert self.rows is not None
        self.rows[:k] = job.rows
        # The longest first: the last client to finish is then a short one.
        turn = sorted(range(k), key=lambda at: -self.recipe.samples.count[job.members[at]])
        self.next.value = 0
        parts = (job.members, turn, job.round, job.lr, job.scale, dict(job.extras))
        for pipe in self.pipes:
            pipe.send(parts)
        losses = torch.zeros(k)
        for pipe in self.pipes:
            trouble, done = _answer(pipe)
            if trouble:
                self.close()
                raise RuntimeError(f"a worker failed while training:\n{trouble}")
            for at, loss in done:
                losses[at] = loss
        job.rows.copy_(self.rows[:k])
        return losses

    def _start(self, k: int) -> None:
        self.close()
        context = multiprocessing.get_context("fork")
        self.rows = torch.zeros(k, self.recipe.layout.width).share_memory_()
        self.next = context.Value("q", 0)
        for _ in range(self.workers):
            here, there = context.Pipe()
            self.pipes.append(here)
            inherited = tuple(self.pipes)
            args = (there, inherited, self.recipe, self.rows, self.next)
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)

    def close(self) -> None:
        """End the workers."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self.pipes, self.rows = [], [], None

    def __del__(self) -> None:
        self.close()


def _answer(pipe: Connection) -> tuple[str, list[tuple[int, float]]]:
    try:
        trouble, done = pipe.recv()
    except (EOFError, OSError):
        return "the worker process ended by itself (was it killed, or out of memory?)", []
    return trouble, done


def _work(pipe: Connection, inherited: tuple[Connection, ...], recipe: Recipe, rows: Tensor, turn_of: Any) -> None:
    """A worker's life: take jobs until the pipe closes."""
    for end in inherited:  # the parent's ends: while a copy of one is open here, closing it there would go unnoticed
        end.close()
    torch.set_num_threads(1)
    engine = Sequential(recipe)
    while True:
        try:
            members, turn, round_, lr, scale, extras = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        done: list[tuple[int, float]] = []
        trouble = ""
        try:
            job = Job(rows[: len(members)], members, round_, lr, scale, extras)
            while True:
                with turn_of.get_lock():
                    place, turn_of.value = turn_of.value, turn_of.value + 1
                if place >= len(turn):
                    break
                done.append((turn[place], float(engine.train_one(job, turn[place]))))
        except KeyboardInterrupt:
            return
        except Exception:
            trouble = traceback.format_exc()
        pipe.send((trouble, done))
