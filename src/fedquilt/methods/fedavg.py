"""FedAvg (McMahan et al. 2017, Algorithm 1). Every unit in one circle, weighted by sample count.

Deviation: clients of unlike architectures average what they have in common, that is units of one name and one shape;
with one architecture this is the paper's algorithm to the letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.messages import Roster
from fedquilt.methods.base import Method, State
from fedquilt.sharing import Plan, UnitPlan


def circles_of_shape(roster: Roster, unit: str, within: Sequence[object] | None = None) -> Tensor:
    """(K,) a circle for each shape a unit comes in, and each value of `within`; -1 for clients that lack the unit."""
    within = within if within is not None else [None] * len(roster)
    shapes = roster.signatures()[unit]
    keys = [None if shape is None else (shape, value) for shape, value in zip(shapes, within, strict=True)]
    number: dict[object, int] = {}
    return torch.tensor([-1 if key is None else number.setdefault(key, len(number)) for key in keys])


@dataclass(frozen=True)
class FedAvg(Method):
    """One model for all, the sample-weighted mean of all clients' models."""

    name: ClassVar[str] = "fedavg"

    def plan(self, state: State, roster: Roster) -> Plan:
        samples = roster.samples
        return Plan({unit: UnitPlan(circles_of_shape(roster, unit), samples) for unit in roster.units})
