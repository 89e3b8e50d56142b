"""Worker processes for the runs of a comparison, and what they tell."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedquilt.cli import worker_process as work
from fedquilt.cli.planned_runs import PlannedRun

MOST_JOBS = 8  # by default: every one has the data and the machinery in memory


@dataclass(frozen=True)
class WorkerEvent:
    """What a worker told about the job it is at: started, round, warning, finished, failed, stopped."""

    job: PlannedRun
    told: str
    text: str = ""
    round: int = 0
    rounds: int = 0


def how_many(jobs: int | None, runs: int, device: str, engine: str, gpus: int = 0) -> int:
    """How many runs go on at once: one a core, or what was asked for; a GPU or a parallel engine is busy with one.

    >>> how_many(None, runs=1, device="cpu", engine="auto"), how_many(3, runs=9, device="cuda", engine="auto")
    (1, 3)
    >>> how_many(None, runs=9, device="cuda", engine="auto", gpus=4)
    4
    """
    if jobs is None:
        one = device == "cuda" or engine.startswith("parallel")
        jobs = gpus or (1 if one else min(len(_cores()), MOST_JOBS))
    return max(1, min(jobs, runs))


class WorkerPool:
    """Workers that share the cores of this machine among them, and the GPUs of these numbers, if any."""

    def __init__(self, size: int, folder: Path, checkpoint_every: int, gpus: Sequence[int] = ()) -> None:
        self.folder, self.checkpoint_every = folder, checkpoint_every
        cores = _cores()
        each = [cores[at::size] or None for at in range(size)] if size > 1 else [None]
        self.workers = [_Worker(mine, gpus[at % len(gpus)] if gpus else None) for at, mine in enumerate(each)]
        self.news: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
        self.stopping = False

    def work(self, jobs: Sequence[PlannedRun]) -> Iterator[WorkerEvent | None]:
        """Do the jobs in their order, and tell what happens as it happens, or now and then that nothing did (None).

        After `stop` no further one is begun.
        """
        waiting = list(reversed(jobs))
        while (waiting and not self.stopping) or any(worker.job is not None for worker in self.workers):
            for worker in self.workers:
                if worker.job is None and waiting and not self.stopping:
                    self.begin(worker, waiting[-1])
                    yield WorkerEvent(waiting.pop(), "started")
            try:
                worker, said = self.news.get(timeout=0.5)
            except queue.Empty:
                yield None
                continue
            news = worker.heard(said)
            if news is not None:
                yield news

    def begin(self, worker: _Worker, job: PlannedRun) -> None:
        """Hand a job to a worker, which is started where it is not there yet."""
        if worker.process is None:
            ends = [other.pipe for other in self.workers if other.pipe is not None]
            worker.start(ends, self.news)
        assert worker.pipe is not None
        worker.job = job
        order = {"job": asdict(job), "out": str(self.folder / job.folder), "checkpoint_every": self.checkpoint_every}
        with suppress(OSError):  # that it is gone will be heard
            worker.pipe.send({**order, "cores": worker.cores, "gpu": worker.gpu})

    def stop(self) -> None:
        """Let the rounds that are under way end and be kept."""
        self.stopping = True
        for worker in self.workers:
            worker.interrupt()

    def close(self) -> None:
        """End all workers, at once where they are still at work."""
        for worker in self.workers:
            worker.end()


class _Worker:
    """One worker process."""

    def __init__(self, cores: list[int] | None, gpu: int | None = None) -> None:
        self.cores, self.gpu = cores, gpu
        self.job: PlannedRun | None = None
        self.process: Any = None
        self.pipe: Connection | None = None

    def start(self, ends: Sequence[Connection], news: queue.Queue[Any]) -> None:
        """Start the process; `ends` are this process's ends of other workers' pipes."""
        forked = self._can_be_forked()
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        here, there = context.Pipe()
        inherited = (*ends, here) if forked else ()
        self.process = context.Process(target=work.main, args=(there, inherited))
        # A Ctrl-C waits until the worker is ready for it: before, it would be lost in a fork, and end a new Python.
        if not forked:
            resource_tracker.ensure_running()  # or the start of the worker would start it, and that unblocks
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                # Forking beside other threads is safe here: a worker uses nothing that they could hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        there.close()
        self.pipe = here
        threading.Thread(target=self._listen, args=(here, news), daemon=True).start()

    def heard(self, said: dict[str, Any] | None) -> WorkerEvent | None:
        """What something it said, or its end (None), means for the job it is at."""
        job = self.job
        if said is None:
            self.end()
            said = {"told": "failed", "text": "its process ended (was it killed, or out of memory?)"}
        if said["told"] in ("finished", "failed", "stopped"):
            self.job = None
        if job is None:
            return None
        return WorkerEvent(job, said["told"], said.get("text", ""), said.get("round", 0), said.get("rounds", 0))

    def interrupt(self) -> None:
        if self.process is not None and self.job is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """By itself where it is idle, else at once."""
        if self.process is None or self.pipe is None:
            return
        process, pipe, self.process, self.pipe = self.process, self.pipe, None, None
        if self.job is not None:
            process.kill()
        with suppress(OSError):
            pipe.send(None)
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        pipe.close()
        self.job = None

    def _listen(self, pipe: Connection, news: queue.Queue[Any]) -> None:
        with suppress(EOFError, OSError, TypeError):  # closed, from either side
            while True:
                news.put((self, pipe.recv()))
        news.put((self, None))

    def _can_be_forked(self) -> bool:
        """A fork starts at once, but more threads than one, or a GPU, do not survive it."""
        import torch

        from fedquilt.engines.parallel import can_fork

        one = len(self.cores) == 1 if self.cores else torch.get_num_threads() == 1
        return one and can_fork() and not torch.cuda.is_available()


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
