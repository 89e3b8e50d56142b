"""Choosing an engine for a family: by name, or by timing a short trial of each that could be the fastest."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedquilt._util.shared_memory import common_zeros
from fedquilt.engines.captured import Captured
from fedquilt.engines.cuda_graph import captures
from fedquilt.engines.engine import Engine, TrainingJob, TrainingSpec
from fedquilt.engines.memory_budget import how_many_a_worker, size_of_a_client
from fedquilt.engines.parallel import Parallel, ParallelStacks, can_fork, cores
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.stackability import padding_matters
from fedquilt.engines.vectorised import Compiled, Vectorised

_KINDS: tuple[type[Engine], ...] = (Vectorised, Compiled, ParallelStacks, Parallel, Captured, Sequential)
ENGINES = {engine.name: engine for engine in _KINDS}
_MIXES = "it mixes the samples of a batch, by a norm or a mean of its own, and clients have unlike numbers of them"
_TRIAL_BATCHES = 4
_NOT_WORTH_A_TRIAL = 3.0  # seconds of a processor that a whole run would take by steps that are not recorded
_HERE = 0.35  # so much slower are stacks in the user's own process, where freed memory may not be kept
_WAKING = 0.005  # seconds a round that workers lose while threads of the last merge still spin on their cores
_FILLS_A_GPU = 2**28  # bytes that a client takes while it trains; stacks of bigger ones may be slower than one by one
_CAPTURED_IN_TRIALS = 4  # clients: the first trains plainly, the second warms up, the third is captured
_TRACED_IN_TRIALS = 300  # tensors that backward remembers; tracing bigger models, such as recurrent ones, takes long


def select_engine(name: str, recipe: TrainingSpec, rows: Tensor, extras: Mapping[str, Tensor], at_once: int) -> Engine:
    """The engine of a name; 'auto' tries the candidates on copies of some clients' rows and takes the fastest.

    `at_once` is how many clients a stack may have.

    A model that cannot be stacked is trained by another engine, and that is said once.
    """
    if name in ("parallel", "sequential", "captured"):
        if recipe.apart:
            _say(f"every client trains from a fresh copy of this model: {recipe.apart}")
        return ENGINES[name](recipe)
    if recipe.apart:
        return _unstacked(recipe, rows, recipe.apart)
    stack = how_many_a_worker(recipe, extras)
    names = _candidates(recipe, rows, extras, stack) if name == "auto" else [name]
    if names == ["parallel"]:
        return Parallel(recipe)
    some = min(len(rows), 2 * stack * cores())
    few = max(1, some - some % cores())  # as many for one core as for another
    if len(names) > 1 and recipe.device.type == "cpu" and _soon_done(recipe, rows, extras, few):
        names = ["vectorised"]
    short = _shortened(recipe, _TRIAL_BATCHES)
    if len(names) > 1 and size_of_a_client(recipe, extras).tensors < _TRACED_IN_TRIALS:
        short = replace(short, trace_after=1)  # stacks are compared as they will run
    seconds: dict[str, float] = {}
    for kind in names:
        most = {"vectorised": at_once, "captured": _CAPTURED_IN_TRIALS}.get(kind, few)
        job = _job_of(recipe, rows, extras, min(few, most))
        tried = Vectorised if kind == "compiled" else ENGINES[kind]  # what stacks is compiled when it trains in earnest
        engine = tried(short)  # one that does not suit the device says so
        try:
            seconds[kind] = _seconds(engine, job, repeats=0 if len(names) == 1 else 2)
        except Exception as error:
            if not ENGINES[kind].stacks:
                raise
            trouble = error
    if not any(ENGINES[kind].stacks for kind in seconds):
        return _unstacked(recipe, rows, _last_line(trouble))
    if why := _padding_trouble(recipe, rows, extras):
        return _unstacked(recipe, rows, why)
    for kind in seconds:
        seconds[kind] += _unseen(kind, recipe, seconds, len(rows))
    return ENGINES[min(seconds, key=lambda kind: seconds[kind])](recipe)


def select_again(kind: str, recipe: TrainingSpec, rows: Tensor, extras: Mapping[str, Tensor]) -> Engine:
    """The engine known to be good for such models, for clients that have changed since."""
    why = _padding_trouble(recipe, rows, extras) if ENGINES[kind].stacks else ""
    return _unstacked(recipe, rows, why) if why else ENGINES[kind](recipe)


def _padding_trouble(recipe: TrainingSpec, rows: Tensor, extras: Mapping[str, Tensor]) -> str:
    """Why a stack of these clients would learn from the padding of its batches; empty where it would not."""
    stack = Vectorised(recipe.exactly)
    try:
        sees = stack.pads and padding_matters(stack.recipe, stack.gradients, rows[0], extras)
    except Exception as error:  # a norm, say, that is given more or fewer samples than the batch has
        return _last_line(error)
    return _MIXES if sees else ""


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _say(what: str) -> None:
    warnings.warn(what, RuntimeWarning, stacklevel=4)


def _unstacked(recipe: TrainingSpec, rows: Tensor, why: str) -> Engine:
    """An engine that trains clients one by one, said once."""
    alone = "captured" if captures(recipe.device) and not recipe.apart else "sequential"
    other = "parallel" if _can_fork(recipe, rows) else alone
    _say(f"this model cannot be stacked, so it is trained with the engine '{other}': {why}")
    return ENGINES[other](recipe)


def _unseen(kind: str, recipe: TrainingSpec, seconds: Mapping[str, float], clients: int) -> float:
    """What a client takes in a round beyond what the trial shows, in seconds of a trial."""
    if kind == "vectorised" and "parallel-stacks" in seconds:
        return seconds[kind] * _HERE
    if issubclass(ENGINES[kind], Parallel):
        return _WAKING / clients * min(1.0, _TRIAL_BATCHES / _batches(recipe))
    return 0.0


def _candidates(recipe: TrainingSpec, rows: Tensor, extras: Mapping[str, Tensor], stack: int) -> list[str]:
    """Which engines may be the fastest, where a worker can stack so many clients. Clients too big to be stacked there
    train best one by one, each on a core, where there are as many clients as cores; with others it must be tried.
    """
    if captures(recipe.device):
        fills = size_of_a_client(recipe, extras).bytes > _FILLS_A_GPU
        return ["vectorised", "captured"] if fills else ["vectorised"]
    if not _can_fork(recipe, rows):
        return ["vectorised", "sequential"]
    if stack > 1:
        return ["vectorised", "parallel-stacks", "parallel"]
    return ["vectorised", "parallel"] if len(rows) < cores() else ["parallel"]


def _job_of(recipe: TrainingSpec, rows: Tensor, extras: Mapping[str, Tensor], few: int) -> TrainingJob:
    """A first round of the first few clients."""
    some = {name: value[:few] for name, value in extras.items()}
    return TrainingJob(rows[:few], tuple(range(few)), 1, recipe.training.lr, None, some)


def _can_fork(recipe: TrainingSpec, rows: Tensor) -> bool:
    return recipe.device.type == "cpu" and can_fork() and cores() > 1 and len(rows) > 1


def _soon_done(recipe: TrainingSpec, rows: Tensor, extras: Mapping[str, Tensor], few: int) -> bool:
    """Whether stacks train a whole run sooner than other engines could be tried, as far as single steps tell."""
    training = recipe.training
    try:
        step, job = Vectorised(_shortened(recipe, 1)), _job_of(recipe, rows, extras, few)
        a_step = _seconds(step, job, repeats=1, clock=time.process_time)  # whoever else is at work here is not counted
    except Exception:  # a model that cannot be stacked: that is said where the engines are tried
        return False
    return a_step * len(rows) * _batches(recipe) * training.rounds < _NOT_WORTH_A_TRIAL


def _batches(recipe: TrainingSpec) -> int:
    """How many steps the client with the most samples takes in a round."""
    return -(-max(recipe.samples.count) // recipe.training.batch) * recipe.training.epochs


def _shortened(recipe: TrainingSpec, batches: int) -> TrainingSpec:
    """The same work with few batches a client and one epoch."""
    most = recipe.training.batch * batches
    parts = tuple((x[:most], y[:most]) for x, y in recipe.samples.parts)
    samples = replace(recipe.samples, parts=parts, count=tuple(min(n, most) for n in recipe.samples.count))
    return replace(recipe, samples=samples, training=replace(recipe.training, epochs=1))


def _seconds(
    engine: Engine, job: TrainingJob, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:  # fmt: skip
    """The time a client takes in the best of some runs; one more comes first and only warms up."""
    rows = common_zeros(tuple(job.rows.shape)).to(job.rows.device)  # on a CPU where clients rest in a federation too
    best = math.inf
    try:
        for run in range(repeats + 1):
            rows.copy_(job.rows)
            start = clock()
            engine.train(replace(job, rows=rows))
            if captures(rows.device):
                torch.cuda.synchronize(rows.device)
            best = min(best, clock() - start) if run else best
        return best / len(job.members)
    finally:
        engine.close()
