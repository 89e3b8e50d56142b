"""What a model must not do to be stacked beside clients of other sizes, or recorded once and replayed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.training.engine import Recipe
from fedquilt.training.objective import INDEX

_TOLERANCE = 1e-3  # of the greatest number; what padding changes is more


def python_state(module: nn.Module) -> tuple[object, ...]:
    """What a step may change outside of tensors, and a later one depend on: random generators, counters of a module.

    A step that changes it cannot be recorded and replayed: what was decided in Python would be decided for good.
    """
    numbers = [
        (path, key, value)
        for path, layer in module.named_modules()
        for key, value in vars(layer).items()
        if isinstance(value, bool | int | float | str)
    ]
    _, words, position, *_ = np.random.get_state()  # noqa: NPY002  # the one that models may draw from
    return random.getstate(), np.asarray(words).tobytes(), position, numbers


class Gradients(Protocol):
    """Gives gradients, losses and new buffers of a stack, as `Vectorised.gradients`."""

    def __call__(
        self, trained: dict[str, Tensor], frozen: dict[str, Tensor], buffers: Tensor, x: Tensor, y: Tensor,
        mask: Tensor | None, anchor: dict[str, Tensor], epoch: Tensor, draw: Tensor | None, extras: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]: ...  # fmt: skip


def padding_matters(recipe: Recipe, gradients: Gradients, row: Tensor, extras: Mapping[str, Tensor]) -> bool:
    """Whether what the first client, of this row (width,), learns from a batch depends on what it is padded with.

    It does where a model mixes the samples of a batch: with a mean over them, or a norm that is not a layer of PyTorch.
    """
    layout, samples = recipe.layout, recipe.samples
    x, y = samples.parts[samples.part[0]]
    others = [part for part, _ in samples.parts if len(part)]
    strangers = torch.stack([others[-1][-1], x[0]])  # two paddings that no layer can take for the same
    one = layout.split_parameters(row[: layout.parameters].to(recipe.device))
    named = {name: value[None].clone() for name, value in one.items()}
    trained = {name: named[name] for name in recipe.trained}
    frozen = {name: value for name, value in named.items() if name not in trained}
    anchor = named if recipe.objective.needs_start else {}
    buffers = row[None, layout.parameters : layout.trained].to(recipe.device)
    zero = torch.zeros(1, dtype=torch.int64, device=recipe.device)
    mine = {name: value[:1].to(recipe.device) for name, value in extras.items()}
    real = min(len(y), 2)
    if recipe.objective.needs_index:
        mine[INDEX] = torch.arange(real + 1, device=recipe.device)[None] % real
    mask = torch.tensor([[1.0] * real + [0.0]], device=recipe.device)
    label = torch.cat([y[:real], y[:1]])[None].to(recipe.device)
    found = []
    for padding in strangers:
        batch = torch.cat([x[:real], padding[None]])[None].to(recipe.device)
        with torch.random.fork_rng(devices=[recipe.device] if recipe.device.type == "cuda" else []):
            torch.manual_seed(0)  # what a model draws is the same for both
            learned, loss, after = gradients(
                trained, frozen, buffers, batch, label, mask, anchor, zero, zero, mine
            )  # fmt: skip
        found.append(torch.cat([loss, after.flatten(), *(value.flatten() for value in learned.values())]))
    first, second = (values.nan_to_num() for values in found)
    return bool((first - second).abs().max() > _TOLERANCE * first.abs().max().clamp(min=1e-6))
