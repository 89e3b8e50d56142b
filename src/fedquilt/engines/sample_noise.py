"""Training that is private for each sample (DP-SGD, Abadi et al. 2016): clipped gradients of single samples, and noise.

gradient of a step = (sum over the batch of g_i min(1, C / |g_i|) + N(0, (z C)^2)) / samples of the batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt._util.randomness import GOLDEN, mix, signed
from fedquilt.families.layout import Layout
from fedquilt.privacy.mechanism import gaussian, shrink

NOISE = "dp: keys"  # among what a step is given: what each client's noise is drawn by, (k, 1)
APART = 2**40  # between what neighbours in a batch draw


@dataclass(frozen=True)
class SampleNoise:
    """How long the gradient of a sample may be, and the noise of a sum of them, in lengths of the clip."""

    clip: float
    noise: float

    def clipped(self, gradients: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
        """The sums over a batch of gradients (batch, ...), each sample's shortened over all of them together.

        One that is not finite, or has no finite length, adds nothing: there is no shortening it, and a sum that it
        spoilt would tell that it was there. It is counted among the batch, as any other.
        """
        squares = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients]).square().sum(0)
        finite = squares.isfinite()
        factor = torch.where(finite, shrink(squares, self.clip), 0.0)
        factor = factor if mask is None else factor * mask
        # of such a gradient 0 times a number may be no number, so it is 0 itself
        kept = (torch.where(finite.view(-1, *[1] * (g.ndim - 1)), g, 0.0) for g in gradients)
        return [torch.einsum("b,b...->...", factor, g) for g in kept]

    def drawn(self, keys: Tensor, step: int | Tensor, layout: Layout) -> dict[str, Tensor]:
        """The noise of clients (k,) in a step, by parameter, (k, ...)."""
        turn = signed(step * GOLDEN % 2**64) if isinstance(step, int) else step * signed(GOLDEN)
        flat = self.noise * self.clip * gaussian(mix(keys + turn), layout.parameters)
        places = {name: layout.places[name] for name in layout.parameter_names}
        return {name: flat[:, at.start : at.stop].view(len(keys), *at.shape) for name, at in places.items()}


def streams_of(draw: int, batch: int) -> list[int]:
    """What the samples of a batch draw by, each by itself."""
    return [draw + (place + 1) * APART for place in range(batch)]


def with_noise(gradients: Mapping[str, Tensor], noise: Mapping[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
    """Sums of gradients (k, ...) with noise, over how many samples they are of, (k,)."""
    return {
        name: (g + noise[name]) / counts.clamp(min=1).view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()
    }
