"""FedBN (Li et al. 2021). Layers that normalise stay home, with their running statistics; all else is averaged.

Such layers are found by their type, never by a name. Deviations: those that normalise without a batch (layer, group and
instance norms) stay home as well; copies are weighted by samples, where the authors' code weighs all clients alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import State
from fedquilt.methods.fedavg import FedAvg, kept_home
from fedquilt.sharing import Plan


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg of everything but the layers that normalise."""

    name: ClassVar[str] = "fedbn"

    def plan(self, state: State, roster: Roster) -> Plan:
        norms = [_norms(member) for member in roster.members]
        if not any(norms):
            raise ValueError(
                f"FedBN on models without layers that normalise, as that of client '{roster.names[0]}', is FedAvg: use "
                "the method 'fedavg'"
            )
        return super().plan(state, roster).but(kept_home(roster, norms))


def _norms(member: ClientInfo) -> list[str]:
    """The units of a client that normalise."""
    for unit, kinds in member.kinds.items():
        if "norm" in kinds and len(kinds) > 1:
            others = ", ".join(kind for kind in kinds if kind != "norm")
            raise ValueError(
                f"fedbn: unit '{unit}' of client '{member.name}' holds layers that normalise together with others "
                f"({others}); give its model `units` that keep them apart, or none: then every layer is a unit"
            )
    norms = [unit for unit, kinds in member.kinds.items() if kinds == ("norm",)]
    if len(norms) == len(member.units):
        raise ValueError(
            f"fedbn: all units of client '{member.name}' normalise, so nothing is left to share: use the method 'local'"
        )
    return norms
