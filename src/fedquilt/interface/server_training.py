"""Training at the server: values learn on samples that it holds, by Adam, until others that it kept aside say stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from fedquilt.engines.optim import Optimiser
from fedquilt.engines.settings import Training

_ROUNDING = 1e-6  # a loss that is lower by less is not: chance would decide which values are the best
Loss = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # of values, and of the places of some samples


@dataclass(frozen=True)
class ServerTraining:
    """Up to `steps` steps of Adam on batches; the rate falls to 0 along a cosine over all of them.

    One in `aside` samples is kept aside. After each pass over the others the loss there is looked at: what counts is
    the best of all values seen, the first ones among them, and nothing better for `patience` steps is the end.
    """

    rate: float
    steps: int
    patience: int
    batch: int
    aside: int = 5

    def __call__(
        self, loss: Loss, values: Mapping[str, Tensor], samples: int, seed: int
    ) -> tuple[dict[str, Tensor], tuple[float, float]]:
        """The best values, and the loss aside of the first and of the best; which samples are aside follows the seed.

        >>> near = lambda now, some: (now["w"] - 1).square().mean()
        >>> best, losses = ServerTraining(0.1, 200, 50, 4)(near, {"w": torch.zeros(1)}, 10, seed=0)
        >>> bool((best["w"] - 1).abs() < 0.01), losses[0] > losses[1]
        (True, True)
        """
        draw, device = torch.Generator().manual_seed(seed), next(iter(values.values())).device
        order = torch.randperm(samples, generator=draw).to(device)
        aside, own = order.tensor_split([-(-samples // self.aside)])
        now = {name: value.detach().clone() for name, value in values.items()}
        optimiser = Optimiser(Training(optimiser="adam", lr=self.rate), list(now.values()))
        best, since, first = dict(values), 0, float(loss(now, aside).detach())
        least, each_pass = first, -(-len(own) // self.batch)
        for step, some in zip(range(1, self.steps + 1), _batches(own, self.batch, draw), strict=False):
            rate = self.rate * (1 + math.cos(math.pi * (step - 1) / self.steps)) / 2
            optimiser.step(list(grad(loss)(now, some).values()), rate)
            if step % each_pass and step < self.steps:
                continue
            if (found := float(loss(now, aside).detach())) < least - _ROUNDING:
                best, since, least = {name: value.clone() for name, value in now.items()}, step, found
            elif step - since >= self.patience:
                break
        return best, (first, least)


def _batches(own: Tensor, batch: int, draw: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from own[torch.randperm(len(own), generator=draw).to(own.device)].split(batch)
