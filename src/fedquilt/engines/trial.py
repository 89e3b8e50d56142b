"""A model run once, on a copy: what can be found out about it before it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.engines.engine import TrainingSpec
from fedquilt.engines.objective import Batch, Learner, Model
from fedquilt.families.copies import parameter_hooks
from fedquilt.layers.draws import drawing
from fedquilt.layers.dropout import has_dropout
from fedquilt.layers.intercept import Interception
from fedquilt.layers.norms import padding
from fedquilt.layers.prepare import prepare_one, prepare_stack

DRAWS_UNSEEN = (
    "it draws random numbers in a way that would draw them for a whole stack at once (a permutation, a distribution, a "
    "compiled function)"
)


_TOLERANCE = 1e-3  # of a loss; other numbers drawn change it more


def run_once(recipe: TrainingSpec, extras: Mapping[str, Tensor]) -> tuple[nn.Module, Tensor]:
    """Run a copy of the module, with the template's numbers, on the first client's first batch: it, and its loss."""
    module = prepare_one(recipe.module())
    return module, _loss(recipe, extras, module)


def _loss(recipe: TrainingSpec, extras: Mapping[str, Tensor], module: nn.Module, padded: bool = False) -> Tensor:
    """The loss of the first client's samples, in a batch as big as any; it may be padded with its first sample."""
    samples = recipe.samples
    real = min(recipe.training.batch, max(samples.count))
    places = torch.arange(real) % samples.count[0]
    # copies of samples: a model may write on its input
    x, y = (table[places.to(table.device)].to(recipe.device) for table in samples.parts[samples.part[0]])
    index, mask = torch.arange(real, device=recipe.device), None
    if padded:
        x, y, index = (torch.cat([part, part[:1]]) for part in (x, y, index))
        mask = torch.ones(real + 1, device=recipe.device)
        mask[-1] = 0
    named = {name: p for name, p in module.named_parameters() if name in recipe.layout.parameter_names}
    begun = {n: p.detach() for n, p in named.items()} if recipe.objective.needs_start else {}
    given = {name: value[0] for name, value in extras.items()}
    me = Learner(Model(module), named, begun, given, torch.zeros((), dtype=torch.int64, device=recipe.device))
    with drawing(0, recipe.device), padding(mask), recipe.precision():
        return recipe.objective(me, Batch(x, y, mask, index, task=recipe.task))


def _draws_by_length(recipe: TrainingSpec, extras: Mapping[str, Tensor]) -> bool:
    """Whether what samples are drawn depends on how many are beside them: in a batch folded with time first, say."""
    gpu = recipe.device.type == "cuda"
    with Interception(), torch.no_grad():
        cut, padded = (
            _loss(recipe, extras, prepare_stack(recipe.module(), gpu), padded=longer) for longer in (False, True)
        )
    return not torch.allclose(cut, padded, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


@dataclass(frozen=True)
class Manners:
    """How a model behaves: whether it `draws` by functions, to be intercepted, and the `trouble` it is in a stack.

    `unused` are parameters that the loss does not depend on: they rest, also where weights decay. `averages`: it pools
    images by PyTorch's own mean.
    """

    draws: bool
    trouble: str | None
    unused: frozenset[str] = frozenset()
    averages: bool = False


def manners_of(recipe: TrainingSpec, extras: Mapping[str, Tensor], pads: bool) -> Manners:
    """The manners of a family's model; `pads` says whether batches of the stack would be padded."""
    with Interception() as met:
        module, loss = run_once(recipe, extras)
        unused = _unused(recipe, module, loss) if recipe.training.weight_decay else frozenset()
    hooked = next((name for name, p in module.named_parameters() if parameter_hooks(p)), None)
    trouble = None
    if hooked is not None:
        trouble = f"parameter '{hooked}' has a hook, which takes the gradient of one client"
    elif met.own_generator:
        trouble = "it draws from a generator of its own, of which clients in a stack would share one"
    elif met.renormalised and pads:
        trouble = "it has an embedding with max_norm, which would shrink what padding looks up too"
    elif pads and (met.drew or has_dropout(module)) and _draws_by_length(recipe, extras):
        trouble = "what it draws depends on how long a batch is, and clients have unlike numbers of samples"
    return Manners(met.drew, trouble, unused, met.averaged)


def _unused(recipe: TrainingSpec, module: nn.Module, loss: Tensor) -> frozenset[str]:
    named = dict(module.named_parameters())
    trained = {name: named[name] for name in recipe.trained}
    if not trained or not loss.requires_grad:
        return frozenset(trained)
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(trained, found, strict=True) if gradient is None)


def generator_state(device: torch.device) -> object:
    """Something that changes when anything is drawn from the generator of a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index].get_offset()
    return torch.default_generator.get_state().numpy().tobytes()
