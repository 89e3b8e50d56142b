"""pFedMe (T. Dinh et al. 2020, Algorithm 1). Personal models by Moreau envelopes; the shared model follows them.

    for each batch D    theta_i <- `steps` times: theta_i - rate (grad f(theta_i; D) + lambda (theta_i - w_i))
                        w_i <- w_i - eta lambda (w_i - theta_i)
    w <- (1 - beta) w + beta mean_S w_i

theta_i starts each round from the received w and goes on from batch to batch, as in the authors' code. Clients predict
with theta_i and send w_i. They weigh alike, as in the paper. As theta_i is put in place by one step of plain SGD for
each batch, momentum and weight decay are refused. Deviations: a round is epochs over a client's samples, not R batches;
only clients that are chosen train, where all of the paper's do and some are heard. Its theory wants eta < 1 / lambda.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import Heard, Method, State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.sharing import Plan, UnitPlan, nobody


@dataclass(frozen=True)
class PFedMe(Method):
    """A model of one's own near the shared one, by `lam`; on each batch it takes `steps` steps of size `rate`.

    `beta` is how far the server goes towards the mean; it may go beyond.
    """

    name: ClassVar[str] = "pfedme"
    needs_plain_sgd: ClassVar[bool] = True
    needs_no_decay: ClassVar[bool] = True
    lam: float = 15.0
    steps: int = 5
    rate: float = 0.05
    beta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.lam < math.inf or not 0 < self.beta < math.inf:
            raise ValueError(
                f"pFedMe with lam={self.lam}, beta={self.beta} has a shared model that never moves: use the method "
                "'local', or give finite ones above 0"
            )
        if self.steps < 1 or not 0 < self.rate * self.lam < 2:
            raise ValueError(
                f"pfedme: steps={self.steps} of rate={self.rate} find no personal model with lam={self.lam}; give at "
                "least 1, and a rate above 0 and below 2 / lam"
            )

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        return Parts({"shared": model, "personal": copy.deepcopy(model)}, predicts="personal")

    # --- client half -----------------------------------------------------------------------------------------------

    def local(self) -> tuple[Step, ...]:
        return Install(), Do(self._begin), Train(Objective((self._envelope,)), given=self._size)

    def _begin(self, me: Me) -> Mapping[str, Tensor]:
        shared = [unit for unit in me.values if unit.startswith("shared/")]
        return {"personal/" + unit.removeprefix("shared/"): me.values[unit] for unit in shared}

    def _size(self, me: Me) -> Mapping[str, Tensor]:
        return {"lr": me.number(me.lr)}

    def _envelope(self, me: Learner, batch: Batch) -> Tensor:
        """A loss whose gradients take w_i and theta_i where they go on this batch; its value is f(theta_i; D)."""
        personal = {name: value for name, value in me.parameters.items() if name.startswith("personal.")}
        shared = {name: me.parameters["shared." + name.removeprefix("personal.")] for name in personal}
        if any(True for _ in me.model.module.buffers()):  # running statistics are those before the steps
            me.model.part("personal")(batch.x), me.model.part("shared")(batch.x)

        def loss(at: Mapping[str, Tensor]) -> Tensor:
            return batch.loss(me.model.part("personal").at(at)(batch.x))

        theta, w = ({name: value.detach() for name, value in model.items()} for model in (personal, shared))
        for _ in range(self.steps):
            slope = grad(loss)(theta)
            theta = {n: v - self.rate * (slope[n] + self.lam * (v - w[n])) for n, v in theta.items()}
        ways = [self.lam * (shared[n] * (w[n] - theta[n])).sum() for n in theta]
        ways += [(personal[n] * (personal[n].detach() - theta[n]) / me.given["lr"]).sum() for n in theta]
        reach = torch.stack(ways).sum()
        return reach + (loss(theta) - reach).detach()

    # --- server half -----------------------------------------------------------------------------------------------

    def plan(self, state: State, roster: Roster) -> Plan:
        own = [unit for unit in roster.units if unit.startswith("personal/")]
        shared = [unit for unit in roster.units if unit not in own]
        together = Plan({unit: UnitPlan(circles_of_shape(roster, unit)) for unit in shared})
        return together | nobody(own, len(roster))

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:  # fmt: skip
        return held + self.beta * (merged - held), memory
