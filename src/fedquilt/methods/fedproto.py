"""FedProto (Tan et al. 2022, Algorithm 1). Clients share what their labels look like inside, and no parameters at all.

    own prototype of label j      C_ij = mean of f_i(x) over the client's samples of it        f_i: features
    global prototype              C_j  = sum_i (n_ij / n_j) C_ij                               over those who have it
    a client minimises            CE + lambda ||f_i(x) - C_y||^2 / width
    and predicts                  the label whose global prototype is nearest

A unit is a label's prototype; models, of any architecture with features of one width, never leave. Squared distances
are means over the width, as in the authors' code; a label without a prototype yet pulls nobody.

Deviations: global prototypes are weighted by samples, as in the paper (the authors' code weighs clients alike); own
ones are of the model after training, not of the models along its last epoch. All labels that have a prototype can be
predicted, not the client's own alone. `by="head"` predicts with the model's own scores. Clients whose features have
unlike widths share among those of one width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import Batch
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.steps import Do, Install, Send, Step, Train
from fedquilt.methods.prototypes import (
    given_prototypes,
    known_prototypes,
    near_prototypes,
    own_prototypes,
    shared_prototypes,
    with_prototypes,
    with_samples,
)
from fedquilt.sharing import Plan, nobody
from fedquilt.sharing.scores import NEVER


@dataclass(frozen=True)
class FedProto(Method):
    """Clients share the mean features of each label, stay near them by `lam`, and predict the nearest.

    `by` says what predicts: prototypes, or the model's own head.
    """

    name: ClassVar[str] = "fedproto"
    needs_classes: ClassVar[str] = "shares a prototype of each class"
    predicts_logits: ClassVar[bool] = False
    sends_parameters: ClassVar[bool] = False
    lam: float = 1.0
    by: Literal["prototypes", "head"] = "prototypes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lam < math.inf:
            raise ValueError(
                f"FedProto with lam={self.lam} has models that nobody's prototypes teach: use the method 'local', or "
                "give a finite one above 0"
            )

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        return with_prototypes(model, member, classes)

    def local(self) -> tuple[Step, ...]:
        near = Train(near_prototypes(self.lam), given=given_prototypes)
        return Install(), near, Do(own_prototypes, data="train", reports=("samples",)), Send(with_samples)

    def predict(self, me: Me, batch: Batch) -> Tensor:
        features, scores = me.model.features(batch.x)
        if self.by == "head":
            return scores
        prototypes = known_prototypes(me)
        far = prototypes.square().sum(1) - 2 * features @ prototypes.T  # (n, classes), less what all labels have alike
        known = (prototypes != 0).any(1)
        wide = nn.functional.pad(scores, (0, me.classes - scores.shape[1]), value=NEVER)
        return torch.where(known.any(), torch.where(known, -far, NEVER), wide)  # before any is known, the model's own

    # --- server half -----------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        return {"counts": torch.zeros(len(roster), roster.classes)}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        ids, counts = updates.report("samples")
        return {"counts": state["counts"].index_copy(0, ids, counts.cpu())}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        return {"counts": nn.functional.pad(state["counts"], (0, 0, 0, len(roster) - len(before)))}

    def plan(self, state: State, roster: Roster) -> Plan:
        prototypes = shared_prototypes(roster, state["counts"])
        return nobody([unit for unit in roster.units if unit not in prototypes.units], len(roster)) | prototypes
