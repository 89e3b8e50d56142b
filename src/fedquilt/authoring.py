"""Everything that authors of methods and read-outs import, in one place.

>>> from dataclasses import dataclass
>>> from typing import ClassVar
>>> from fedquilt.authoring import Method, Plan, Roster, State, by_trait
>>> @dataclass(frozen=True)
... class Neighbours(Method):
...     name: ClassVar[str] = "neighbours"
...     trait: str = "device"
...
...     def plan(self, state: State, roster: Roster) -> Plan:
...         return by_trait(roster.units, roster.trait(self.trait), roster.samples)
>>> import fedquilt as fq
>>> clients = fq.scenarios.build("digits", clients=8)
>>> print(fq.run(clients, Neighbours(), rounds=1, engine="sequential", alone=False).plan)
configuration  2 circles of 4, 4
operation      2 circles of 4, 4
"""

from fedquilt.me import Me
from fedquilt.messages import Member, Roster, Updates
from fedquilt.methods.base import Heard, Method, State
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.parts import Parts
from fedquilt.readouts.base import Look, Readout
from fedquilt.sharing import (
    PRIVATE,
    MixedUnit,
    Plan,
    UnitPlan,
    affinity,
    by_labels,
    by_trait,
    cluster_updates,
    everyone,
    group_by_affinity,
    nobody,
)
from fedquilt.steps import Do, Install, Send, Step, Train, but_last, last
from fedquilt.training.layers import cross_entropies
from fedquilt.training.objective import Batch, Learner, Model, Objective, cross_entropy, linear, proximal
from fedquilt.units import Unit, cut

__all__ = [
    "PRIVATE",
    "Batch",
    "Do",
    "Heard",
    "Install",
    "Learner",
    "Look",
    "Me",
    "Member",
    "Method",
    "MixedUnit",
    "Model",
    "Objective",
    "Parts",
    "Plan",
    "Readout",
    "Roster",
    "Send",
    "State",
    "Step",
    "Train",
    "Unit",
    "UnitPlan",
    "Updates",
    "affinity",
    "but_last",
    "by_labels",
    "by_trait",
    "circles_of_shape",
    "cluster_updates",
    "cross_entropies",
    "cross_entropy",
    "cut",
    "everyone",
    "group_by_affinity",
    "last",
    "linear",
    "nobody",
    "proximal",
]
