"""Ditto (Li et al. 2021, Algorithm 1). A personal model beside the shared one, drawn to it but never sent.

    w_i <- w - eta grad F_i(w_i)                           the shared model, as in FedAvg
    v_i <- v_i - eta (grad F_i(v_i) + lambda (v_i - w))    the personal model; w is what was received

A client predicts with v_i. Both see the same batches in the same order; as neither looks at the other, training one
after the other is what the paper's alternating steps are. `personal_epochs` lets v_i train longer or shorter than w_i.

With several `lams` a client tries each of them in each round, from the v_i that it has, and keeps what has the lowest
loss on its validation samples: the authors' `dynamic_lam`. Without validation samples it keeps to the first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import proximal, task_loss
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods.fedavg import FedAvg
from fedquilt.sharing import Plan, nobody


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg, and beside it a model of one's own that stays close to the shared one: the closer the higher `lam`."""

    name: ClassVar[str] = "ditto"
    lam: float = 1.0
    personal_epochs: int | None = None
    lams: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if any(not 0 < lam < math.inf for lam in self.lams) or len(self.lams) == 1:
            raise ValueError(f"ditto: lams={self.lams} is no choice; give several finite ones above 0, or one as lam")
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"Ditto with lam={self.lam} would push models apart; give a finite one above 0")
        if self.lam == 0:
            raise ValueError("Ditto with lam=0 trains its personal models alone: use the method 'local'")

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        names = ["personal", *self._tries]
        return Parts({"shared": model} | {name: copy.deepcopy(model) for name in names}, predicts="personal")

    @property
    def _tries(self) -> dict[str, float]:
        """The models that a client tries its choice with, each with its lambda."""
        return {f"try_{number}": lam for number, lam in enumerate(self.lams)}

    def local(self) -> tuple[Step, ...]:
        shared = Train(task_loss("shared"), "shared/*")
        if not self.lams:
            return Install(), shared, self._near("personal", self.lam)
        tries = [self._near(name, lam) for name, lam in self._tries.items()]
        return Install(), shared, Do(self._begin), *tries, Do(self._choose, data="validation")

    def _near(self, part: str, lam: float) -> Train:
        """Training of a model that is drawn to the received one."""
        near = task_loss(part) + proximal(lam, part=part, to="received")
        return Train(near, f"{part}/*", self.personal_epochs, given=self._received)

    def _begin(self, me: Me) -> Mapping[str, Tensor]:
        mine = {unit.removeprefix("personal/"): unit for unit in me.values if unit.startswith("personal/")}
        return {f"{name}/{unit}": me.values[own] for name in self._tries for unit, own in mine.items()}

    def _choose(self, me: Me) -> Mapping[str, Tensor]:
        """What does best on validation samples; the first where there are none."""
        data = me.data
        assert data is not None
        losses = [data.loss(me.model.part(name)(data.x)) for name in self._tries]
        best = torch.stack(losses).nan_to_num(torch.inf).argmin().view(1)
        units = [unit.removeprefix("personal/") for unit in me.values if unit.startswith("personal/")]
        return {
            f"personal/{unit}": torch.stack([me.values[f"{name}/{unit}"] for name in self._tries])
            .index_select(0, best)
            .squeeze(0)
            for unit in units
        }

    def _received(self, me: Me) -> Mapping[str, Tensor]:
        return {"received": me.received.parameters("shared")}

    def plan(self, state: State, roster: Roster) -> Plan:
        own = [unit for unit in roster.units if not unit.startswith("shared/")]
        return super().plan(state, roster).but(nobody(own, len(roster)).units)
