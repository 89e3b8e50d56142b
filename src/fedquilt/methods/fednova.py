"""FedNova (Wang et al. 2020, eq. 6-7 for plain SGD). Whoever takes more steps in a round has no more say for that.

    d_i = (w - theta_i) / (eta tau_i)            the client's mean gradient along its tau_i steps
    w  <- w - tau_eff eta sum_i p_i d_i,         p_i = n_i / n and tau_eff = sum_i p_i tau_i over those who took part
       =  w + sum_i p_i tau_eff / tau_i (theta_i - w)

Clients send models as in FedAvg and how many steps they took; with as many for everyone it is FedAvg. Each circle has
its own p_i and tau_eff. Deviations: momentum, which the paper covers as well, is refused; running statistics are
averaged, weighted by p_i / tau_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.me import Me
from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Heard, Method, State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.sharing import Plan, UnitPlan


@dataclass(frozen=True)
class FedNova(Method):
    """FedAvg of what clients did per step, so that those who take many do not draw the model to themselves."""

    name: ClassVar[str] = "fednova"
    needs_plain_sgd: ClassVar[bool] = True

    def local(self) -> tuple[Step, ...]:
        return Install(), Train(), Do(self._count, reports=("steps",))

    def _count(self, me: Me) -> Mapping[str, Tensor]:
        return {"steps": me.steps}

    def begin(self, roster: Roster) -> State:
        return {"steps": torch.zeros(len(roster))}  # in the last round; 0 for whoever took no part in it

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        steps = torch.zeros(len(roster))
        ids, said = updates.report("steps")
        steps[ids] = said.cpu().nan_to_num(1.0).clamp(min=1.0)
        return {"steps": steps}

    def plan(self, state: State, roster: Roster) -> Plan:
        circles = {unit: circles_of_shape(roster, unit) for unit in roster.units}
        return Plan({unit: UnitPlan(c, _weights(c, roster.samples, state["steps"])) for unit, c in circles.items()})

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:  # fmt: skip
        """Weights are not made to add up to 1: `merged - held` times their sum is the sum of weighted moves."""
        return held + heard.weight * (merged - held), memory


def _weights(circle: Tensor, samples: Tensor, steps: Tensor) -> Tensor:
    """(K,) p_i tau_eff / tau_i in each circle; whoever took no part is not heard, and counts as if tau_i = tau_eff."""
    took = steps > 0
    row = circle - circle.min()  # (K,) from 0
    nothing = torch.zeros(int(row.max()) + 1)
    total, walked = (nothing.index_add(0, row, each * took)[row] for each in (samples, samples * steps))  # (K,)
    total = total.clamp(min=1.0)  # before anybody took part weights are samples
    return samples / total * torch.where(took, walked / total / steps.clamp(min=1.0), 1.0)
