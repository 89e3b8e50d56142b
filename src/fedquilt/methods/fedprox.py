"""FedProx (Li et al. 2020, eq. 2). FedAvg whose clients also minimise mu/2 ||theta - received||^2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fedquilt.engines.objective import proximal, task_loss
from fedquilt.interface.steps import Install, Step, Train
from fedquilt.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a pull towards the received model while training."""

    name: ClassVar[str] = "fedprox"
    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ValueError(f"FedProx with mu={self.mu} would push clients apart; give a finite mu above 0")
        if self.mu == 0:
            raise ValueError("FedProx with mu=0 is FedAvg: use the method 'fedavg'")

    def local(self) -> tuple[Step, ...]:
        return Install(), Train(task_loss() + proximal(self.mu))
