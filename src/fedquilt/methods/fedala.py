"""FedALA (Zhang et al. 2023, Algorithm 1). Each client learns how far it goes to the shared model, number by number.

    lower units     theta <- received
    last units      theta <- own + (received - own) W                                W in [0, 1], at first 1
    W <- clip(W - rate grad_theta L(theta) (received - own), 0, 1)                   batch by batch, on part of its data

Then all of it trains and is sent, as in FedAvg. W is learnt for an epoch in each round, and goes on from where it was.
In round 2, the first in which something other than first weights is received, it is learnt until the loss of an epoch's
last batch hardly changes any more (a standard deviation below 0.1 over ten epochs), as in the authors' code.

W, and the own model of the round before, are each client's own. What was received is read out with the W of the round
before. Deviations: that first time ends after `first_epochs` at the latest; samples are drawn one by one, where the
authors' code takes a stretch of them; models are in eval mode while W is learnt; `adaptive` counts units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from fedquilt.engines.objective import Batch
from fedquilt.families.parts import Parts
from fedquilt.families.units import cut
from fedquilt.interface.me import Me, Values
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods.fedavg import FedAvg
from fedquilt.sharing import Plan, nobody

_OWN = "shares"  # the state that W is kept in
_LOOKS_BACK, _SETTLED = 10, 0.1  # epochs, and the standard deviation of their losses


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedAvg whose clients learn, number by number, how much of their last `adaptive` units to take.

    `rate` is the step size of that, `share` the part of a client's samples that is looked at, `first_epochs` how long
    it may take in round 2.
    """

    name: ClassVar[str] = "fedala"
    adaptive: int = 1
    rate: float = 1.0
    share: float = 0.8
    first_epochs: int = 20

    def __post_init__(self) -> None:
        if self.adaptive < 1 or self.rate == 0:
            raise ValueError(
                f"FedALA with adaptive={self.adaptive}, rate={self.rate} takes all that it receives: use the method "
                "'fedavg'"
            )
        if self.rate < 0 or not 0 < self.share <= 1 or self.first_epochs < 1:
            raise ValueError(
                f"fedala: give a rate={self.rate} above 0, a share={self.share} above 0 and up to 1, and "
                f"first_epochs={self.first_epochs} of 1 or more"
            )

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        last = cut(model)[-self.adaptive :]
        if any(unit.buffers for unit in last):
            raise ValueError(
                f"fedala: the last {len(last)} unit(s) of the model of client '{member.name}' have buffers, which no "
                "gradient says how to mix; take a smaller number of adaptive units, or others"
            )
        tensors = dict(model.named_parameters())
        size = sum(tensors[name].numel() for unit in last for name in unit.parameters)
        return Parts(model, state={_OWN: torch.ones(size)})

    def local(self) -> tuple[Step, ...]:
        return Do(self._learn_shares, data="train"), Install(self._mixed), Train()

    def _learn_shares(self, me: Me) -> Mapping[str, Tensor]:
        shares, data = me.values[_OWN], me.data
        assert data is not None
        if me.round == 1:  # all that there is are first weights
            return {_OWN: shares}
        own, received = self._last(me, me.values), self._last(me, me.received)
        lower = {unit: me.received[unit] for unit in me.values if unit not in self._units(me) and unit != _OWN}

        def loss(theta: Tensor, batch: Batch) -> Tensor:
            return batch.loss(me.at(lower | self._as_units(me, theta))(batch.x))

        losses: list[Tensor] = []
        settled = me.number(False)
        for _ in range(self.first_epochs if me.round == 2 else 1):
            before, said = shares, me.number(0.0)
            for batch in self._some(me, data):
                slope, value = grad_and_value(loss)(own + (received - own) * shares, batch)
                shares = (shares - self.rate * slope * (received - own)).clamp(0, 1)
                assert batch.mask is not None
                said = torch.where(batch.mask.any(), value, said)
            shares = torch.where(settled, before, shares)
            losses.append(said)
            if len(losses) > _LOOKS_BACK:
                settled = settled | (torch.stack(losses[-_LOOKS_BACK:]).std(correction=0) < _SETTLED)
        return {_OWN: shares}

    def _some(self, me: Me, data: Batch) -> list[Batch]:
        """Batches of a part of the client's samples, in an order of their own in each round; padding comes last."""
        real = torch.ones(len(data.y), device=data.y.device) if data.mask is None else data.mask
        order = (me.draw("adaptive", len(data.y)) + 2 * (1 - real)).argsort()
        count = (real.sum() * self.share).floor().clamp(min=1)
        most = max(1, int(len(data.y) * self.share))
        place = torch.arange(most, device=order.device)
        parts = zip(order[:most].split(me.batch), (place < count).float().split(me.batch), strict=True)
        picked = [(data.x.index_select(0, at), data.y.index_select(0, at), mask) for at, mask in parts]
        return [Batch(x, y, mask, task=data.task) for x, y, mask in picked]

    def _mixed(self, me: Me) -> Mapping[str, Tensor]:
        own, received = self._last(me, me.values), self._last(me, me.received)
        return self._as_units(me, own + (received - own) * me.values[_OWN])

    def _units(self, me: Me) -> list[str]:
        return [unit for unit in me.values if unit != _OWN][-self.adaptive :]

    def _last(self, me: Me, values: Values) -> Tensor:
        return torch.cat([values[unit] for unit in self._units(me)])

    def _as_units(self, me: Me, theta: Tensor) -> dict[str, Tensor]:
        sizes = [len(me.values[unit]) for unit in self._units(me)]
        return dict(zip(self._units(me), theta.split(sizes), strict=True))

    # --- server half -----------------------------------------------------------------------------------------------

    def plan(self, state: State, roster: Roster) -> Plan:
        return super().plan(state, roster).but(nobody([_OWN], len(roster)).units)
