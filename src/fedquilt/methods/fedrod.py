"""FedRoD (Chen and Chao 2022). A shared model that is fair to all labels, and beside its head one of the client's own.

    z = body(x),  g = head(z),  p = own head(z)
    body, head:   cross-entropy of g + gamma log n_i          n_i: how many samples of each label the client has
    own head:     cross-entropy of g + p                      g and z taken as given, so that nothing else moves by it

The first loss (balanced softmax) takes a client's label frequencies out of what is shared; the second puts them back
where they belong. A client predicts with g + p. Body and head are averaged by sample count, the own head never leaves.

A label that a client has no samples of has log 0: its score is out of the client's balanced softmax, so that client
teaches the shared head nothing about it. Chosen here: the own head starts from the shared one's first weights. The
variant whose own heads come from a hyper-network of label frequencies is left out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.families.heads import head_of, through
from fedquilt.families.parts import Parts
from fedquilt.families.units import cut
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.layers.prepare import cross_entropies
from fedquilt.methods.fedavg import FedAvg
from fedquilt.sharing import Plan, nobody

_OWN = "personal/"
_NEVER = -1e9  # the logarithm of no samples; finite, so that gamma times it is a number


class TwoHeads(nn.Module):
    """A model and, beside its head, another on the same features; scores are the sum of both."""

    def __init__(self, model: nn.Module, head: str) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.personal = copy.deepcopy(model.get_submodule(head))

    def forward(self, x: Tensor, apart: bool = False) -> Tensor:
        """The sum of both heads' scores; `apart` gives the shared head's and the own one's, (2, n, classes)."""
        features, shared = through(self.model, self.head, x)
        own: Tensor = self.personal(features.detach())
        return torch.stack([shared, own]) if apart else shared + own


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """FedAvg with a loss that balances labels, by `gamma`, and beside the shared head one of each client's own."""

    name: ClassVar[str] = "fedrod"
    needs_classes: ClassVar[str] = "balances its loss by how often classes are"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gamma < math.inf:
            raise ValueError(
                f"FedRoD with gamma={self.gamma} does not balance labels: its shared model would be that of the method "
                "'fedavg'; give a finite one above 0"
            )

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        head, units = head_of(model, member.name), cut(model)
        inside = {unit.name: [f"model.{n}" for n in unit.parameters + unit.buffers] for unit in units}
        inside[_OWN + units[-1].name] = ["personal"]
        return Parts(TwoHeads(model, head), state={"counts": torch.zeros(classes)}, units=inside)

    def local(self) -> tuple[Step, ...]:
        both = Train(Objective((self._losses,)), given=lambda me: {"counts": me.values["counts"]})
        return Install(), Do(self._count, data="train"), both

    def _count(self, me: Me) -> Mapping[str, Tensor]:
        assert me.data is not None
        return {"counts": me.data.of_labels(me.classes).sum(1)}

    def _losses(self, me: Learner, batch: Batch) -> Tensor:
        """Both losses at once: what one of them moves, the other takes as given."""
        shared, own = me.model(batch.x, apart=True)
        prior = me.given["counts"][: shared.shape[1]].log().clamp(min=_NEVER)
        balanced = cross_entropies(shared + self.gamma * prior, batch.y)
        return batch.mean(balanced + cross_entropies(shared.detach() + own, batch.y))

    # --- server half -----------------------------------------------------------------------------------------------

    def plan(self, state: State, roster: Roster) -> Plan:
        own = [unit for unit in roster.units if unit.startswith(_OWN)]
        return super().plan(state, roster).but(nobody([*own, "counts"], len(roster)).units)
