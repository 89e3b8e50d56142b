"""FedAvg (McMahan et al. 2017, Algorithm 1). Every unit in one circle, weighted by sample count.

Deviation: clients of unlike architectures average what they have in common, that is units of one name and one shape;
with one architecture this is the paper's algorithm to the letter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.messages import Roster
from fedquilt.interface.method import Method, State
from fedquilt.sharing import PRIVATE, Plan, UnitPlan


def circles_of_shape(roster: Roster, unit: str, within: Sequence[object] | None = None) -> Tensor:
    """(K,) a circle for each shape a unit comes in, and each value of `within`; -1 for clients that lack the unit.

    Nor is there a circle for a unit without numbers, of which all is frozen or constant.
    """
    within = within if within is not None else [None] * len(roster)
    shapes = roster.signatures()[unit]
    keys = [(shape, value) if shape else None for shape, value in zip(shapes, within, strict=True)]
    number: dict[object, int] = {}
    return torch.tensor([-1 if key is None else number.setdefault(key, len(number)) for key in keys])


def kept_home(roster: Roster, own: Sequence[Collection[str]]) -> dict[str, UnitPlan]:
    """Plans of the units that some clients keep home, `own` naming them client by client; whoever else has one shares.

    A unit may be the head of one client and lie in the middle of another's model.
    """
    owners: dict[str, list[int]] = {}
    for number, units in enumerate(own):
        for unit in units:
            owners.setdefault(unit, []).append(number)
    plans = {}
    for unit, numbers in owners.items():
        circle = circles_of_shape(roster, unit)
        circle[numbers] = PRIVATE
        plans[unit] = UnitPlan(circle, roster.samples)
    return plans


@dataclass(frozen=True)
class FedAvg(Method):
    """One model for all, the sample-weighted mean of all clients' models."""

    name: ClassVar[str] = "fedavg"

    def plan(self, state: State, roster: Roster) -> Plan:
        samples = roster.samples
        return Plan({unit: UnitPlan(circles_of_shape(roster, unit), samples) for unit in roster.units})
