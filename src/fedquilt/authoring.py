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

from fedquilt.engines.objective import Batch, Learner, Model, Objective, linear, proximal, task_loss
from fedquilt.families.parts import Parts
from fedquilt.families.units import Unit, cut
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.method import Heard, Method, State
from fedquilt.interface.readout import EvaluationContext, Readout
from fedquilt.interface.sent_models import SentModels
from fedquilt.interface.server_training import ServerTraining
from fedquilt.interface.steps import Do, Install, Send, Step, Train, but_last, last
from fedquilt.layers.prepare import cross_entropies
from fedquilt.methods.fedavg import circles_of_shape
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

__all__ = [
    "PRIVATE",
    "Batch",
    "ClientInfo",
    "Do",
    "EvaluationContext",
    "Heard",
    "Install",
    "Learner",
    "Me",
    "Method",
    "MixedUnit",
    "Model",
    "Objective",
    "Parts",
    "Plan",
    "Readout",
    "Roster",
    "Send",
    "SentModels",
    "ServerTraining",
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
    "cut",
    "everyone",
    "group_by_affinity",
    "last",
    "linear",
    "nobody",
    "proximal",
    "task_loss",
]
