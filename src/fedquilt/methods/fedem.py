"""FedEM (Marfoq et al. 2021, Algorithm 1). Clients are mixtures of a few models that all of them train.

    q_im ~ pi_tm exp(-loss(theta_m; x_i, y_i))                     of each training sample i: which component it is from
    pi_tm <- mean_i q_im                                           the client's own mixture, never sent
    theta_m <- local training of mean_i q_im loss(theta_m; x_i, y_i),  merged by sample count, component by component
    p(y | x) = sum_m pi_tm softmax(theta_m(x))_y                   probabilities are mixed, not logits

q and pi_t come from the components as received, over all of a client's training samples, before it trains. Components
start from draws of their own: with equal ones all q_im stay equal, and the method stays FedAvg. A client that was never
chosen has equal parts. A client's personal module is the first component; what predicts is the mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods.fedavg import FedAvg
from fedquilt.sharing import Plan, nobody


@dataclass(frozen=True)
class FedEM(FedAvg):
    """A few `components` for all, and for each client how much of which it is made of."""

    name: ClassVar[str] = "fedem"
    components: int = 3

    def __post_init__(self) -> None:
        if self.components < 2:
            raise ValueError(f"FedEM with components={self.components} mixes nothing: use the method 'fedavg'")

    @property
    def names(self) -> list[str]:
        """What the components are called."""
        return [f"component_{number}" for number in range(self.components)]

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        first, *others = self.names
        equal = torch.full((self.components,), 1 / self.components)
        draws = {name: number for number, name in enumerate(others, start=1)}
        return Parts({first: model}, state={"pi": equal, "before": equal}, predicts=first, draws=draws)

    # --- client half -----------------------------------------------------------------------------------------------

    def local(self) -> tuple[Step, ...]:
        weighted = Objective((self._loss,), needs_index=True)
        return Install(), Do(self._mixture, data="train"), Train(weighted, given=self._given, looks="train")

    def _responsibilities(self, me: Me, pi: Tensor) -> Tensor:
        """(n, components) which component each training sample is from."""
        data = me.data
        assert data is not None
        losses = [data.losses(me.model.part(name)(data.x)) for name in self.names]
        return (pi.log() - torch.stack(losses, dim=1)).softmax(1)

    def _mixture(self, me: Me) -> Mapping[str, Tensor]:
        assert me.data is not None
        share = self._responsibilities(me, me.values["pi"])
        pi = torch.stack([me.data.mean(share[:, m]) for m in range(self.components)])
        return {"pi": pi, "before": me.values["pi"]}

    def _given(self, me: Me) -> Mapping[str, Tensor]:
        return {"q": self._responsibilities(me, me.values["before"])}

    def _loss(self, me: Learner, batch: Batch) -> Tensor:
        assert batch.index is not None
        q = me.given["q"].index_select(0, batch.index)  # (batch, components)
        losses = [batch.losses(me.model.part(name)(batch.x)) for name in self.names]
        return batch.mean((q * torch.stack(losses, dim=1)).sum(1))

    def predict(self, me: Me, batch: Batch) -> Tensor:
        outputs = torch.stack([me.model.part(name)(batch.x) for name in self.names])
        return batch.task.mixture(me.values["pi"], outputs)

    # --- server half -----------------------------------------------------------------------------------------------

    def plan(self, state: State, roster: Roster) -> Plan:
        return super().plan(state, roster).but(nobody(["pi", "before"], len(roster)).units)
