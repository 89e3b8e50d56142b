"""FedPer (Arivazhagan et al. 2019). The head stays home, the base is averaged by sample count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.messages import Roster
from fedquilt.methods.base import State
from fedquilt.methods.fedavg import FedAvg, circles_of_shape
from fedquilt.sharing import PRIVATE, Plan, UnitPlan


@dataclass(frozen=True)
class FedPer(FedAvg):
    """The last `personal` units (K_P of the paper) never leave a client; the others are averaged as in FedAvg."""

    name: ClassVar[str] = "fedper"
    personal: int = 1

    def __post_init__(self) -> None:
        if self.personal < 1:
            raise ValueError(f"FedPer with personal={self.personal} has no head of its own: use the method 'fedavg'")

    def plan(self, state: State, roster: Roster) -> Plan:
        heads: dict[str, list[int]] = {}  # the clients whose head a unit is in
        for number, member in enumerate(roster.members):
            own = list(member.units)
            if len(own) <= self.personal:
                raise ValueError(
                    f"client '{member.name}' has {len(own)} unit(s), so personal={self.personal} leaves nothing to "
                    "share: use the method 'local', or a smaller number"
                )
            for unit in own[-self.personal :]:
                heads.setdefault(unit, []).append(number)
        at_home = {}
        for unit, owners in heads.items():
            circle = circles_of_shape(roster, unit)
            circle[owners] = PRIVATE
            at_home[unit] = UnitPlan(circle, roster.samples)
        return super().plan(state, roster).but(at_home)
