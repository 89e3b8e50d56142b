"""A model run once, on a copy: what can be found out about it before it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.copies import parameter_hooks
from fedquilt.training.draws import drawing
from fedquilt.training.engine import Recipe
from fedquilt.training.intercept import Interception
from fedquilt.training.layers import prepare_one
from fedquilt.training.objective import Batch, Learner, Model

DRAWS_UNSEEN = (
    "it draws random numbers in a way that would draw them for a whole stack at once (a permutation, a distribution, a "
    "compiled function)"
)


def run_once(recipe: Recipe, extras: Mapping[str, Tensor]) -> nn.Module:
    """Run a copy of the module, with the template's numbers, on the first client's first batch; the copy."""
    module, samples = prepare_one(recipe.module()), recipe.samples
    first = slice(min(recipe.training.batch, samples.count[0]))
    # a copy of the samples too: a model may write on its input
    x, y = (table[first].clone().to(recipe.device) for table in samples.parts[samples.part[0]])
    batch = Batch(x, y, index=torch.arange(len(y), device=recipe.device))
    named = dict(module.named_parameters())
    begun = {n: p.detach() for n, p in named.items()} if recipe.objective.needs_start else {}
    given = {name: value[0] for name, value in extras.items()}
    me = Learner(Model(module), named, begun, given, torch.zeros((), dtype=torch.int64))
    with drawing(0, recipe.device):
        recipe.objective(me, batch)
    return module


@dataclass(frozen=True)
class Manners:
    """How a model behaves: whether it `draws` by functions, to be intercepted, and the `trouble` it is in a stack."""

    draws: bool
    trouble: str | None


def manners_of(recipe: Recipe, extras: Mapping[str, Tensor], pads: bool) -> Manners:
    """The manners of a family's model; `pads` says whether batches of the stack would be padded."""
    with Interception() as met:
        module = run_once(recipe, extras)
    hooked = next((name for name, p in module.named_parameters() if parameter_hooks(p)), None)
    trouble = None
    if hooked is not None:
        trouble = f"parameter '{hooked}' has a hook, which takes the gradient of one client"
    elif met.own_generator:
        trouble = "it draws from a generator of its own, of which clients in a stack would share one"
    elif met.renormalised and pads:
        trouble = "it has an embedding with max_norm, which would shrink what padding looks up too"
    return Manners(met.drew, trouble)


def generator_state(device: torch.device) -> object:
    """Something that changes when anything is drawn from the generator of a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index].get_offset()
    return torch.default_generator.get_state().numpy().tobytes()
