"""LG-FedAvg (Liang et al. 2020, Algorithm 1). Representations are a client's own, what is made of them is everybody's.

    (l_i, g_i) <- local training from (l_i, g);    g <- sum_i (n_i / n) g_i;    l_i never leaves its client

This is FedPer turned upside down: the bottom stays home and the top is shared. Deviations: the authors' code weighs all
clients alike, starts from a model that FedAvg has trained, and reports each client's best round on its test samples;
here copies are weighted by samples, training starts from the first weights, and no round is picked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.interface.messages import Roster
from fedquilt.interface.method import State
from fedquilt.methods.fedavg import FedAvg, kept_home
from fedquilt.sharing import Plan


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """The last `shared` units are averaged as in FedAvg; those below never leave a client."""

    name: ClassVar[str] = "lg-fedavg"
    shared: int = 1

    def __post_init__(self) -> None:
        if self.shared < 1:
            raise ValueError(f"LG-FedAvg with shared={self.shared} shares nothing: use the method 'local'")

    def plan(self, state: State, roster: Roster) -> Plan:
        bottoms = []
        for member in roster.members:
            own = list(member.units)
            if len(own) <= self.shared:
                raise ValueError(
                    f"client '{member.name}' has {len(own)} unit(s), so shared={self.shared} leaves none at home: use "
                    "the method 'fedavg', or a smaller number"
                )
            bottoms.append(own[: -self.shared])
        return super().plan(state, roster).but(kept_home(roster, bottoms))
