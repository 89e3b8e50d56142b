"""One client after another: for models that cannot be stacked, and the oracle the other engines are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedquilt._util.randomness import key_of, seed_device, streams
from fedquilt.engines.engine import Constants, TrainingJob, TrainingSpec
from fedquilt.engines.objective import Batch, Learner, Model
from fedquilt.engines.optim import Optimiser, hold_back
from fedquilt.engines.sample_noise import NOISE, SampleNoise, streams_of, with_noise
from fedquilt.engines.schedule import Schedule, orders
from fedquilt.engines.trial import generator_state
from fedquilt.families.habits import seeded
from fedquilt.layers.draws import drawing
from fedquilt.layers.intercept import Interception
from fedquilt.layers.prepare import prepare_one


class Sequential:
    """A plain loop over clients, each trained by ordinary autograd."""

    name: ClassVar[str] = "sequential"
    stacks: ClassVar[bool] = False

    def __init__(self, recipe: TrainingSpec) -> None:
        self.recipe = recipe
        self.take_module()

    def take_module(self) -> None:
        """Copy the module, and arrange its parameters and buffers for clients to be copied in and out."""
        recipe, layout = self.recipe, self.recipe.layout
        self.module = prepare_one(recipe.module())
        # The parameters are views of one flat vector: a client is copied in and out as a row.
        self.flat = torch.zeros(layout.parameters, device=recipe.device)
        named = dict(self.module.named_parameters())
        for name in layout.parameter_names:
            place = layout.places[name]
            named[name].data = self.flat[place.start : place.stop].view(place.shape)
        self.named = {name: named[name] for name in layout.parameter_names}
        self.trained = recipe.trained
        # A model may write its buffers in place or put new tensors there: each has a slot where it is looked up. One
        # that is a frozen parameter has its slot among the parameters.
        self.slots: dict[str, tuple[dict[str, Tensor | None], str]] = {}
        for name in layout.buffer_names:
            path, _, leaf = name.rpartition(".")
            owner = self.module.get_submodule(path)
            home: Any = owner._buffers if leaf in owner._buffers else owner._parameters
            self.slots[name] = (home, leaf)
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.buffers = {name: tensors[name] for name in self.slots if name in tensors}
        self.constants = Constants(self.module, layout.places)
        # What a model draws by functions is intercepted; where a first step drew nothing, not until something is drawn.
        self.interception: Interception | None = Interception()
        self.sure = False  # that it must be, whatever a step may draw
        self.last: tuple[tuple[str, ...], Optimiser] | None = None  # the last optimiser, and what it trains

    def train(self, job: TrainingJob) -> Tensor:
        losses = torch.zeros(len(job.members), device=job.rows.device)
        for at in range(len(job.members)):
            if self.recipe.apart:
                self.take_module()
                with seeded(key_of(self.recipe.samples.key[job.members[at]], job.round)):
                    losses[at] = self.train_one(job, at)
            else:
                losses[at] = self.train_one(job, at)
        return losses

    def train_one(self, job: TrainingJob, at: int) -> Tensor:
        """Train the client at one place of a job, in place; its mean loss."""
        recipe, layout, samples = self.recipe, self.recipe.layout, self.recipe.samples
        member, row = job.members[at], job.rows[at]
        count, key, (x, y) = samples.count[member], samples.key[member], samples.parts[samples.part[member]]
        self.take_in(row)
        seed_device(recipe.device, key, job.round)  # for what cannot be hashed; all else that is drawn has a stream
        before_drawing = generator_state(recipe.device)
        schedule = schedule_of(count, recipe.training.batch, recipe.training.epochs)
        epochs = schedule.epoch[0].to(recipe.device)
        stream = streams(np.array([key], dtype=np.uint64), job.round, recipe.training.epochs)
        order = orders(torch.from_numpy(stream), None, count)
        draw = int(stream[0, 0])
        indices = schedule.indices(order, torch.zeros(1, dtype=torch.int64))[0].to(x.device)  # (S, B)
        begun = layout.split_parameters(self.flat.clone()) if recipe.objective.needs_start else {}
        extras = {name: value[at] for name, value in job.extras.items()}
        names, scales = self.trained, {}
        if job.scale is not None:  # what has the rate 0 rests, and only what has another rate than 1 must be scaled
            scales = self._scales(job.scale[at])
            names = tuple(name for name in names if name not in scales or bool(scales[name].any()))
        trained: list[Tensor] = [self.named[name] for name in names]
        optimiser = self._optimiser(names)
        total = torch.zeros((), device=recipe.device)
        for step in range(schedule.steps[0]):
            index = indices[step]
            if schedule.mask is not None:  # the last batch of an epoch may be short: it is cut, not padded
                index = index[: int(schedule.mask[0, step].sum())]
            which = index.to(recipe.device) if recipe.objective.needs_index else None
            batch = Batch(x[index].to(recipe.device), y[index].to(recipe.device), index=which, task=recipe.task)
            me = Learner(Model(self.module), self.named, begun, extras, epochs[step])
            gradients: Sequence[Tensor | None]
            if recipe.private is not None and trained:
                loss, gradients = self._private(recipe.private, me, batch, draw + step, step, names)
            else:
                with self.interception or nullcontext(), drawing(draw + step, recipe.device), recipe.precision():
                    loss = recipe.objective(me, batch)
                if not trained:
                    total += loss.detach()
                    continue
                gradients = self._gradients(loss, trained)
            if self.interception is not None and not self.interception.drew and not self.sure:
                self.interception = None
            before = {name: self.named[name].detach().flatten().clone() for name in scales if name in names}
            optimiser.step(gradients, job.lr)
            for name, value in before.items():
                hold_back(value, self.named[name].data.view(-1), scales[name])
            total += loss.detach()
        if self.interception is None and generator_state(recipe.device) != before_drawing:
            self.interception, self.sure = Interception(), True
            return self.train_one(job, at)
        self.give_back(row)
        return total / schedule.steps[0]

    def take_in(self, row: Tensor) -> None:
        """Write a client's row into the module."""
        layout = self.recipe.layout
        self.flat.copy_(row[: layout.parameters])
        for name, buffer in self.buffers.items():
            place, (home, leaf) = layout.places[name], self.slots[name]
            home[leaf] = buffer.copy_(row[place.start : place.stop].view(place.shape))

    def give_back(self, row: Tensor) -> None:
        """Write the module into a client's row."""
        layout = self.recipe.layout
        self.constants.check()
        row[: layout.parameters] = self.flat
        for name, (home, leaf) in self.slots.items():
            place, now = layout.places[name], home[leaf]
            assert now is not None
            row[place.start : place.stop] = now.detach().reshape(-1)

    def _private(
        self, private: SampleNoise, me: Learner, batch: Batch, draw: int, step: int, names: tuple[str, ...]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The mean loss of a batch, and its gradient with noise: of one sample after another."""
        trained: list[Tensor] = [self.named[name] for name in names]
        losses, found = [], []
        for place, stream in enumerate(streams_of(draw, len(batch.y))):
            at = slice(place, place + 1)
            one = Batch(batch.x[at], batch.y[at], index=None if batch.index is None else batch.index[at])
            with self.interception or nullcontext(), drawing(stream, self.recipe.device), self.recipe.precision():
                loss = self.recipe.objective(me, one)
            losses.append(loss.detach())
            of_one = zip(self._gradients(loss, trained), trained, strict=True)
            found.append([torch.zeros_like(p) if g is None else g.detach() for g, p in of_one])
        sums = private.clipped([torch.stack(each) for each in zip(*found, strict=True)], None)
        noise = private.drawn(me.given[NOISE], step, self.recipe.layout)
        count = torch.full((1,), float(len(batch.y)), device=self.recipe.device)
        done = with_noise({name: each[None] for name, each in zip(names, sums, strict=True)}, noise, count)
        return torch.stack(losses).mean(), [done[name][0] for name in names]

    def _gradients(self, loss: Tensor, trained: list[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of a loss; what a model runs again for them must not draw, as it would draw other numbers."""
        if self.interception is None:
            return torch.autograd.grad(loss, trained, allow_unused=True)
        with self.interception, torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(loss, trained, allow_unused=True)

    def _scales(self, scale: Tensor) -> dict[str, Tensor]:
        """The multipliers of the learning rate, (1,) or (size,), of parameters where these are not all 1."""
        layout = self.recipe.layout
        if len(scale) == 1:
            return {} if float(scale) == 1 else dict.fromkeys(self.trained, scale)
        places = {name: layout.places[name] for name in self.trained}
        parts = {name: scale[place.start : place.stop] for name, place in places.items()}
        return {name: part for name, part in parts.items() if bool((part != 1).any())}

    def _optimiser(self, names: tuple[str, ...]) -> Optimiser:
        """A fresh optimiser of some parameters."""
        if self.last is None or self.last[0] != names:
            self.last = (names, Optimiser(self.recipe.training, [self.named[name].data for name in names]))
        self.last[1].reset()
        return self.last[1]

    def close(self) -> None:
        """Nothing is held."""


@lru_cache(maxsize=4096)
def schedule_of(count: int, batch: int, epochs: int) -> Schedule:
    """A client's schedule; clients of one size have the same one."""
    return Schedule.of([count], batch, epochs)
