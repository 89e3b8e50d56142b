"""What a model must not do to be stacked beside clients of other sizes, or recorded once and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fedquilt.engines.engine import TrainingSpec
from fedquilt.engines.objective import INDEX
from fedquilt.families.architecture import attributes
from fedquilt.families.habits import python_draws

_TOLERANCE = 1e-3  # of the greatest number; a batch without padding is summed up in another order
_ROUNDING = 1e-6  # of the greatest number; two paddings of one length change no more than the order of sums
_REAL = 3  # samples that are padded
_SEARCHED = 64  # samples of a client among which one is looked for that differs


def python_state(module: nn.Module) -> tuple[object, ...]:
    """What a step may change outside of tensors, and a later one depend on: random generators, counters of
    a module.

    A step that changes it cannot be recorded and replayed: what was decided in Python would be decided for good.
    """
    return *python_draws(), attributes(module)


class Gradients(Protocol):
    """Gives gradients, losses and new buffers of a stack, as `Vectorised.gradients`."""

    def __call__(
        self, trained: dict[str, Tensor], frozen: dict[str, Tensor], buffers: Tensor, x: Tensor, y: Tensor,
        mask: Tensor | None, anchor: dict[str, Tensor], epoch: Tensor, draw: Tensor | None, extras: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]: ...  # fmt: skip


def padding_matters(recipe: TrainingSpec, gradients: Gradients, row: Tensor, extras: Mapping[str, Tensor]) -> bool:
    """Whether what a client of this row (width,) learns from a batch depends on what it is padded with, or on that.

    It does where a model mixes the samples of a batch: with a mean over them, or a norm that is not a layer of PyTorch.
    What is learned from two paddings must be the same but for the order of sums, and what a device is not sure of.
    """
    layout, samples = recipe.layout, recipe.samples
    most = max(range(len(samples.count)), key=lambda member: samples.count[member])
    x, y = samples.parts[samples.part[most]]
    one = layout.split_parameters(row[: layout.parameters].to(recipe.device))
    named = {name: value[None].clone() for name, value in one.items()}
    trained = {name: named[name] for name in recipe.trained}
    frozen = {name: value for name, value in named.items() if name not in trained}
    anchor = named if recipe.objective.needs_start else {}
    buffers = row[None, layout.parameters : layout.trained].to(recipe.device)
    zero = torch.zeros(1, dtype=torch.int64, device=recipe.device)
    mine = {name: value[:1].to(recipe.device) for name, value in extras.items()}
    real = min(len(y), _REAL)

    def learned(padding: Tensor | None) -> list[Tensor]:
        """The loss, the buffers and the gradients, each by itself."""
        batch, labels, mask = x[:real].clone(), y[:real], None  # a model may write on its input
        if padding is not None:
            batch, labels = torch.cat([batch, padding[None]]), torch.cat([labels, y[:1]])
            mask = torch.tensor([[1.0] * real + [0.0]], device=recipe.device)
        if recipe.objective.needs_index:
            mine[INDEX] = torch.arange(len(labels), device=recipe.device)[None] % real
        with torch.random.fork_rng(devices=[recipe.device] if recipe.device.type == "cuda" else []):
            torch.manual_seed(0)  # what a model draws is the same for all
            found, loss, after = gradients(
                trained, frozen, buffers, batch[None].to(recipe.device),
                labels[None].to(recipe.device), mask, anchor, zero, zero, mine,
            )  # fmt: skip
        whole = torch.cat([value.flatten() for value in found.values()]) if found else loss
        return [loss, *layout.split_buffers(after[0]).values(), whole]

    with_first, again, with_other = (learned(padding) for padding in (x[0], x[0], _another(samples.parts, x[0])))
    for one_way, repeated, other_way in zip(with_first, again, with_other, strict=True):
        if _gap(one_way, other_way) > max(16 * _gap(one_way, repeated), _ROUNDING * _size(one_way)):
            return True
    pairs = zip(with_first, learned(None), strict=True)
    return any(_gap(padded, bare) > _TOLERANCE * _size(bare) for padded, bare in pairs)


def _another(parts: Sequence[tuple[Tensor, Tensor]], sample: Tensor) -> Tensor:
    """Some client's sample that is not this one, if there is any among the first of all."""
    for x, _ in parts:
        for other in x[:_SEARCHED]:
            if not torch.equal(other, sample):
                found: Tensor = other
                return found
    return sample


def _gap(one: Tensor, other: Tensor) -> float:
    """How far two tensors are apart at most; NaNs are the same, and infinite values where both have them."""
    differ = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one.double() - other.double()).abs())
    return float(differ.nan_to_num(nan=torch.inf).max()) if differ.numel() else 0.0


def _size(tensor: Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)].double().abs()
    return max(float(finite.max()) if finite.numel() else 0.0, 1e-6)
