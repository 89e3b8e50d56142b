"""Worker processes: they end with their parent however it ends, and an interrupted job leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_help import Builder, Task, federation, mlp, points, rows_after, rows_of, same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines.parallel import Parallel, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system cannot fork")
HELP = Path(__file__).parent


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has collected yet counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def engine_of(federated: fq.Federation, family_state: int = 0) -> Parallel:
    engine: Any = next(iter(federated.simulation.family_states[family_state].engines.values()))
    assert isinstance(engine, Parallel)
    return engine


def test_closing_ends_workers_soon_with_several_families() -> None:
    """A later family's workers hold copies of an earlier one's pipes: these must be told to end, not only cut off."""
    federated = federation(points([lambda: Task(4, 6), lambda: Task(4, 9)] * 2, sizes=(5, 5, 5, 5)), engine="parallel")
    federated.step(evaluate=False)
    pids = [process.pid for family_state in (0, 1) for process in engine_of(federated, family_state).processes]
    assert len(pids) >= 2
    assert all(alive(pid) for pid in pids)
    start = time.monotonic()
    federated.close()
    assert time.monotonic() - start < 1.5
    assert not any(alive(pid) for pid in pids)


def test_a_closed_engine_starts_again() -> None:
    federated = federation(points(), engine="parallel")
    federated.step(evaluate=False)
    engine_of(federated).close()
    federated.step(evaluate=False)
    same(rows_of(federated), rows_after(points()))
    federated.close()
    federated.close()


class Breaks(nn.Module):
    """Fails in training for a client whose first feature is large."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool((x[:, 0] > 50).any()):
            raise RuntimeError("this sample cannot be learnt from")
        out: Tensor = self.head(x)
        return out


def broken(model: Builder) -> fq.Scenario:
    base = points(model)
    x = base.clients[1].train.x.clone()
    x[:, 0] = 99.0
    odd = fq.Client("odd", model, (x, base.clients[1].train.y))
    return fq.Scenario("s", [base.clients[0], odd, base.clients[2]], base.training, label_names=base.label_names)


def test_a_failing_client_is_told_and_leaves_no_workers() -> None:
    federated = federation(broken(Breaks), engine="parallel")
    told = (
        "one of the clients 'client-0', 'odd', 'client-2': its model fails in training, in round 1: "
        "RuntimeError: this sample cannot be learnt from"
    )
    with pytest.raises(ValueError, match=f"^{told}$"):
        federated.step()
    assert engine_of(federated).processes == []


def test_a_killed_worker_is_noticed() -> None:
    federated = federation(points(), engine="parallel")
    federated.step(evaluate=False)
    os.kill(engine_of(federated).processes[0].pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"a worker process ended by itself|Broken pipe"):
        federated.step(evaluate=False)
    assert engine_of(federated).processes == []
    federated.close()


def test_an_interrupted_job_does_not_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = points()
    federated = federation(scenario, engine="parallel")
    federated.step(evaluate=False)
    before = rows_of(federated)
    engine, answer = engine_of(federated), "fedquilt.engines.parallel._answer"

    def interrupted(pipe: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(answer, interrupted)
    with pytest.raises(KeyboardInterrupt):
        federated.step(evaluate=False)
    assert engine.processes == []
    monkeypatch.undo()
    for name, row in before.items():  # as they were before the round
        index, at = federated.simulation.home[[c.name for c in scenario.clients].index(name)]
        federated.simulation.family_states[index].store.all()[at] = row
    federated.step(evaluate=False)
    same(rows_of(federated), rows_after(scenario))
    federated.close()


def test_forking_beside_another_thread() -> None:
    """A progress bar redraws itself from a thread; new Pythons warn of forking then."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        rows_after(points(), engine="parallel")
    finally:
        stop.set()
        thread.join()


def test_many_extras_travel_without_files() -> None:
    """Rows, rates and extras lie in anonymous memory: nothing is left under the shared memory file system."""
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.is_dir() else set()
    federated = federation(points(mlp), engine="parallel")
    for _ in range(2):
        federated.step(evaluate=False)
    mine = {path for path in (set(shm.iterdir()) if shm.is_dir() else set()) - before if path.name.startswith("torch")}
    federated.close()
    assert not mine


@pytest.mark.parametrize("most", [1, 2, 5])
def test_stacks_of_any_size_train_as_one_by_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks are of clients of about one size, so they are not neighbours in memory."""
    monkeypatch.setattr("fedquilt.engines.parallel.how_many_a_worker", lambda recipe, extras: most)
    scenario = points(sizes=(5, 9, 5, 14, 6, 9, 4), training={"rounds": 3, "momentum": 0.9})
    same(rows_after(scenario, engine="parallel-stacks", rounds=3), rows_after(scenario, rounds=3))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_workers_have_equal_shares(clients: int, most: int, workers: int) -> None:
    engine = object.__new__(Parallel)
    engine.most, engine.workers = most, workers
    shares = engine._shares(list(range(clients)))
    assert [place for share in shares for place in share] == list(range(clients))
    assert max(map(len, shares)) <= most
    turns = -(-len(shares) // workers)  # how often a worker comes back
    assert turns == -(-clients // (most * workers))


def test_many_small_stacks_in_one_round_are_the_same_bits_twice() -> None:
    scenario = points(sizes=(6,) * 12, training={"rounds": 4})
    once, twice = (rows_after(scenario, engine="parallel-stacks", rounds=4) for _ in range(2))
    assert all(torch.equal(row, twice[name]) for name, row in once.items())


# --- a whole program -------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from core_help import Task, federation, points
from torch import nn

program = os.getpid()

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        if sys.argv[2] == "busy" and os.getpid() != program:
            time.sleep(30)
        return self.head(x)

federated = federation(points([Slow, lambda: Task(4, 6)] * 2, sizes=(5, 5, 5, 5)), engine="parallel")
if sys.argv[2] == "busy":
    import threading
    def tell():
        while True:
            engine = next(iter(federated.simulation.family_states[0].engines.values()), None)
            if engine is not None and len(engine.processes) == engine.workers:
                print(*[p.pid for p in engine.processes], flush=True)
                return
            time.sleep(0.05)
    threading.Thread(target=tell, daemon=True).start()
federated.step(evaluate=False)
engines = [engine for family_state in federated.simulation.family_states for engine in family_state.engines.values()]
print(*[p.pid for engine in engines for p in engine.processes], flush=True)
if sys.argv[2] == "leave":
    sys.exit(0)
if sys.argv[2] == "raise":
    raise RuntimeError("the program fails")
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_no_worker_outlives_its_program(tmp_path: Path) -> None:
    """Killed while idle, interrupted while busy, failing, ending: started together, since starting takes longest."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with contextlib.ExitStack() as stack:
        programs = {}
        for how in ("idle", "busy", "raise", "leave"):
            log = stack.enter_context((tmp_path / how).open("w"))
            command = [sys.executable, str(script), str(HELP), how]
            started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
            programs[how] = stack.enter_context(started)
            stack.callback(started.kill)
        for how, program in programs.items():
            assert program.stdout is not None
            pids = [int(pid) for pid in program.stdout.readline().split()]
            assert pids, (tmp_path / how).read_text()
            if how == "idle":
                program.kill()
            elif how == "busy":
                os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to everyone in the foreground
            program.wait(timeout=20)
            assert until(lambda pids=pids: not any(alive(pid) for pid in pids)), how  # type: ignore[misc]
    for how in programs:
        said = (tmp_path / how).read_text()
        assert said.count("Traceback") == (1 if how in ("busy", "raise") else 0), said  # none from the workers
