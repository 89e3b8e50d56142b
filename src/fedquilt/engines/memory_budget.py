"""How much memory clients take while they train, and so how many of them are stacked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedquilt.engines.engine import TrainingSpec
from fedquilt.engines.objective import task_loss
from fedquilt.engines.trial import run_once
from fedquilt.families.habits import seeded

_PASSES_WITHIN = 4  # of an objective with gradients of its own: as many as Per-FedAvg's
_WORKER_BYTES = 3 * 2**24  # of the stack of a worker, which has one core: bigger ones are hardly faster


def memory_budget(device: torch.device) -> int:
    """How many bytes clients stacked in training may take: two fifths of a GPU; on a CPU 128 MiB, or less if that is
    a seventh of its memory: there bigger stacks are not faster.

    It follows from the size of the machine alone, never from what happens to be free.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 5 * 2
    try:
        return min(2**27, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 7)
    except (ValueError, OSError, AttributeError):
        return 2**27


class Size(NamedTuple):
    """What a client takes while it trains: bytes of memory, and how many tensors backward remembers."""

    bytes: int
    tensors: int


def size_of_a_client(recipe: TrainingSpec, extras: Mapping[str, Tensor]) -> Size:
    """About how big a client with the biggest batches is while it trains: its row several times, and what backward
    remembers.
    """
    saved: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    passes = 1
    try:
        with seeded(0), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            run_once(recipe, extras)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        # An objective that differentiates by itself cannot be watched: it keeps what a few passes keep.
        passes = _PASSES_WITHIN
        saved.clear()
        with seeded(0), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            run_once(replace(recipe, objective=task_loss()), extras)
    samples = 0 if recipe.private is None else 2 * min(recipe.training.batch, max(recipe.samples.count))
    rows = 6 * passes + samples  # a gradient for each sample, and clipped
    return Size(4 * recipe.layout.width * rows + 3 * sum(saved) * passes, len(saved) * passes)


def how_many_at_once(recipe: TrainingSpec, extras: Mapping[str, Tensor]) -> int:
    """How many clients are stacked at once: as many as fit into the machine's budget for them."""
    return max(1, memory_budget(recipe.device) // max(1, size_of_a_client(recipe, extras).bytes))


def how_many_a_worker(recipe: TrainingSpec, extras: Mapping[str, Tensor]) -> int:
    """How many clients a worker process stacks at most."""
    return max(1, _WORKER_BYTES // max(1, size_of_a_client(recipe, extras).bytes))
