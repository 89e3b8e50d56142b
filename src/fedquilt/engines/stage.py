"""The memory and the program of a stack of clients: batches, steps, and graphs that replay them on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedquilt._util.randomness import streams
from fedquilt._util.shared_memory import write_to
from fedquilt.engines.cuda_graph import Graph, captures
from fedquilt.engines.engine import TrainingJob
from fedquilt.engines.objective import INDEX
from fedquilt.engines.optim import Optimiser, hold_back
from fedquilt.engines.recording import DECIDES, recorded
from fedquilt.engines.sample_noise import NOISE, with_noise
from fedquilt.engines.schedule import Schedule, orders
from fedquilt.engines.stackability import python_state
from fedquilt.engines.trial import DRAWS_UNSEEN, generator_state

if TYPE_CHECKING:
    from fedquilt.engines.vectorised import Vectorised

_AHEAD_BYTES = 2**28  # up to here a GPU picks the batches of all steps at once

Stack = dict[str, Tensor]  # by name, each (k, ...)
Step = Callable[..., tuple[Stack, Tensor, Tensor]]


class Stage:
    """The memory and the program for one shape of work: so many clients, with extras of these shapes.

    Clients come from rows and go back to them. What is captured reads and writes rows that are at home where they are,
    and rows of its own for others; what runs step by step takes the rows of each job.
    Clients of an uneven family come in ever new combinations of sizes, so their memory is laid out for the longest.
    """

    def __init__(self, engine: Vectorised, counts: tuple[int, ...], job: TrainingJob) -> None:
        recipe, device = engine.recipe, engine.recipe.device
        self.engine, self.recipe = engine, recipe
        k, layout = len(counts), recipe.layout
        self.schedule = Schedule.of(counts, recipe.training.batch, recipe.training.epochs, device, engine.longest)
        self.sizes = counts
        self.counts = torch.tensor(counts, device=device)
        self.own = captures(device) and not job.home
        self.rows = torch.empty_like(job.rows) if self.own else job.rows
        # While they train, each parameter of all clients lies by itself: gradients need no joining, products are fast.
        shaped = {n: torch.empty(k, *layout.places[n].shape, device=device) for n in layout.parameter_names}
        rests = engine.manners.unused if engine.manners is not None else frozenset()
        self.trained = {n: shaped[n] for n in recipe.trained if n not in rests}
        self.frozen = {n: tensor for n, tensor in shaped.items() if n not in self.trained}
        self.buffers = torch.empty(k, layout.trained - layout.parameters, device=device)
        self.optimiser = Optimiser(recipe.training, list(self.trained.values()))
        self.anchor = {n: torch.empty_like(t) for n, t in shaped.items()} if recipe.objective.needs_start else {}
        self.extras = {name: torch.empty_like(value, device=device) for name, value in job.extras.items()}
        self.scale = None if job.scale is None else torch.empty_like(job.scale, device=device)
        # Each client's random stream in each epoch and where its samples start: what a round must know of who is in.
        self.draw = torch.zeros(k, recipe.training.epochs + 1, dtype=torch.int64, device=device)
        self.lr, self.rate = torch.zeros((), device=device), 0.0
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros(k, device=device)
        self.steps = torch.tensor(self.schedule.steps, device=device)
        batch = self.schedule.position.shape[2]
        self.indices = torch.zeros(k, engine.most_steps, batch, dtype=torch.int64, device=device)
        self.epoch = torch.zeros(k, engine.most_steps, dtype=torch.int64, device=device)
        self.short = engine.longest % batch if engine.whole else 0
        x = recipe.samples.parts[0][0]
        replays = captures(device) and x.device.type == device.type  # no graph fetches samples that rest in host memory
        bytes_ahead = self.indices.numel() * x[0].numel() * x.element_size()
        self.ahead = replays and engine.whole and bytes_ahead <= _AHEAD_BYTES
        self.tables: list[Tensor] = []  # the samples and labels that batches are picked from
        self.batches: tuple[Tensor, ...] = ()  # of all steps, where they are picked ahead
        self.mask = torch.zeros(self.indices.shape, device=device) if engine.pads else None
        self.lay_out()
        self.rounds = 0
        self.seen: dict[int, int] = {}  # how often a batch of some size has come
        self.programs: dict[int, Step] = {}  # recorded, by the size of the batch
        self.graph: Graph | None = None
        self.eager = not replays
        held = [self.rows if self.own else None, self.buffers, self.scale, self.indices, self.epoch, self.mask]
        held += [*shaped.values(), *self.anchor.values(), *self.extras.values()]
        held += [*self.optimiser.first, *self.optimiser.second]
        self.bytes = sum(t.numel() * t.element_size() for t in held if t is not None)

    def lay_out(self) -> None:
        """Write the schedule where the steps read it."""
        steps = self.schedule.position.shape[1]
        self.epoch[:, :steps] = self.schedule.epoch
        if self.mask is not None:
            self.mask[:, :steps] = 1.0 if self.schedule.mask is None else self.schedule.mask

    def run(self, job: TrainingJob, counts: tuple[int, ...]) -> Tensor:
        training, device = self.recipe.training, self.recipe.device
        if counts != self.sizes:
            self.sizes = counts
            self.schedule = Schedule.of(counts, training.batch, training.epochs, device, self.engine.longest)
            self.counts.copy_(torch.tensor(counts))
            self.steps.copy_(torch.tensor(self.schedule.steps))
            self.lay_out()
        if self.own:
            self.rows.copy_(job.rows)
        else:
            self.rows = job.rows
        for name, value in job.extras.items():
            self.extras[name].copy_(value)
        if self.scale is not None and job.scale is not None:
            self.scale.copy_(job.scale)
        members = np.array(job.members)
        drawn = streams(self.engine.keys[members], job.round, training.epochs)
        *self.tables, starts = self.recipe.samples.table(members, device)
        write_to(self.draw, np.column_stack([drawn, starts]))
        if job.lr != self.rate:
            self.rate = job.lr
            self.lr.fill_(job.lr)
        before = generator_state(device) if self.graph is None else None
        if self.eager:
            self.everything()
        else:
            self.replay()
        if self.graph is None and generator_state(device) != before:
            raise RuntimeError(DRAWS_UNSEEN)
        if self.own:
            job.rows.copy_(self.rows)
        return self.losses.clone()

    def begin(self) -> None:
        """Clients come in; their samples are put in order and the last round is forgotten."""
        self.move(inwards=True)
        counts = None if self.engine.even else self.counts
        order = orders(self.draw[:, :-1], counts, self.schedule.longest)
        indices = self.schedule.indices(order, self.draw[:, -1])  # (k, S, B)
        self.indices[:, : indices.shape[1]] = indices
        if self.ahead:  # two launches for all steps
            self.batches = tuple(table[indices.transpose(0, 1)] for table in self.tables)  # (S, k, B, ...)
        self.optimiser.reset()
        self.losses.zero_()
        self.step.zero_()

    def end(self) -> None:
        """Clients go out, with their mean losses."""
        self.move(inwards=False)
        self.losses /= self.steps

    def move(self, inwards: bool) -> None:
        """Copy rows into the parameters and buffers, or these into the rows."""
        layout = self.recipe.layout
        for name, tensor in (self.trained | self.frozen).items():
            row = layout.tensor(self.rows, name)
            if inwards:
                tensor.copy_(row)
                if self.anchor:
                    self.anchor[name].copy_(row)
            elif name in self.trained:
                row.copy_(tensor)
        if self.buffers.shape[1]:
            row = self.rows[:, layout.parameters : layout.trained]
            if inwards:
                self.buffers.copy_(row)
            else:
                row.copy_(self.buffers)

    def one_step(self, at: int | None) -> None:
        """One step of every client: the step of a number, or of the counter that lives on the device."""
        mask = None if self.mask is None else self.pick(self.mask, at)
        epoch = self.pick(self.epoch, at)
        draw = self.draw[:, 0] + (self.step if at is None else at) if self.engine.draws else None
        extras = self.extras
        if self.recipe.objective.needs_index:
            extras = {**extras, INDEX: self.pick(self.indices, at)[:, : self.size(at)] - self.draw[:, -1:]}
        arguments = (
            self.trained, self.frozen, self.buffers, *self.batch(at), mask, self.anchor, epoch, draw, extras
        )  # fmt: skip
        gradients, losses, buffers = self.program(arguments)(*arguments)
        private = self.recipe.private
        if private is not None:
            noise = private.drawn(self.extras[NOISE][:, 0], self.step if at is None else at, self.recipe.layout)
            whole = torch.full_like(losses, float(self.size(at) or self.indices.shape[2]))
            gradients = with_noise(gradients, noise, whole if mask is None else mask.sum(1))
        moves = None if mask is None else (mask.amax(dim=1) > 0).to(losses.dtype)  # (k,) 0 for who has finished
        scale = self.scale
        if moves is not None:
            scale = moves[:, None] if scale is None else scale * moves[:, None]
        before = {} if scale is None else {name: tensor.clone() for name, tensor in self.trained.items()}
        self.optimiser.step([gradients[name] for name in self.trained], self.lr_now())
        if scale is not None:
            for name, value in before.items():
                place = self.recipe.layout.places[name]
                mine = scale if scale.shape[1] == 1 else scale[:, place.start : place.stop]
                hold_back(value.view(len(value), -1), self.trained[name].view(len(value), -1), mine)
        self.losses += losses if moves is None else losses * moves
        if self.buffers.shape[1]:
            self.buffers.copy_(buffers if moves is None else torch.where(moves[:, None] > 0, buffers, self.buffers))
        if at is None:
            self.step += 1

    def pick(self, table: Tensor, at: int | None) -> Tensor:
        """(k, ...) what a table (k, steps, ...) has for a step."""
        return table[:, at] if at is not None else table.index_select(1, self.step.view(1)).squeeze(1)

    def batch(self, at: int | None) -> Sequence[Tensor]:
        """The samples (k, B, ...) and labels (k, B) of a step."""
        size = self.size(at)
        if self.batches and at is not None:
            return [of_all[at][:, :size] for of_all in self.batches]
        index = self.pick(self.indices, at)[:, :size]
        flat = index.flatten().to(self.tables[0].device)  # samples that do not fit on a GPU rest in host memory
        picked = [table.index_select(0, flat).to(index.device) for table in self.tables]  # whole rows: copies, fast
        return [each.view(*index.shape, *each.shape[1:]) for each in picked]

    def size(self, at: int | None) -> int | None:
        """How many samples a client's batch of a step has; None: as many as there are places."""
        return self.short if at is not None and self.is_short(at) else None

    def lr_now(self) -> float | Tensor:
        """The learning rate; where a graph is captured it is read from the device, anew in each replay."""
        return self.lr if self.lr.is_cuda else self.rate

    def is_short(self, at: int) -> bool:
        """Whether the batch of a step is the last, short one of an epoch."""
        return self.short > 0 and (at + 1) % (self.engine.most_steps // self.recipe.training.epochs) == 0

    def everything(self) -> None:
        """The whole local training, step by step."""
        self.begin()
        for at in range(self.schedule.position.shape[1]):
            self.one_step(at)
        self.end()

    def program(self, arguments: tuple[Any, ...]) -> Step:
        """The program of a step. On a CPU one that recurs is recorded, and everywhere one that is to be compiled."""
        size, engine = arguments[3].shape[1], self.engine
        self.seen[size] = self.seen.get(size, 0) + 1
        recurs = not self.lr.is_cuda and self.seen[size] >= self.recipe.trace_after
        if not (engine.compiles or recurs):
            return engine.gradients
        if size not in self.programs:
            self.programs[size] = recorded(engine.gradients, engine.module, arguments, engine.compiles)
        return self.programs[size]

    def replay(self) -> None:
        """The whole local training as graphs: one of everything, or one of a step, replayed."""
        if self.graph is None:
            self.rounds += 1
            if self.rounds < 2:  # the first round runs eagerly: it warms up every library, and many runs end after it
                self.everything()
                return
            if not self.capture():
                self.eager = True
                self.everything()
                return
        assert self.graph is not None
        if self.engine.whole:
            self.graph.replay()
            return
        self.begin()
        for _ in range(self.schedule.position.shape[1]):
            self.graph.replay()
        self.end()

    def capture(self) -> bool:
        """Capture the round, or one step; False (said once) where the model cannot be captured."""
        before = python_state(self.engine.module)
        try:
            graph = Graph(self.everything if self.engine.whole else lambda: self.one_step(None), self.recipe.device)
        except RuntimeError as error:
            warnings.warn(
                f"this model's step cannot be captured as a CUDA graph and runs eagerly: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        if python_state(self.engine.module) != before:
            warnings.warn(DECIDES.format("captured as CUDA graphs"), RuntimeWarning, stacklevel=2)
            return False
        self.graph = graph
        self.bytes += graph.bytes
        return True
