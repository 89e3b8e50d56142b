"""Local training: no unit is shared. The bar that a federation must clear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.interface.messages import Roster
from fedquilt.interface.method import Method, State
from fedquilt.sharing import Plan, nobody


@dataclass(frozen=True)
class Local(Method):
    """Every client trains alone."""

    name: ClassVar[str] = "local"

    def plan(self, state: State, roster: Roster) -> Plan:
        return nobody(roster.units, len(roster))
