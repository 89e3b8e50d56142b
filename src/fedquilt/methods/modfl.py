"""ModFL: modules of one model federate with different peers (configuration by device, operation by cohort)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fedquilt.messages import Roster
from fedquilt.methods.base import Method, State
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.sharing import Plan, UnitPlan


@dataclass(frozen=True)
class ModFL(Method):
    """`by` says for each module which trait its circles follow."""

    name: ClassVar[str] = "modfl"
    by: Mapping[str, str] = field(default_factory=lambda: {"configuration": "device", "operation": "cohort"})

    def begin(self, roster: Roster) -> tuple[State, Plan]:
        plans = {}
        for unit in roster.units:
            if unit not in self.by:
                raise ValueError(f"modfl: the module '{unit}' follows no trait; add it to `by`, e.g. by.{unit}=cohort")
            circle = circles_of_shape(roster, unit, within=roster.trait(self.by[unit]))
            plans[unit] = UnitPlan(circle, roster.samples)
        return {}, Plan(plans)
