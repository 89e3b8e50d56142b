"""What a client minimises: terms that add up, each a function of one client's model, batch and context.

A term is written for one client and runs on all at once (under `torch.func.vmap`) or one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedquilt.training.layers import cross_entropies


@dataclass(frozen=True)
class Batch:
    """One batch of one client. `mask` is None, or 1 for real samples and 0 for padding."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None

    def mean(self, per_sample: Tensor) -> Tensor:
        """The mean over the real samples of a (batch,) tensor."""
        if self.mask is None:
            return per_sample.mean()
        return (per_sample * self.mask).sum() / self.mask.sum().clamp(min=1.0)


@dataclass(frozen=True)
class Context:
    """What else a term may look at: the parameters now, those received, what the method prepared, the local epoch."""

    parameters: Mapping[str, Tensor]
    anchor: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    epoch: Tensor | None = None


class Call(Protocol):
    """Runs the client's module on samples."""

    def __call__(self, x: Tensor, **kwargs: object) -> Tensor: ...


Term = Callable[[Call, Batch, Context], Tensor]


@dataclass(frozen=True)
class Objective:
    """A sum of terms. `needs_anchor` says whether a term looks at the parameters received.

    >>> objective = cross_entropy() + proximal(0.1)
    >>> len(objective.terms), objective.needs_anchor
    (2, True)
    """

    terms: tuple[Term, ...]
    needs_anchor: bool = False

    def __add__(self, other: Objective) -> Objective:
        return Objective(self.terms + other.terms, self.needs_anchor or other.needs_anchor)

    def __call__(self, call: Call, batch: Batch, context: Context) -> Tensor:
        total = self.terms[0](call, batch, context)
        for term in self.terms[1:]:
            total = total + term(call, batch, context)
        return total


def cross_entropy() -> Objective:
    """Mean cross-entropy of the module's outputs, taken as logits."""

    def term(call: Call, batch: Batch, context: Context) -> Tensor:
        return batch.mean(cross_entropies(call(batch.x), batch.y))

    return Objective((term,))


def proximal(mu: float) -> Objective:
    """mu / 2 times the squared distance to the parameters received (Li et al. 2020, eq. 2)."""

    def term(call: Call, batch: Batch, context: Context) -> Tensor:
        gaps = [(context.parameters[name] - anchor).square().sum() for name, anchor in context.anchor.items()]
        return 0.5 * mu * torch.stack(gaps).sum()

    return Objective((term,), needs_anchor=True)
