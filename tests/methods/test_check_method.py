"""What authors of methods are told where one does not hold what methods have to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedquilt.authoring import Method, Plan, Roster, State, UnitPlan, Updates
from fedquilt.testing import check_method


@dataclass(frozen=True)
class Forgetful(Method):
    """Two groups that are found after a round, and forgotten when somebody joins."""

    name: ClassVar[str] = "forgetful"

    def begin(self, roster: Roster) -> State:
        return {"group": torch.zeros(len(roster), dtype=torch.int64)}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        return {"group": torch.arange(len(roster)) % 2}

    def plan(self, state: State, roster: Roster) -> Plan:
        return Plan({unit: UnitPlan(state["group"], roster.samples) for unit in roster.units})


class Mindful(Forgetful):
    """The same, and it keeps them."""

    name: ClassVar[str] = "mindful"

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        return {"group": torch.cat([state["group"], torch.zeros(len(roster) - len(before), dtype=torch.int64)])}


def test_groups_that_are_forgotten_when_somebody_joins_are_told_of_with_the_cure() -> None:
    with pytest.raises(AssertionError, match=r"regroups.*: let `enrol` keep what was found$"):
        check_method(Forgetful(), only=["newcomer", "participation"])
    assert check_method(Mindful(), only=["newcomer", "participation"]) == ["newcomer", "participation"]
