"""All clients of a family at once: one tensor program over a leading client axis.

A loss over `functional_call`, differentiated under `vmap`, gives every client's gradient; one fused operation updates
all parameters of all clients. On CUDA the whole local training of a round is one captured graph where clients are even,
and one graph a step where they are not; a new shape makes a new graph and old ones are kept. On a CPU a step that
recurs is traced once, which takes vmap's dispatch out of the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vjp, vmap

from fedquilt.engines.cuda_graph import captures
from fedquilt.engines.engine import Constants, TrainingJob, TrainingSpec
from fedquilt.engines.memory_budget import memory_budget
from fedquilt.engines.objective import INDEX, Batch, Learner, Model
from fedquilt.engines.sample_noise import APART
from fedquilt.engines.stage import Stack, Stage
from fedquilt.engines.trial import Manners, manners_of
from fedquilt.layers.convolutions import lay_plainly
from fedquilt.layers.draws import drawing
from fedquilt.layers.dropout import has_dropout
from fedquilt.layers.intercept import Interception
from fedquilt.layers.norms import padding
from fedquilt.layers.prepare import prepare_stack, stackable
from fedquilt.layers.stacked_products import there

_WHOLE_ROUND_STEPS = 512  # longer local training is replayed step by step: capturing it whole would take too long
_MOST_STAGES = 64  # shapes of work whose memory and graphs are kept


class Vectorised:
    """Clients stacked, steps shared."""

    name: ClassVar[str] = "vectorised"
    stacks: ClassVar[bool] = True
    compiles: ClassVar[bool] = False

    def __init__(self, recipe: TrainingSpec) -> None:
        self.recipe = recipe
        if recipe.device.type == "cuda":
            there()  # asked here: inside of a layer that is being differentiated it could not be tried
        self.module = prepare_stack(recipe.module(), gpu=recipe.device.type == "cuda")
        self.constants = Constants(self.module, recipe.layout.places)
        self.manners: Manners | None = None
        self.draws = has_dropout(self.module)
        self.keys = np.array(recipe.samples.key, dtype=np.uint64)
        self.budget = memory_budget(recipe.device)
        counts = recipe.samples.count
        self.longest = max(counts)
        self.even = len(set(counts)) == 1
        self.most_steps = -(-self.longest // min(recipe.training.batch, self.longest)) * recipe.training.epochs
        # Where all clients have one size, the last batch of an epoch is short for all of them: it is cut, not padded.
        self.whole = self.even and self.most_steps <= _WHOLE_ROUND_STEPS
        self.pads = not self.whole and (not self.even or self.longest % min(recipe.training.batch, self.longest) > 0)
        self.stages: dict[tuple[Any, ...], Stage] = {}

    def train(self, job: TrainingJob) -> Tensor:
        self.learn_manners(job.extras)
        of_each = self.recipe.samples.count
        counts = (self.longest,) * len(job.members) if self.even else tuple(of_each[m] for m in job.members)
        shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(job.extras.items()))
        home = job.rows.data_ptr() if job.home and captures(self.recipe.device) else None
        key = (len(counts), shapes, None if job.scale is None else tuple(job.scale.shape), home)
        stage = self.stages.pop(key, None) or Stage(self, counts, job)
        self.stages[key] = stage  # the latest used is the last
        losses = stage.run(job, counts)
        self.constants.check()
        held = sum(stage.bytes for stage in self.stages.values())
        while len(self.stages) > 1 and (held > self.budget or len(self.stages) > _MOST_STAGES):
            held -= self.stages.pop(next(iter(self.stages))).bytes
        return losses

    def learn_manners(self, extras: Mapping[str, Tensor]) -> Manners:
        """Find out, once, how the model behaves; one that cannot be in a stack is refused."""
        if self.manners is None:
            self.manners = manners_of(self.recipe.exactly, extras, self.pads)
            self.draws |= self.manners.draws
            if self.manners.averages:
                lay_plainly(self.module)
        if self.manners.trouble is not None:
            raise RuntimeError(self.manners.trouble)
        return self.manners

    def gradients(
        self,
        trained: Stack,
        frozen: Stack,
        buffers: Tensor,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        anchor: Stack,
        epoch: Tensor,
        draw: Tensor | None,
        extras: Stack,
    ) -> tuple[Stack, Tensor, Tensor]:
        """Gradients of the trained parameters, losses (k,) and new buffers (k, buffers) of a batch of every client."""
        layout, objective, module, task = self.recipe.layout, self.recipe.objective, self.module, self.recipe.task
        intercepting = self.learn_manners(extras).draws

        def loss_of(
            trained: Stack,
            frozen: Stack,
            buffer: Tensor,
            x: Tensor,
            y: Tensor,
            mask: Tensor | None,
            anchor: Stack,
            epoch: Tensor,
            draw: Tensor | None,
            extras: Stack,
        ) -> tuple[Tensor, Tensor]:
            named = {name: trained[name] if name in trained else frozen[name] for name in layout.parameter_names}
            # each by itself: PyTorch's batch norm does not write to buffers that lie apart in memory
            own = {name: part.clone() for name, part in layout.split_buffers(buffer).items()} if buffer.numel() else {}
            state = named | own  # one dict: a buffer that the model replaces is written back into it

            me = Learner(Model(module, state), named, anchor, extras, epoch)
            intercepted = Interception() if intercepting else nullcontext()
            with padding(mask), drawing(draw), intercepted, self.recipe.precision():
                loss = objective(me, Batch(x.clone(), y, mask, extras.get(INDEX), task=task))  # which may be written on
            after = torch.cat([state[name].reshape(-1).float() for name in own]) if own else buffer
            return loss, after

        def gradients_of(trained: Stack, *rest: Any) -> tuple[Stack, Tensor, Tensor]:
            # `torch.func.grad` would keep every activation, and all of backward, for a second derivative
            loss, back, after = vjp(lambda mine: loss_of(mine, *rest), trained, has_aux=True)  # type: ignore[misc]
            (gradients,) = back(torch.ones_like(loss), retain_graph=False, create_graph=False)
            return gradients, loss, after

        def private_of(
            trained: Stack, frozen: Stack, buffer: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, anchor: Stack,
            epoch: Tensor, draw: Tensor | None, extras: Stack,
        ) -> tuple[Stack, Tensor, Tensor]:  # fmt: skip
            """Sums of the clipped gradients of one client's samples, each a batch of its own."""
            assert private is not None
            place = torch.arange(1, len(y) + 1, device=y.device)
            stream = None if draw is None else draw + place * APART
            index = extras.get(INDEX)

            def one(x: Tensor, y: Tensor, stream: Tensor | None, index: Tensor | None) -> tuple[Stack, Tensor]:
                mine = extras if index is None else {**extras, INDEX: index[None]}
                return gradients_of(trained, frozen, buffer, x[None], y[None], None, anchor, epoch, stream, mine)[:2]

            axes = (0, 0, None if stream is None else 0, None if index is None else 0)
            found, losses = vmap(one, in_dims=axes, randomness="different")(x, y, stream, index)
            sums = dict(zip(found, private.clipped(list(found.values()), mask), strict=True))
            return sums, Batch(x, y, mask).mean(losses), buffer

        private = self.recipe.private
        axes = (0, 0, 0, 0, 0, None if mask is None else 0, 0, 0, None if draw is None else 0, 0)
        program = vmap(gradients_of if private is None else private_of, in_dims=axes, randomness="different")
        with stackable(x.device):
            gradients, losses, after = program(trained, frozen, buffers, x, y, mask, anchor, epoch, draw, extras)
        return gradients, losses, after

    def close(self) -> None:
        """Drop graphs and buffers."""
        self.stages.clear()


class Compiled(Vectorised):
    """The same with compiled steps: faster where a run is long enough to make up for compiling."""

    name: ClassVar[str] = "compiled"
    compiles: ClassVar[bool] = True
