"""`--ranks N`: the same command in several processes that train as one, here or as torchrun and Slurm start them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from fedquilt.cli.output import Refused, err, note, out

Ranks = Annotated[
    int | None,
    typer.Option("--ranks", metavar="N", help="Train in N processes, one a core or GPU; torchrun and Slurm work too."),
]
_PATIENCE = 10.0  # seconds that other ranks get to end by themselves


def needs_launch(ranks: int | None) -> bool:
    """Whether the ranks asked for have to be started; refuses a number that makes no sense."""
    from fedquilt.core.ranks import from_environment

    told = from_environment()
    if ranks is not None and ranks < 1:
        raise Refused(f"--ranks {ranks}: give at least 1")
    if ranks is not None and told is not None and told[1] != ranks:
        raise Refused(f"--ranks {ranks}, but this process was started as one of {told[1]}; leave --ranks out")
    return ranks is not None and told is None


@dataclass(frozen=True)
class Here:
    """This process among the ranks of a command: the first of them speaks and writes."""

    first: bool = True

    def same(self, folder: Path) -> Path:
        """A folder as the first has it: its name may hold the time."""
        from fedquilt.core.ranks import as_first

        return Path(as_first(str(folder)))


@contextmanager
def ranks_joined() -> Iterator[Here]:
    """While this holds, runs are shared with the other ranks that this process was started with."""
    from fedquilt.core.ranks import among, join

    ranks = join()
    if ranks is None:
        yield Here()
        return
    import torch

    torch.set_num_threads(1)  # one core a rank, and the same bits however many there are
    out.quiet = err.quiet = ranks.rank > 0
    try:
        with among(ranks):
            yield Here(ranks.rank == 0)
    except BaseException:
        err.quiet = False  # what went wrong is said by whomever it went wrong for
        raise
    finally:
        ranks.close()


def launch(ranks: int, words: Sequence[str]) -> int:
    """Run a command in so many processes of this machine; its exit code. One that is gone ends them all."""
    command = [sys.executable, "-m", "fedquilt", *_without(words)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told: list[IO[bytes]] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            environment = {**os.environ, **_environment(rank, ranks, port)}
            more: dict[str, Any] = {}
            if rank:
                told.append(tempfile.TemporaryFile())  # noqa: SIM115  # closed below
                more = {"stdout": subprocess.DEVNULL, "stderr": told[-1], "stdin": subprocess.DEVNULL}
            processes.append(subprocess.Popen(command, env=environment, **more))
        return _watch(processes, told)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in told:
            file.close()


def _watch(processes: Sequence[subprocess.Popen[bytes]], told: Sequence[IO[bytes]]) -> int:
    """Wait for all; say who ended first where that was not in order."""
    first: int | None = None
    until = 0.0
    while any(process.poll() is None for process in processes):
        with suppress(KeyboardInterrupt):  # the ranks get it too: they end the round and keep it
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed and first is None:
            first = next((rank for rank in failed if (processes[rank].returncode or 0) < 0), failed[0])
            until = time.monotonic() + _PATIENCE
        if first is not None and time.monotonic() > until:
            for process in processes:
                process.kill()
    codes = [process.returncode for process in processes]
    if first is None or codes[0] == 130:
        return codes[0]
    killed = next((rank for rank, code in enumerate(codes) if code < 0 and rank == first), None)
    if killed is not None:
        name = signal.Signals(-codes[killed]).name
        note(
            f"rank {killed} of {len(codes)} was ended by {name} (was it killed, or out of memory?), and so the run; "
            "its last checkpoint is kept: go on with fedquilt resume and the run's directory"
        )
    elif first:
        file = told[first - 1]
        file.seek(0)
        said = file.read().decode("utf-8", "replace").strip().splitlines()
        note(f"rank {first} ended: {said[-1] if said else 'it did not say why'}")
    return max(1, codes[0])


def _without(words: Sequence[str]) -> list[str]:
    """A command's words less --ranks.

    >>> _without(["run", "digits", "--ranks", "2", "fedavg", "--ranks=4"])
    ['run', 'digits', 'fedavg']
    """
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith("--ranks="):
            skip = False
        elif word == "--ranks":
            skip = True
        else:
            kept.append(word)
    return kept


def _environment(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """The variables that torchrun gives its processes, for one of this machine's."""
    whole = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{key: str(number) for key, number in whole.items()}}
