"""FML (Shen et al. 2020). Clients keep models of their own and share another, small one; both learn from each other.

    own model    alpha CE(own) + (1 - alpha) KL(meme || own)      what the meme says taken as given
    meme         beta  CE(meme) + (1 - beta) KL(own || meme)      what the own model says taken as given
    meme <- sum_i (n_i / n) meme_i

Both see the same batches at the same time. The own model, of any architecture, never leaves a client and predicts; the
meme, of one architecture for all, is averaged as in FedAvg. Deviations: without a `meme` it has the client's own
architecture and first weights, and memes of unlike architectures average what they have in common.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from fedquilt._util.suggest import did_you_mean
from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.families.parts import Parts
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import State
from fedquilt.interface.steps import Install, Step, Train
from fedquilt.layers.prepare import cross_entropies
from fedquilt.methods.fedavg import FedAvg
from fedquilt.models import MODELS
from fedquilt.sharing import Plan, nobody


@dataclass(frozen=True)
class FML(FedAvg):
    """A model of one's own and a shared one that teach each other; `alpha` and `beta` are how far they learn by labels.

    `meme` names the shared network, one of `fedquilt.models.MODELS`, built with `meme_settings`; without a name it is
    like the client's own model.
    """

    name: ClassVar[str] = "fml"
    needs_classes: ClassVar[str] = "lets two models teach each other by class probabilities"
    alpha: float = 0.5
    beta: float = 0.5
    meme: str = ""
    meme_settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 <= self.alpha <= 1 and 0 <= self.beta <= 1):
            raise ValueError(f"fml: alpha={self.alpha}, beta={self.beta} are parts of a loss; give them from 0 to 1")
        if self.alpha == 1:
            raise ValueError("FML with alpha=1 has own models that learn from nobody: use the method 'local'")
        if self.alpha == self.beta == 0:
            raise ValueError("FML with alpha=0 and beta=0 never looks at a label; give one of them above 0")
        if self.meme and self.meme not in MODELS:
            raise ValueError(did_you_mean(self.meme, MODELS, "network for a meme"))

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        meme = copy.deepcopy(model)
        if self.meme:
            meme = MODELS[self.meme](**{"classes": classes, **self.meme_settings})
        return Parts({"own": model, "meme": meme}, predicts="own")

    def local(self) -> tuple[Step, ...]:
        return Install(), Train(Objective((self._mutual,)))

    def _mutual(self, me: Learner, batch: Batch) -> Tensor:
        """Both losses at once: in each, the other model is only listened to."""
        own, meme = me.model.part("own")(batch.x), me.model.part("meme")(batch.x)
        for_own = self.alpha * cross_entropies(own, batch.y) + (1 - self.alpha) * _divergence(meme, own)
        for_meme = self.beta * cross_entropies(meme, batch.y) + (1 - self.beta) * _divergence(own, meme)
        return batch.mean(for_own + for_meme)

    def plan(self, state: State, roster: Roster) -> Plan:
        own = [unit for unit in roster.units if unit.startswith("own/")]
        return super().plan(state, roster).but(nobody(own, len(roster)).units)


def _divergence(teacher: Tensor, learner: Tensor) -> Tensor:
    """(n,) Kullback-Leibler divergence of what a learner says from what its teacher says, both logits."""
    taught, said = teacher.detach().log_softmax(1), learner.log_softmax(1)
    return (taught.exp() * (taught - said)).sum(1)
