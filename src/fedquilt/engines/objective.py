"""What a client minimises: terms that add up, each a function of one client, as it learns, and a batch.

A term is written for one client and runs on all at once (under `torch.func.vmap`) or one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedquilt.tasks import Classification, Task

_CLASSES = Classification()


@dataclass(frozen=True)
class Batch:
    """Some samples of one client, y their targets. `mask` is None, or 1 for real samples and 0 for padding.

    `index` says which of the client's samples they are, where an objective needs to know; `public` where a sample is
    among the public ones, -1 for one that is not, where samples are predicted.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    index: Tensor | None = None
    public: Tensor | None = None
    task: Task = _CLASSES

    def losses(self, outputs: Tensor) -> Tensor:
        """(n,) what the task says each sample loses with a model's outputs (n, ...).

        >>> Batch(torch.zeros(2, 1), torch.tensor([0, 1])).losses(torch.zeros(2, 2))
        tensor([0.6931, 0.6931])
        """
        return self.task.losses(outputs.float() if outputs.dtype == torch.bfloat16 else outputs, self.y)

    def loss(self, outputs: Tensor) -> Tensor:
        """The mean of that over the real samples."""
        return self.mean(self.losses(outputs))

    def mean(self, per_sample: Tensor) -> Tensor:
        """The mean over the real samples of a (batch,) tensor."""
        if self.mask is None:
            return per_sample.mean()
        return (per_sample * self.mask).sum() / self.mask.sum().clamp(min=1.0)

    def of_labels(self, classes: int) -> Tensor:
        """(classes, n) 1 where a sample, of the real ones, has a label.

        >>> Batch(torch.zeros(3, 1), torch.tensor([1, 0, 1]), torch.tensor([1.0, 1.0, 0.0])).of_labels(2).tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
        """
        found = (self.y == torch.arange(classes, device=self.y.device)[:, None]).float()
        return found if self.mask is None else found * self.mask


@dataclass(frozen=True)
class Model:
    """A client's module at some values, those of the module itself where none are given: call it on samples.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> Model(net).at({"weight": torch.ones(1, 2)})(torch.ones(1, 2)).item()
    2.0
    """

    module: nn.Module
    values: dict[str, Tensor] = field(default_factory=dict)  # a buffer that the module replaces is replaced here too
    which: str = ""  # the part that is called, where a client holds several models

    def __call__(self, x: Tensor, **kwargs: Any) -> Tensor:
        if self.which:
            kwargs["part"] = self.which
        out: Tensor
        out = functional_call(self.module, self.values, (x,), kwargs) if self.values else self.module(x, **kwargs)
        return out

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(n, width) what the head of the model is given, sample by sample, and (n, classes) the scores.

        For methods whose `parts` name a head.
        """
        run = {"features": True}
        given, scores = functional_call(self.module, self.values, (x,), run) if self.values else self.module(x, **run)
        return given.flatten(1), scores

    def at(self, parameters: Mapping[str, Tensor]) -> Model:
        """The same with other parameters; it may be differentiated with respect to them.

        What the module writes to its buffers there is forgotten.
        """
        own = {name: self.values.get(name, buffer).clone() for name, buffer in self.module.named_buffers()}
        return replace(self, values=self.values | own | dict(parameters))

    def part(self, name: str) -> Model:
        """Another of the models that a client holds."""
        return replace(self, which=name)


@dataclass(frozen=True)
class Learner:
    """One client while it trains, as a term of its objective sees it.

    `parameters` are the client's now, by name; `start` those it began this training with (where the objective says that
    it needs them); `given` is what the method's step prepared for it; `epoch` counts from 0.
    """

    model: Model
    parameters: Mapping[str, Tensor]
    start: Mapping[str, Tensor] = field(default_factory=dict)
    given: Mapping[str, Tensor] = field(default_factory=dict)
    epoch: Tensor | None = None

    def split(self, flat: Tensor, part: str = "") -> dict[str, Tensor]:
        """A vector (size,) of numbers as tensors in the shapes of the parameters, or of those of one part, by name."""
        names = [name for name in self.parameters if name.startswith(f"{part}." if part else "")]
        pieces = flat.split([self.parameters[name].numel() for name in names])
        return {name: piece.view(self.parameters[name].shape) for name, piece in zip(names, pieces, strict=True)}


Term = Callable[[Learner, Batch], Tensor]
INDEX = "which samples"  # among what a step is given, where its objective needs to know


@dataclass(frozen=True)
class Objective:
    """A sum of terms. `needs_start` says whether a term looks at the parameters that training began with.

    `needs_index` says whether one looks at which of the client's samples a batch holds.

    >>> objective = task_loss() + proximal(0.1)
    >>> len(objective.terms), objective.needs_start
    (2, True)
    """

    terms: tuple[Term, ...]
    needs_start: bool = False
    needs_index: bool = False

    def __add__(self, other: Objective) -> Objective:
        start, index = self.needs_start or other.needs_start, self.needs_index or other.needs_index
        return Objective(self.terms + other.terms, start, index)

    def __call__(self, me: Learner, batch: Batch) -> Tensor:
        total = self.terms[0](me, batch)
        for term in self.terms[1:]:
            total = total + term(me, batch)
        return total


def task_loss(part: str = "") -> Objective:
    """What the task minimises, cross-entropy say, in the mean; of one part, where a client holds several models."""

    def term(me: Learner, batch: Batch) -> Tensor:
        model = me.model.part(part) if part else me.model
        return batch.loss(model(batch.x))

    return Objective((term,))


def proximal(mu: float, part: str = "", to: str = "") -> Objective:
    """mu / 2 times the squared distance of the parameters to those that training began with (Li et al. 2020, eq. 2).

    With `part` of one part's parameters, with `to` to those given under that name as a vector.
    """

    def term(me: Learner, batch: Batch) -> Tensor:
        names = [name for name in me.parameters if name.startswith(f"{part}." if part else "")]
        centre = me.split(me.given[to], part) if to else me.start
        gaps = [(me.parameters[name] - centre[name]).square().sum() for name in names]
        return 0.5 * mu * torch.stack(gaps).sum()

    return Objective((term,), needs_start=not to)


def linear(slope: str) -> Objective:
    """The inner product of the parameters with a vector that is given under a name: it adds that to the gradient."""

    def term(me: Learner, batch: Batch) -> Tensor:
        slopes = me.split(me.given[slope])
        return torch.stack([(me.parameters[name] * each).sum() for name, each in slopes.items()]).sum()

    return Objective((term,))
