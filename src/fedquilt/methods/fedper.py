"""FedPer (Arivazhagan et al. 2019). The head stays home, the base is averaged by sample count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.interface.messages import Roster
from fedquilt.interface.method import State
from fedquilt.methods.fedavg import FedAvg, kept_home
from fedquilt.sharing import Plan


@dataclass(frozen=True)
class FedPer(FedAvg):
    """The last `personal` units (K_P of the paper) never leave a client; the others are averaged as in FedAvg."""

    name: ClassVar[str] = "fedper"
    personal: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal < 1:
            raise ValueError(f"FedPer with personal={self.personal} has no head of its own: use the method 'fedavg'")

    def plan(self, state: State, roster: Roster) -> Plan:
        heads = []
        for member in roster.members:
            own = list(member.units)
            if len(own) <= self.personal:
                raise ValueError(
                    f"client '{member.name}' has {len(own)} unit(s), so personal={self.personal} leaves nothing to "
                    "share: use the method 'local', or a smaller number"
                )
            heads.append(own[-self.personal :])
        return super().plan(state, roster).but(kept_home(roster, heads))
