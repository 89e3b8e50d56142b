"""APFL (Deng et al. 2020, Algorithm 1). A client predicts with a mixture of the shared model and one of its own.

    v-bar_i = a_i v_i + (1 - a_i) w_i
    w_i <- w_i - eta grad f_i(w_i)                              the shared model, as in FedAvg
    v_i <- v_i - eta a_i grad f_i(v-bar_i)                      its own, on the same batches, w_i as before that step
    a_i <- clip(a_i - eta <v_i - w_i, grad f_i(v-bar_i)>, 0, 1)    once a round, when w has been received

`mix="weights"` is the paper; the authors' code mixes logits, a_i v_i(x) + (1 - a_i) w_i(x), which is the same only for
linear models: `mix="logits"`. Deviations: a_i moves by the gradient over all of a client's training samples, not over a
batch, and is not decayed as in the authors' code; w is weighted by samples. A client's personal module is v_i; what
predicts is the mixture.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import grad

from fedquilt.engines.objective import Batch, Learner, Objective, task_loss
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods.fedavg import FedAvg
from fedquilt.sharing import Plan, nobody


@dataclass(frozen=True)
class APFL(FedAvg):
    """FedAvg, and beside it a model of one's own; `alpha` is its part of the mixture, at first where it is `adaptive`.

    `mix` says what is mixed, weights or logits.
    """

    name: ClassVar[str] = "apfl"
    alpha: float = 0.5
    adaptive: bool = True
    mix: Literal["weights", "logits"] = "weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"apfl: alpha={self.alpha} is no part of a mixture; give one between 0 and 1")
        if self.alpha in (0, 1):
            other = "local" if self.alpha else "fedavg"
            raise ValueError(f"APFL with alpha={self.alpha} mixes nothing: use the method '{other}'")

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        tracking = [m for m in model.modules() if isinstance(getattr(m, "running_mean", None), Tensor)]
        if self.mix == "weights" and tracking:
            raise ValueError(
                f"apfl: the model of client '{member.name}' has running statistics ({type(tracking[0]).__name__}), and "
                "there are none of mixed weights; take mix=logits, or norms that keep none"
            )
        models = {"shared": model, "personal": copy.deepcopy(model)}
        return Parts(models, state={"alpha": torch.tensor(self.alpha)}, predicts="personal")

    # --- client half -----------------------------------------------------------------------------------------------

    def local(self) -> tuple[Step, ...]:
        both = Train(task_loss("shared") + Objective((self._mixed_loss,)), given=self._part)
        return (Install(), Do(self._adapt, data="train"), both) if self.adaptive else (Install(), both)

    def _part(self, me: Me) -> Mapping[str, Tensor]:
        return {"alpha": me.values["alpha"]}

    def _mixed_loss(self, me: Learner, batch: Batch) -> Tensor:
        """The mixture's loss, whose gradient is for the client's own model alone."""
        a = me.given["alpha"]
        if self.mix == "logits":
            own, shared = me.model.part("personal")(batch.x), me.model.part("shared")(batch.x).detach()
            return batch.loss(a * own + (1 - a) * shared)
        mixed = {
            name: a * value + (1 - a) * me.parameters["shared." + name.removeprefix("personal.")].detach()
            for name, value in me.parameters.items()
            if name.startswith("personal.")
        }
        return batch.loss(me.model.part("personal").at(mixed)(batch.x))

    def _adapt(self, me: Me) -> Mapping[str, Tensor]:
        """The slope of the mixture's loss in a_i is the product in the equation."""
        data = me.data
        assert data is not None
        slope = grad(lambda a: data.loss(self._scores(me, data.x, a)))(me.values["alpha"])
        return {"alpha": (me.values["alpha"] - me.lr * slope).clamp(0, 1)}

    def predict(self, me: Me, batch: Batch) -> Tensor:
        return self._scores(me, batch.x, me.values["alpha"])

    def _scores(self, me: Me, x: Tensor, a: Tensor) -> Tensor:
        if self.mix == "logits":
            return a * me.model.part("personal")(x) + (1 - a) * me.model.part("shared")(x)
        own = [unit for unit in me.values if unit.startswith("personal/")]
        shared = {unit: me.values["shared/" + unit.removeprefix("personal/")] for unit in own}
        return me.at({unit: a * me.values[unit] + (1 - a) * shared[unit] for unit in own})(x)

    # --- server half -----------------------------------------------------------------------------------------------

    def plan(self, state: State, roster: Roster) -> Plan:
        own = [unit for unit in roster.units if unit.startswith("personal/")]
        return super().plan(state, roster).but(nobody([*own, "alpha"], len(roster)).units)
