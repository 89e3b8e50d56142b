"""Per-FedAvg (Fallah et al. 2020, Algorithm 1). A start from which one step on a client's own data goes far.

    w~  = w - alpha grad f(w; D)
    FO    w <- w - eta grad f(w~; D')
    HF    w <- w - eta (g - alpha d),   g = grad f(w~; D'),
          d = (grad f(w + delta g; D'') - grad f(w - delta g; D'')) / (2 delta)

D, D' and D'' are the thirds (halves, for FO) of a batch; a batch with fewer samples than that is all of them. The
server averages as FedAvg does. Clients predict after one epoch of plain SGD with rate alpha on their training samples:
that is the read-out `fine-tuned`, by which results are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.interface.steps import Install, Step, Train
from fedquilt.methods.fedavg import FedAvg

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """FedAvg of meta-gradients: `order` is first (FO) or hessian-free (HF), `alpha` the rate of a client's own step."""

    name: ClassVar[str] = "per-fedavg"
    readout: ClassVar[str] = "fine-tuned"
    order: Literal["first", "hessian-free"] = "first"
    alpha: float = 0.01
    delta: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0 or not self.delta > 0:
            raise ValueError(
                f"per-fedavg: alpha={self.alpha} and delta={self.delta} must be above 0; without a step of its own a "
                "client does FedAvg: use the method 'fedavg'"
            )

    def local(self) -> tuple[Step, ...]:
        meta = Train(Objective((self._meta,)), when="round")
        return Install(), meta, Train(epochs=1, lr=self.alpha, when="tuning")

    def _meta(self, me: Learner, batch: Batch) -> Tensor:
        """A loss whose gradient is the meta-gradient, and whose value is f(w~; D')."""
        if any(True for _ in me.model.module.buffers()):
            me.model(batch.x)  # running statistics are those of w
        now = {name: value.detach() for name, value in me.parameters.items()}
        first, second, *third = self._losses(me, batch)
        stepped = _moved(now, grad(first)(now), -self.alpha)
        slope, value = grad(second)(stepped), second(stepped)
        if third:
            ahead, back = (grad(third[0])(_moved(now, slope, way * self.delta)) for way in (1, -1))
            curve = {name: (ahead[name] - back[name]) / (2 * self.delta) for name in now}
            slope = _moved(slope, curve, -self.alpha)
        reach = torch.stack([(slope[name].detach() * value).sum() for name, value in me.parameters.items()]).sum()
        return reach + (value - reach).detach()

    def _losses(self, me: Learner, batch: Batch) -> list[Callable[[Weights], Tensor]]:
        """f on each part of a batch, as functions of the weights."""
        parts = 2 if self.order == "first" else 3
        real = torch.ones(len(batch.y), device=batch.y.device) if batch.mask is None else batch.mask
        turn = torch.arange(len(batch.y), device=batch.y.device) % parts
        few = real.sum() < parts

        def loss_on(part: int) -> Callable[[Weights], Tensor]:
            mine = replace(batch, mask=torch.where(few, real, real * (turn == part)))

            def loss(weights: Weights) -> Tensor:
                return mine.loss(me.model.at(weights)(batch.x))

            return loss

        return [loss_on(part) for part in range(parts)]


def _moved(weights: Weights, way: Weights, far: float) -> dict[str, Tensor]:
    return {name: value + far * way[name] for name, value in weights.items()}
