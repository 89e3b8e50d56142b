"""Ditto (Li et al. 2021, Algorithm 1). A personal model beside the shared one, drawn to it but never sent.

    w_i <- w - eta grad F_i(w_i)                           the shared model, as in FedAvg
    v_i <- v_i - eta (grad F_i(v_i) + lambda (v_i - w))    the personal model; w is what was received

A client predicts with v_i. Both see the same batches in the same order; as neither looks at the other, training one
after the other is what the paper's alternating steps are. `personal_epochs` lets v_i train longer or shorter than w_i.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedquilt.me import Me
from fedquilt.messages import Member, Roster
from fedquilt.methods.base import State
from fedquilt.methods.fedavg import FedAvg
from fedquilt.parts import Parts
from fedquilt.sharing import Plan, nobody
from fedquilt.steps import Install, Step, Train
from fedquilt.training.objective import cross_entropy, proximal


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg, and beside it a model of one's own that stays close to the shared one: the closer the higher `lam`."""

    name: ClassVar[str] = "ditto"
    lam: float = 1.0
    personal_epochs: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"Ditto with lam={self.lam} would push models apart; give a finite one above 0")
        if self.lam == 0:
            raise ValueError("Ditto with lam=0 trains its personal models alone: use the method 'local'")

    def parts(self, model: nn.Module, member: Member, classes: int) -> Parts:
        return Parts({"shared": model, "personal": copy.deepcopy(model)}, predicts="personal")

    def local(self) -> tuple[Step, ...]:
        near = cross_entropy("personal") + proximal(self.lam, part="personal", to="received")
        return (
            Install(),
            Train(cross_entropy("shared"), "shared/*"),
            Train(near, "personal/*", self.personal_epochs, given=self._received),
        )

    def _received(self, me: Me) -> Mapping[str, Tensor]:
        return {"received": me.received.parameters("shared")}

    def plan(self, state: State, roster: Roster) -> Plan:
        own = [unit for unit in roster.units if unit.startswith("personal/")]
        return super().plan(state, roster).but(nobody(own, len(roster)).units)
