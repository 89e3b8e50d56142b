"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1, option II). Control variates take the drift out of local steps.

    y_i <- y_i - eta (g_i(y_i) - c_i + c)             K_i steps from the received x
    c_i' = c_i - c + (x - y_i) / (K_i eta);           sent are y_i and c_i' - c_i;  c_i <- c_i'
    x <- x + rate mean_S (y_i - x);                   c <- c + |S| / N mean_S (c_i' - c_i)

Clients weigh alike, as in the paper. K_i is the client's own number of steps and eta the rate of the round. What is
sent is twice the model, and counted. Option II reads gradients off the way that a client went, which holds for plain
SGD only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import linear, task_loss
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import Heard, Method, State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.methods.fedopt import check_rate
from fedquilt.sharing import PRIVATE, Plan, UnitPlan


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg with control variates: a client's steps are corrected by how its gradients differ from everybody's."""

    name: ClassVar[str] = "scaffold"
    needs_plain_sgd: ClassVar[bool] = True
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.name, self.rate)

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        nothing = torch.zeros(sum(p.numel() for p in model.parameters() if p.requires_grad))
        return Parts(model, state={"c": nothing, "c_i": nothing})

    def local(self) -> tuple[Step, ...]:
        corrected = task_loss() + linear("correction")
        return Install(), Train(corrected, given=self._correction), Do(self._control)

    def _correction(self, me: Me) -> Mapping[str, Tensor]:
        return {"correction": me.values["c"] - me.values["c_i"]}

    def _control(self, me: Me) -> Mapping[str, Tensor]:
        """Option II; what stands in the place of c is what is sent of it."""
        way = me.received.parameters() - me.values.parameters()
        new = me.values["c_i"] - me.values["c"] + way / (me.steps * me.lr)
        return {"c": new - me.values["c_i"], "c_i": new}

    def plan(self, state: State, roster: Roster) -> Plan:
        units = {unit: UnitPlan(circles_of_shape(roster, unit)) for unit in roster.units}
        return Plan(units | {"c_i": UnitPlan(torch.full((len(roster),), PRIVATE))})

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:  # fmt: skip
        if unit == "c":
            return held + heard.share * merged, memory
        return held + self.rate * (merged - held), memory
