"""How many threads PyTorch has in a run: as many as it would take, unless they stand in each other's way.

A tensor operation that is spread over threads ends when the last of them does. Where other programs keep cores busy
that is a thread which waits for a core, and small operations, of which a federation has thousands, become a hundred
times slower. So before a run a few are timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedquilt._util.plain_values import whole
from fedquilt.engines.parallel import cores

_SAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_TIMES, _SPAN, _PAUSE = 5, 0.02, 0.01  # seconds: a busy machine may have two cores free for once, and for so long
_SLOWER = 2.0  # than one thread: beside busy programs it is 15 to 400 times, on a quiet machine about 1
_FRESH = 60.0  # seconds that what was found holds, for one short run after another

_found: dict[int, tuple[float, int]] = {}  # by how many there could be: when, and how many it was
_forked: list[bool] = []  # more than one thread would hang here, if OpenMP had started some before the fork
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(True))


def choose_threads(wanted: int | None, device: torch.device) -> int:
    """How many threads a run shall have: those that are `wanted`, that the user has said, or on a CPU a good number.

    What `OMP_NUM_THREADS` says holds, and so does `torch.set_num_threads` with fewer than half of the cores. Otherwise
    it is as many as are set, half of them, and so on down to one: the first that is not slower than one by far.

    >>> choose_threads(3, torch.device("cpu"))
    3
    """
    if wanted is not None:
        wanted = whole(wanted, "threads")
        if wanted < 1:
            raise ValueError(f"threads={wanted}: give at least 1, or leave it out")
        return wanted
    most = torch.get_num_threads()
    if (
        device.type != "cpu"
        or most == 1
        or _forked
        or 2 * most < cores()
        or any(os.environ.get(name) for name in _SAID)
    ):
        return most
    when, number = _found.get(most, (-_FRESH, 0))
    if time.monotonic() - when > _FRESH:
        number = _good_number(most)
        _found[most] = time.monotonic(), number
    return number


@contextmanager
def threads_of_a_run(number: int) -> Iterator[None]:
    """So many threads while this holds: sums may depend on it in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_begun(number: int | None) -> int:
    """As many threads as a run began with, where there are so many cores."""
    now = torch.get_num_threads()
    return min(number or now, max(cores(), now))


def _good_number(most: int) -> int:
    """The first of most, its half and so on that is not much slower than one."""
    with threads_of_a_run(1):
        alone = _seconds(1)
        number = most
        while number > 1 and any(_slow(number, alone) for _ in range(_TIMES)):
            number //= 2
    return number


def _slow(threads: int, alone: float) -> bool:
    """Whether so many threads are much slower than one now, a moment after they were last looked at."""
    time.sleep(_PAUSE)
    return _seconds(threads) > _SLOWER * alone


def _seconds(threads: int) -> float:
    """What small operations of a stack of clients take with so many threads."""
    torch.set_num_threads(threads)
    samples, weights, rows = torch.ones(16, 32, 64), torch.ones(16, 64, 64), torch.ones(2**18)
    torch.bmm(samples, weights)  # the first starts the threads
    start, times = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < _SPAN:
        torch.bmm(samples, weights)
        torch.add(rows, rows)
        times += 1
    return passed / times
