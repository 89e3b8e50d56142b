"""FedDF (Lin et al. 2020, Algorithms 1 and 3). A mean for each architecture, which the server then teaches.

    w_p <- sum over clients of the architecture p of (n_i / n) theta_i              as in FedAvg
    t(x) = mean over all clients that sent of f_i(x; theta_i)                       logits, of every architecture
    w_p <- Adam steps on KL(softmax t(x) || softmax f_p(x; w_p))                    x: the server's, without labels

The rate falls to 0 along a cosine over `steps`. The server keeps a fifth of its samples aside, stops where the
divergence there has not fallen for `patience` steps, and takes the best that it saw, the mean itself included.

Settled here: the paper stops by accuracy on labelled samples of the server's; here no label is looked at. It goes up
to 10,000 steps with a patience of 1,000, on tens of thousands of samples; federations here hold hundreds. Models are
taught in eval mode: running statistics are those of the mean. Copies that are not finite are neither in the mean nor
teach. A class that a model does not know is taught by those who know it. An architecture that nobody sent rests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedquilt._util.randomness import key_of
from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Heard, Method, State
from fedquilt.interface.sent_models import SentModels
from fedquilt.interface.server_training import ServerTraining
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.sharing import PRIVATE, Plan, UnitPlan


@dataclass(frozen=True)
class FedDF(Method):
    """FedAvg for each architecture; the server then teaches each mean what all clients' models say together."""

    name: ClassVar[str] = "feddf"
    needs_classes: ClassVar[str] = "teaches by class scores"
    rate: float = 1e-3
    steps: int = 500
    patience: int = 100
    batch: int = 64

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.rate < math.inf:
            raise ValueError(
                f"FedDF with steps={self.steps} and rate={self.rate} teaches nothing: use the method 'fedavg'"
            )
        if self.patience < 1 or self.batch < 1:
            raise ValueError(f"feddf: patience={self.patience} and batch={self.batch} must be at least 1")

    def begin(self, roster: Roster) -> State:
        roster.needed_common("feddf teaches", least=2)
        return self.enrol({"architectures": []}, roster, roster, Updates(0, ()))

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        known = [*state["architectures"], *(member.architecture for member in roster.members)]
        return {"architectures": list(dict.fromkeys(known)), "taught": {}, "divergence": {}}

    def plan(self, state: State, roster: Roster) -> Plan:
        """A circle for each architecture, in a pool: whoever is the only one of its kind is taught, too."""
        circle = torch.tensor([state["architectures"].index(member.architecture) for member in roster.members])
        units = {unit: circle.where(circles_of_shape(roster, unit) != PRIVATE, PRIVATE) for unit in roster.units}
        pool = len(state["architectures"])
        return Plan({unit: UnitPlan(own, roster.samples, pool=pool) for unit, own in units.items()})

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        found: dict[str, dict[str, Any]] = {"taught": {}, "divergence": {}}
        sent = updates.models(roster.needed_common("feddf teaches")) if updates.ups else []
        told = _ensemble(sent)
        for number, architecture in enumerate(state["architectures"]):
            same = [models for models in sent if roster.members[int(models.ids[0])].architecture == architecture]
            if told is not None and same:
                taught, divergence = self._teach(same, told, updates, roster)
                found["taught"][str(number)], found["divergence"][str(number)] = taught, list(divergence)
        return {**state, **found}

    def _teach(
        self, same: Sequence[SentModels], told: Tensor, updates: Updates, roster: Roster
    ) -> tuple[dict[str, Tensor], tuple[float, float]]:  # fmt: skip
        """The parameters of a merged model, by unit, after its lessons; how far it was from the others, and is."""
        member, ids = roster.members[int(same[0].ids[0])], same[0].ids[:1]
        mean = {unit: updates.merged(unit, ids)[0] for unit, shapes in member.units.items() if shapes}
        learns = {unit: value[: len(value) - member.statistics.get(unit, 0)] for unit, value in mean.items()}

        def apart(now: Mapping[str, Tensor], some: Tensor) -> Tensor:
            said = [models.at(mean, now)(models.x[some]).log_softmax(1) for models in same]  # one a form of the samples
            goals = [told[some, : logs.shape[1]].softmax(1) for logs in said]
            return torch.stack(
                [F.kl_div(*both, reduction="batchmean") for both in zip(said, goals, strict=True)]
            ).mean()

        lessons = ServerTraining(self.rate, self.steps, self.patience, self.batch)
        return lessons(apart, learns, len(told), key_of("distil", roster.seed, updates.round))

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:  # fmt: skip
        value = merged.clone()
        for number, units in heard.state["taught"].items():
            if unit in units and len(units[unit]) == value.shape[1]:
                value[int(number)] = units[unit].to(value)
        return value, memory

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        ways = [f"{first:.3g} -> {last:.3g}" for first, last in state["divergence"].values()]
        return {"architectures": len(state["architectures"]), "divergence_from_all": "; ".join(ways)}


def _ensemble(sent: Sequence[SentModels]) -> Tensor | None:
    """(n, classes) the mean of the logits of all models that were sent; None where none of them is finite."""
    said = [scores[scores.isfinite().flatten(1).all(1)] for scores in (models.scores() for models in sent)]
    wide = [F.pad(s, (0, m.classes - s.shape[2]), value=math.nan) for s, m in zip(said, sent, strict=True)]
    return torch.cat(wide).nanmean(0) if any(len(some) for some in said) else None
