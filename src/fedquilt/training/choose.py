"""Choosing an engine for a family: by name, or by timing a short trial of each that could be the fastest."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedquilt.names import unknown
from fedquilt.training.engine import Engine, Job, Recipe, memory_budget
from fedquilt.training.layers import prepare_one
from fedquilt.training.objective import Batch, Context
from fedquilt.training.parallel import Parallel, can_fork, cores
from fedquilt.training.sequential import Sequential
from fedquilt.training.vectorised import Vectorised

ENGINES: dict[str, type[Engine]] = {e.name: e for e in (Vectorised, Parallel, Sequential)}
_TRIAL_BATCHES = 2
_TRIAL_BYTES = 2**26  # clients of big models are tried a few at a time: a trial shall not be what takes most memory


def choose(name: str, recipe: Recipe, rows: Tensor, extras: Mapping[str, Tensor], at_once: int) -> Engine:
    """The engine of a name; 'auto' tries the candidates on copies of some clients' rows and takes the fastest.

    `at_once` is how many clients a stack may have.

    A model that cannot be stacked is trained by another engine, and that is said once.
    """
    if name not in (*ENGINES, "auto"):
        raise ValueError(unknown(name, ("auto", *ENGINES), "engine"))
    if name in ("parallel", "sequential"):
        return ENGINES[name](recipe)
    short = _shortened(recipe)
    few = min(len(rows), max(2 * cores(), _TRIAL_BYTES // bytes_a_client(recipe, extras)))
    try:
        job = _job_of(recipe, rows, extras, min(few, at_once))
        stacked = _seconds(Vectorised(short), job, repeats=1 if name == "vectorised" else 2)
    except Exception as error:
        others = "parallel" if _can_fork(recipe, rows) else "sequential"
        warnings.warn(
            f"this model cannot be stacked, so it is trained with the engine '{others}': {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return ENGINES[others](recipe)
    if name == "vectorised" or recipe.device.type == "cuda":
        return Vectorised(recipe)
    other = Parallel if _can_fork(recipe, rows) else Sequential
    single = _seconds(other(short), _job_of(recipe, rows, extras, few), repeats=2)
    return Vectorised(recipe) if stacked <= single else other(recipe)


def _job_of(recipe: Recipe, rows: Tensor, extras: Mapping[str, Tensor], few: int) -> Job:
    """A first round of the first few clients."""
    some = {name: value[:few] for name, value in extras.items()}
    return Job(rows[:few], tuple(range(few)), 1, recipe.training.lr, None, some)


def _can_fork(recipe: Recipe, rows: Tensor) -> bool:
    return recipe.device.type == "cpu" and can_fork() and cores() > 1 and len(rows) > 1


def _shortened(recipe: Recipe) -> Recipe:
    """The same work with few batches a client and one epoch."""
    most = recipe.training.batch * _TRIAL_BATCHES
    samples = replace(recipe.samples, count=tuple(min(n, most) for n in recipe.samples.count))
    return replace(recipe, samples=samples, training=replace(recipe.training, epochs=1))


def _seconds(engine: Engine, job: Job, repeats: int) -> float:
    """The time a client takes in a trial, the first run of which only warms up."""
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            engine.train(replace(job, rows=job.rows.clone()))
        return (time.perf_counter() - start) / len(job.members)
    finally:
        engine.close()


def bytes_a_client(recipe: Recipe, extras: Mapping[str, Tensor]) -> int:
    """About how much memory one client takes while it trains: its row several times, and what backward remembers."""
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    module, samples = prepare_one(recipe.module()), recipe.samples
    index = torch.arange(samples.start[0], samples.start[0] + min(recipe.training.batch, samples.count[0]))
    batch = Batch(samples.x[index].to(recipe.device), samples.y[index].to(recipe.device))
    named = dict(module.named_parameters())
    anchor = {n: p.detach() for n, p in named.items()} if recipe.objective.needs_anchor else {}
    context = Context(named, anchor, {n: v[0] for n, v in extras.items()}, torch.zeros((), dtype=torch.int64))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        recipe.objective(module, batch, context)
    return 4 * recipe.layout.width * 6 + 3 * saved


def how_many_at_once(recipe: Recipe, extras: Mapping[str, Tensor]) -> int:
    """How many clients are stacked at once: as many as fit into the machine's budget for them."""
    return max(1, memory_budget(recipe.device) // max(1, bytes_a_client(recipe, extras)))
