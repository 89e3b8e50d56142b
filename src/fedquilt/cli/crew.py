"""Worker processes for the runs of a comparison, and what they tell."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from fedquilt.cli.jobs import Job

MOST_JOBS = 8  # by default: every one has the data and the machinery in memory


@dataclass(frozen=True)
class News:
    """What a worker told about the job it is at: started, round, warning, finished, failed, stopped."""

    job: Job
    told: str
    text: str = ""
    round: int = 0
    rounds: int = 0


def how_many(jobs: int | None, runs: int, device: str, engine: str) -> int:
    """How many runs go on at once: one a core, or what was asked for; a GPU or a parallel engine is busy with one.

    >>> how_many(None, runs=1, device="cpu", engine="auto"), how_many(3, runs=9, device="cuda", engine="auto")
    (1, 3)
    """
    if jobs is None:
        jobs = 1 if device == "cuda" or engine == "parallel" else min(len(_cores()), MOST_JOBS)
    return max(1, min(jobs, runs))


class Crew:
    """Workers that share the cores of this machine among them."""

    def __init__(self, size: int, folder: Path, checkpoint_every: int) -> None:
        self.folder, self.checkpoint_every = folder, checkpoint_every
        cores = _cores()
        each = [cores[at::size] or None for at in range(size)] if size > 1 else [None]
        self.workers = [_Worker(mine) for mine in each]
        self.news: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
        self.stopping = False

    def work(self, jobs: Sequence[Job]) -> Iterator[News | None]:
        """Do the jobs in their order, and tell what happens as it happens, or now and then that nothing did (None).

        After `stop` no further one is begun.
        """
        waiting = list(reversed(jobs))
        while (waiting and not self.stopping) or any(worker.job is not None for worker in self.workers):
            for worker in self.workers:
                if worker.job is None and waiting and not self.stopping:
                    job = waiting.pop()
                    worker.begin(job, self.folder, self.checkpoint_every, self.news)
                    yield News(job, "started")
            try:
                worker, said = self.news.get(timeout=0.5)
            except queue.Empty:
                yield None
                continue
            news = worker.heard(said)
            if news is not None:
                yield news

    def stop(self) -> None:
        """Let the rounds that are under way end and be kept."""
        self.stopping = True
        for worker in self.workers:
            worker.signal(signal.SIGINT)

    def close(self) -> None:
        """End all workers, at once where they are still at work."""
        for worker in self.workers:
            worker.end()


class _Worker:
    """One worker process, started when it is first needed."""

    def __init__(self, cores: list[int] | None) -> None:
        self.cores = cores
        self.job: Job | None = None
        self.process: subprocess.Popen[str] | None = None

    def begin(self, job: Job, folder: Path, checkpoint_every: int, news: queue.Queue[Any]) -> None:
        """Hand it a job."""
        if self.process is None:
            # In a session of its own: a Ctrl-C in the terminal is this process's to handle, which tells its workers.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedquilt.cli.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, encoding="utf-8", start_new_session=True, env=self._environment(),
            )  # fmt: skip
            assert self.process.stdout is not None
            threading.Thread(target=self._listen, args=(self.process.stdout, news), daemon=True).start()
        assert self.process.stdin is not None
        self.job = job
        order = {
            "job": asdict(job), "out": str(folder / job.folder), "checkpoint_every": checkpoint_every,
            "cores": self.cores,
        }  # fmt: skip
        with suppress(BrokenPipeError):  # that it is gone will be heard
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def heard(self, said: dict[str, Any] | None) -> News | None:
        """What something it said, or its end (None), means for the job it is at."""
        job = self.job
        if said is None:
            self.end()
            said = {"told": "failed", "text": "its process ended (was it killed, or out of memory?)"}
        if said["told"] in ("finished", "failed", "stopped"):
            self.job = None
        if job is None:
            return None
        return News(job, said["told"], said.get("text", ""), said.get("round", 0), said.get("rounds", 0))

    def signal(self, number: int) -> None:
        if self.process is not None and self.job is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def end(self) -> None:
        """By itself where it is idle, else at once."""
        if self.process is None:
            return
        process, self.process = self.process, None
        assert process.stdin is not None
        with suppress(OSError):
            if self.job is None:
                process.stdin.write("null\n")
            process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.job = None

    def _listen(self, answers: IO[str], news: queue.Queue[Any]) -> None:
        for line in answers:
            news.put((self, json.loads(line)))
        news.put((self, None))

    def _environment(self) -> dict[str, str]:
        threads = {} if self.cores is None else {"OMP_NUM_THREADS": str(len(self.cores))}
        return {**os.environ, **threads}


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
