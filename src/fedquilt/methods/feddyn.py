"""FedDyn (Acar et al. 2021, Algorithm 1). Clients' losses are bent so that they agree where the common loss is lowest.

    theta_i <- argmin F_i(theta) - <h_i, theta> + alpha/2 ||theta - w||^2     by local training from the received w
    h_i <- h_i - alpha (theta_i - w)                                          stays home, starts at 0
    h <- h - alpha / N sum_S (theta_i - w);      w <- mean_S theta_i - h / alpha

Clients weigh alike, as in the paper. Models travel and nothing else; the read-out `received` is w, not the mean. h goes
with its circle. Deviation: running statistics are averaged, no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import linear, proximal, task_loss
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import Heard, Method, State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.sharing import PRIVATE, Plan, UnitPlan


@dataclass(frozen=True)
class FedDyn(Method):
    """FedAvg whose clients' losses are regularised anew in each round, by `alpha` and by where they went before."""

    name: ClassVar[str] = "feddyn"
    alpha: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"FedDyn with alpha={self.alpha} would push clients apart; give a finite one above 0")
        if self.alpha == 0:
            raise ValueError("FedDyn with alpha=0 is FedAvg, its clients weighing alike: use the method 'fedavg'")

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        nothing = torch.zeros(sum(p.numel() for p in model.parameters() if p.requires_grad))
        return Parts(model, state={"h_i": nothing})

    def local(self) -> tuple[Step, ...]:
        bent = task_loss() + linear("slope") + proximal(self.alpha)
        return Install(), Train(bent, given=self._slope), Do(self._remember)

    def _slope(self, me: Me) -> Mapping[str, Tensor]:
        return {"slope": -me.values["h_i"]}

    def _remember(self, me: Me) -> Mapping[str, Tensor]:
        """h_i is the gradient of the client's own loss where its training ended, if it went all the way."""
        way = me.values.parameters() - me.received.parameters()
        return {"h_i": me.values["h_i"] - self.alpha * way}

    def plan(self, state: State, roster: Roster) -> Plan:
        units = {unit: UnitPlan(circles_of_shape(roster, unit)) for unit in roster.units}
        return Plan(units | {"h_i": UnitPlan(torch.full((len(roster),), PRIVATE))})

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:  # fmt: skip
        h = memory.get("h", torch.zeros_like(held)) - self.alpha * heard.share * (merged - held)
        return merged - h / self.alpha, {"h": h}
