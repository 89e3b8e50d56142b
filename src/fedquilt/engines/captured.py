"""One client after another on a GPU, each step a captured graph: for models of which one client fills the device.

Stacking such clients gains nothing, since the device is busy with one of them, and loses PyTorch's own convolutions and
norms. What a plain loop loses there is the time in which the device waits for Python, and that a graph takes away.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedquilt._util.randomness import streams
from fedquilt._util.shared_memory import write_to
from fedquilt.engines.cuda_graph import Graph
from fedquilt.engines.engine import TrainingJob, TrainingSpec
from fedquilt.engines.objective import Batch, Learner, Model
from fedquilt.engines.schedule import orders
from fedquilt.engines.sequential import Sequential, schedule_of
from fedquilt.engines.stackability import python_state
from fedquilt.engines.trial import manners_of
from fedquilt.layers.draws import drawing


class Captured(Sequential):
    """`Sequential` whose steps are graphs, one for each size of a batch, once that has come twice.

    The first client trains as in `Sequential`. What cannot be captured trains so for good: models that draw by
    functions or that put new tensors in the place of buffers, learning rates of a client's own, noise on samples.
    """

    name: ClassVar[str] = "captured"

    def __init__(self, recipe: TrainingSpec) -> None:
        super().__init__(recipe)
        self.known = False  # whether it is known how the model behaves
        self.plain = False  # whether it cannot be captured
        self.channels_last = False
        self.graphs: dict[int, Graph] = {}  # by the size of the batch
        self.seen: dict[int, int] = {}
        self.pool: Any = None
        training, device = recipe.training, recipe.device
        batch = min(training.batch, max(recipe.samples.count))
        most = -(-max(recipe.samples.count) // batch) * training.epochs
        # what steps read: graphs know it by its place in memory
        self.indices = torch.zeros(most, batch, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(most, dtype=torch.int64, device=device)
        self.step, self.stream, self.start = torch.zeros(3, dtype=torch.int64, device=device).unbind()
        self.lr, self.total = torch.zeros(2, device=device).unbind()
        self.begun = torch.zeros_like(self.flat) if recipe.objective.needs_start else None
        self.extras: dict[str, Tensor] = {}

    def train_one(self, job: TrainingJob, at: int) -> Tensor:
        extras = {name: value[at] for name, value in job.extras.items()}
        if self.plain or job.scale is not None or not self.known:
            loss = super().train_one(job, at)
            if not self.known:
                self._learn(extras)
            return loss
        recipe, samples = self.recipe, self.recipe.samples
        member, count = job.members[at], samples.count[job.members[at]]
        self.take_in(job.rows[at])
        self._optimiser(self.trained)
        schedule = schedule_of(count, recipe.training.batch, recipe.training.epochs)
        stream = streams(np.array([samples.key[member]], dtype=np.uint64), job.round, recipe.training.epochs)
        order = orders(torch.from_numpy(stream), None, count)
        indices = schedule.indices(order, torch.zeros(1, dtype=torch.int64))[0].numpy()
        steps, width = indices.shape
        write_to(self.indices[:steps, :width], indices)
        write_to(self.epochs[:steps], schedule.epoch[0].numpy())
        _, _, starts = samples.table(np.array([member]), recipe.device)
        self.stream.fill_(int(stream[0, 0]))
        self.start.fill_(int(starts[0]))
        self.step.zero_()
        self.total.zero_()
        self.lr.fill_(job.lr)
        if self.begun is not None:
            self.begun.copy_(self.flat)
        self._put(extras)
        for step in range(steps):
            self._do(width if schedule.mask is None else int(schedule.mask[0, step].sum()))
        self.give_back(job.rows[at])
        mean: Tensor = self.total / steps
        return mean

    def _learn(self, extras: Mapping[str, Tensor]) -> None:
        """Find out, once a client has trained, whether others can train by graphs."""
        recipe = self.recipe
        self.known = True
        manners = manners_of(recipe, {name: value[None] for name, value in extras.items()}, pads=False)
        replaced = any(home[leaf] is not self.buffers.get(name) for name, (home, leaf) in self.slots.items())
        elsewhere = recipe.samples.x.device.type != recipe.device.type  # samples that do not fit on the device
        self.plain = bool(
            recipe.apart or recipe.private or manners.draws or manners.trouble or replaced or elsewhere
            or self.interception is not None or not self.trained
        )  # fmt: skip
        # PyTorch's pool by the mean gives wrong gradients for padded images whose channels lie last (seen in 2.11)
        self.channels_last = recipe.samples.x.ndim == 4 and not manners.averages

    def _put(self, extras: Mapping[str, Tensor]) -> None:
        """Lay what a step is given for a client where the graphs read it; other shapes make other graphs."""
        shapes = {name: (value.shape, value.dtype) for name, value in extras.items()}
        if shapes != {name: (value.shape, value.dtype) for name, value in self.extras.items()}:
            self.extras = {name: torch.empty_like(value, device=self.recipe.device) for name, value in extras.items()}
            self.graphs.clear()
        for name, value in extras.items():
            self.extras[name].copy_(value)

    def _do(self, size: int) -> None:
        """The next step, with a batch of a size."""
        self.seen[size] = self.seen.get(size, 0) + 1
        if size not in self.graphs and not self.plain and self.seen[size] > 1:  # the first warms up every library
            self._capture(size)
        if size in self.graphs:
            self.graphs[size].replay()
        else:
            self._one_step(size)

    def _capture(self, size: int) -> None:
        before = python_state(self.module)
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        try:
            graph = Graph(lambda: self._one_step(size), self.recipe.device, self.pool)
        except RuntimeError as error:
            warnings.warn(f"a step cannot be captured as a CUDA graph: {error}", RuntimeWarning, stacklevel=2)
            self.plain = True
            return
        if python_state(self.module) != before:  # it decides something in Python, which a graph would do once for all
            self.plain = True
            return
        self.graphs[size] = graph

    def _one_step(self, size: int) -> None:
        recipe = self.recipe
        at = self.step.view(1)
        index = self.indices.index_select(0, at)[0, :size]
        x, y = recipe.samples.x[index + self.start], recipe.samples.y[index + self.start]
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        batch = Batch(x, y, index=index if recipe.objective.needs_index else None, task=recipe.task)
        begun = {} if self.begun is None else recipe.layout.split_parameters(self.begun)
        me = Learner(Model(self.module), self.named, begun, self.extras, self.epochs.index_select(0, at)[0])
        with drawing(self.stream + self.step), recipe.precision():
            loss = recipe.objective(me, batch)
        trained: list[Tensor] = [self.named[name] for name in self.trained]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        assert self.last is not None
        self.last[1].step(gradients, self.lr if self.lr.is_cuda else float(self.lr))
        self.total += loss.detach()
        self.step += 1

    def close(self) -> None:
        """Drop graphs and their memory."""
        self.graphs.clear()
        self.pool = None
