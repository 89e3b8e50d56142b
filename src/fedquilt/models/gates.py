"""Gates between the blocks of a module pool (FedMN, Wang et al. 2022): binary, relaxed, and what they put to use.

A pool has L layers of n_l blocks. Every pair of blocks in successive layers is joined by a path with a gate, and every
block of the last layer has one gate more, to the prediction: E = sum n_l n_{l+1} + n_L gates, kept as one vector. All
functions take any leading axes, such as one for the clients, and none branches on the value of a tensor, so they run
under `torch.func.vmap` too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

Gates = Literal["relaxed", "straight-through"]


def check_blocks(blocks: Sequence[int]) -> None:
    """Refuse a list of blocks that is no pool."""
    if len(blocks) < 2 or any(n < 1 for n in blocks):
        raise ValueError(
            f"blocks={list(blocks)} is no pool: give at least two layers (encoders and outputs), "
            "each with one block or more"
        )


def pick_by(
    blocks: Sequence[int] | Mapping[str, Sequence[int]], trait: str, value: str, client: str
) -> Sequence[int]:  # fmt: skip
    """The blocks of a client's pool, where there is one for each value of a trait.

    >>> pick_by({"old": [2, 2], "new": [3, 2]}, "device", "new", "a"), pick_by([3, 3], "device", "", "a")
    ([3, 2], [3, 3])
    """
    if not isinstance(blocks, Mapping):
        return blocks
    if value not in blocks:
        raise ValueError(
            f"fedmn: client '{client}' has {trait} '{value}', for which blocks names no pool; it names "
            f"{', '.join(blocks)}"
        )
    return blocks[value]


def paths(blocks: Sequence[int]) -> int:
    """E, how many gates a pool with these blocks has.

    >>> paths([3, 3, 3]), paths([1, 4, 3])
    (21, 19)
    """
    return sum(a * b for a, b in itertools.pairwise(blocks)) + blocks[-1]


def block_names(blocks: Sequence[int]) -> tuple[str, ...]:
    """The blocks' names, layer by layer.

    >>> block_names([1, 2, 1])
    ('encoder.0', 'block.1.0', 'block.1.1', 'output.0')
    """
    last = len(blocks) - 1
    kinds = ["encoder" if at == 0 else "output" if at == last else f"block.{at}" for at in range(len(blocks))]
    return tuple(f"{kind}.{j}" for kind, n in zip(kinds, blocks, strict=True) for j in range(n))


def layers_of(gates: Tensor, blocks: Sequence[int]) -> list[Tensor]:
    """A vector of gates, (..., E), as one matrix a layer, (..., n_l, n_{l+1}); the last one leads to the prediction.

    >>> [tuple(matrix.shape) for matrix in layers_of(torch.zeros(5, 21), [3, 3, 3])]
    [(5, 3, 3), (5, 3, 3), (5, 3, 1)]
    """
    if gates.shape[-1] != paths(blocks):
        raise ValueError(f"a pool of {list(blocks)} has {paths(blocks)} gates, not {gates.shape[-1]}")
    above = [*blocks[1:], 1]
    parts = gates.split_with_sizes([a * b for a, b in zip(blocks, above, strict=True)], dim=-1)
    return [part.reshape(*part.shape[:-1], a, b) for part, a, b in zip(parts, blocks, above, strict=True)]


def active_blocks(gates: Tensor, blocks: Sequence[int]) -> Tensor:
    """Which blocks binary gates (..., E) put to use, (..., sum n_l): reached from an encoder and leading to the output.

    >>> gates = torch.tensor([1., 0., 0., 0.,  1., 0.])    # encoder.0 -> output.0 -> prediction
    >>> active_blocks(gates, [2, 2]).tolist()
    [True, False, True, False]
    """
    steps = [matrix > 0.5 for matrix in layers_of(gates, blocks)]
    reached = [torch.ones_like(steps[0][..., 0])]
    for step in steps[:-1]:
        reached.append((reached[-1].unsqueeze(-1) & step).any(dim=-2))
    leading = [steps[-1][..., 0]]
    for step in reversed(steps[:-1]):
        leading.append((step & leading[-1].unsqueeze(-2)).any(dim=-1))
    return torch.cat([r & b for r, b in zip(reached, reversed(leading), strict=True)], dim=-1)


def keep_one_path(gates: Tensor, probabilities: Tensor, blocks: Sequence[int]) -> Tensor:
    """Binary gates (..., E) with the most probable complete path opened where no path leads through.

    >>> pi = torch.tensor([.1, .4, .2, .3,  .4, .3])
    >>> keep_one_path(torch.zeros(6), pi, [2, 2]).tolist()  # .4 * .3 through output.1 beats .2 * .4 through output.0
    [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    """
    best, came_from = None, []
    for matrix in layers_of(probabilities.clamp_min(1e-30).log(), blocks):
        score = matrix if best is None else best.unsqueeze(-1) + matrix  # (..., n_l, n_{l+1})
        best, source = score.max(dim=-2)
        came_from.append(source)
    steps: list[Tensor] = []
    on = torch.ones_like(came_from[-1], dtype=torch.bool)  # (..., 1): the prediction is on every path
    for source, n in zip(reversed(came_from), reversed(blocks), strict=True):
        lower = torch.arange(n, device=gates.device)
        step = (source.unsqueeze(-2) == lower.unsqueeze(-1)) & on.unsqueeze(-2)  # (..., n_l, n_{l+1})
        steps.append(step.flatten(-2))
        on = step.any(dim=-1)
    path = torch.cat(steps[::-1], dim=-1).to(gates.dtype)
    through = active_blocks(gates, blocks).any(dim=-1, keepdim=True)
    return torch.where(through, gates, torch.maximum(gates, path))


def decide(logits: Tensor, blocks: Sequence[int]) -> Tensor:
    """The binary decision of eq. 10's probabilities: a path is open where Pi > 1/2, and one is always open."""
    return keep_one_path((logits > 0).to(logits.dtype), logits.sigmoid(), blocks)


def drawn(logits: Tensor, noise: Tensor, blocks: Sequence[int]) -> Tensor:
    """A binary decision drawn from eq. 10's probabilities, as eq. 5 does at any temperature; one path is always open.

    >>> drawn(torch.tensor([0.0, 0.0, 2.0, 2.0]), torch.tensor([0.4, 0.6, 0.8, 0.8]), [1, 2]).tolist()
    [1.0, 0.0, 1.0, 1.0]
    """
    return keep_one_path((noise < logits.sigmoid()).to(logits.dtype), logits.sigmoid(), blocks)


def paths_between(active: Tensor, blocks: Sequence[int]) -> Tensor:
    """(..., E) which paths have both their ends among the active blocks, (..., sum n_l).

    >>> paths_between(torch.tensor([True, False, True, True]), [2, 2]).tolist()
    [True, True, False, False, True, True]
    """
    parts = active.split_with_sizes(list(blocks), dim=-1)
    above = [*parts[1:], torch.ones_like(active[..., :1])]
    both = [lower.unsqueeze(-1) & upper.unsqueeze(-2) for lower, upper in zip(parts, above, strict=True)]
    return torch.cat([matrix.flatten(-2) for matrix in both], dim=-1)


def against_one_route(logits: Tensor, usual: Tensor) -> Tensor:
    """Minus the information that a gate has about whose it is, as far as one client moves it.

    The mutual information between client and gate is H(mean of Pi) - mean of H(Pi). Its gradient in one client's Pi
    needs the mean over clients only (`usual`, from the round before): log-odds of the mean, less those of Pi.

    >>> at_odds = against_one_route(torch.tensor([-3.0]), torch.tensor([0.9]))
    >>> alike = against_one_route(torch.tensor([3.0]), torch.tensor([0.9]))
    >>> bool(at_odds < alike)
    True
    """
    pi = logits.sigmoid()
    entropy = softplus(logits) - pi * logits  # of a Bernoulli variable, in nats
    return (pi * usual.clamp(0.01, 0.99).logit() + entropy).mean()


def binary_concrete(logits: Tensor, noise: Tensor, temperature: Tensor | float) -> Tensor:
    """Relaxed gates (eq. 5) from the logits of Pi and uniform noise in (0, 1).

    >>> binary_concrete(torch.tensor([0., 2.]), torch.tensor([.5, .5]), 1.0)
    tensor([0.5000, 0.8808])
    """
    noise = noise.clamp(1e-6, 1 - 1e-6)
    # Beyond 15 the sigmoid is flat in float32; unbounded, a mean over gates that all vanish would divide by zero.
    return (((noise.logit() + logits) / temperature).clamp(-15.0, 15.0)).sigmoid()


def sample_gates(
    logits: Tensor,
    noise: Tensor,
    temperature: Tensor | float,
    blocks: Sequence[int],
    kind: Gates = "relaxed",
    within: Tensor | None = None,
) -> Tensor:
    """Gates for training: the relaxed value, or its binary rounding with the relaxation's gradient.

    `within` (E,) are the paths that there are: the others are closed.
    """
    there = torch.ones_like(logits) if within is None else within.to(logits.dtype)
    relaxed = binary_concrete(logits, noise, temperature) * there
    if kind == "relaxed":
        return relaxed
    rounded = keep_one_path((relaxed > 0.5).to(relaxed.dtype), logits.sigmoid() * there, blocks)
    return rounded.detach() + (relaxed - relaxed.detach())  # in brackets: an exact zero, so gates stay binary
