"""FedFomo (Zhang et al. 2021). Clients are handed a few others' models and weigh them by what they gain.

    w_ij    = (L_i(theta_i) - L_i(theta_j)) / ||theta_j - theta_i||        L_i: loss on client i's validation samples
    theta_i <- theta_i + sum_j max(w_ij, 0) / (sum_k max(w_ik, 0)) (theta_j - theta_i);   then it trains, and sends
    P_ij    <- P_ij + w_ij                                                  at the server, which chooses by it

Of the clients that were heard, each is offered `models`: each of them is, with the probability `epsilon`, anybody, else
who has the highest P_ij of those left. Epsilon falls by `decay` from round to round. All that is offered comes down,
one model goes up. Where nobody's model is better than one's own, nothing is mixed.

Validation samples are a client's own split, which it never trains on; without any it trains alone. Copies are those
that clients sent last, also of those who did not take part. Clients of unlike architectures are never offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt._util.randomness import key_of
from fedquilt.interface.me import Me
from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.steps import Do, Step, Train
from fedquilt.sharing import MixedUnit, Plan


@dataclass(frozen=True)
class FedFomo(Method):
    """Clients weigh `models` of others on their validation samples, and go towards those that are better for them."""

    name: ClassVar[str] = "fedfomo"
    models: int = 5
    epsilon: float = 0.3
    decay: float = 0.05

    def __post_init__(self) -> None:
        if self.models < 1:
            raise ValueError(f"FedFomo with models={self.models} is handed nobody's model: use the method 'local'")
        if not 0 <= self.epsilon <= 1 or self.decay < 0:
            raise ValueError(
                f"fedfomo: epsilon={self.epsilon} is a probability, and decay={self.decay} what it falls by; give "
                "numbers from 0 to 1, and from 0 up"
            )

    # --- client half -----------------------------------------------------------------------------------------------

    def local(self) -> tuple[Step, ...]:
        return Do(self._weigh, data="validation", reports=("weights",)), Train()

    def _weigh(self, me: Me) -> Mapping[str, Tensor]:
        data, offers = me.data, me.offers
        assert data is not None
        own = {unit: me.values[unit] for unit in offers}

        def loss(units: Mapping[str, Tensor]) -> Tensor:
            return data.loss(me.at(units)(data.x))

        mine, weights = loss(own), []
        for place, whose in enumerate(me.told["offered"]):
            theirs = {unit: values[place] for unit, values in offers.items()}
            far = torch.stack([(theirs[unit] - own[unit]).square().sum() for unit in own]).sum().sqrt()
            gain = (mine - loss(theirs)) / far.clamp(min=1e-12)
            weights.append(torch.where((whose >= 0) & gain.isfinite(), gain, 0.0))
        w = torch.stack(weights)  # (M,)
        part = w.clamp(min=0) / w.clamp(min=0).sum().clamp(min=1e-12)
        return {unit: own[unit] + part @ (offers[unit] - own[unit]) for unit in own} | {"weights": w}

    # --- server half -----------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        k = len(roster)
        nobody = torch.full((k, max(1, min(self.models, k - 1))), -1)
        return {"offered": nobody, "affinity": torch.zeros(k, k), "heard": torch.zeros(k, dtype=torch.bool)}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        ids, weights = updates.report("weights")
        affinity = state["affinity"].clone()
        for i, whose, w in zip(ids.tolist(), state["offered"][ids], weights.cpu(), strict=True):
            affinity[i, whose[whose >= 0]] += w[whose >= 0]
        heard = state["heard"].index_fill(0, ids, True)
        known = {"offered": state["offered"], "affinity": affinity, "heard": heard}
        return known | {"offered": self._offers(known, roster, updates.round)}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        if len(roster) == len(before):
            same = all(old.units == new.units for old, new in zip(before.members, roster.members, strict=True))
            return state if same else self.begin(roster)
        longer = {
            "offered": nn.functional.pad(state["offered"], (0, 0, 0, 1), value=-1),
            "affinity": nn.functional.pad(state["affinity"], (0, 1, 0, 1)),
            "heard": nn.functional.pad(state["heard"], (0, 1)),
        }
        longer["offered"][-1] = self._offers(longer, roster, roster.rounds)[-1]
        return longer

    def _offers(self, state: State, roster: Roster, round_: int) -> Tensor:
        """(K, M) whose copies each client is offered next."""
        draw = np.random.default_rng(key_of("fedfomo", roster.seed, round_))
        chance = max(0.0, self.epsilon - self.decay * (round_ - 1))
        offered = torch.full_like(state["offered"], -1)
        for i, member in enumerate(roster.members):
            like = [j for j, other in enumerate(roster.members) if j != i and other.units == member.units]
            left = [j for j in draw.permutation(like).tolist() if state["heard"][j]]  # chance decides among equals
            for place in range(min(offered.shape[1], len(left))):
                best = max(left, key=lambda j: float(state["affinity"][i, j]))
                offered[i, place] = left.pop(0 if draw.random() < chance else left.index(best))
        return offered

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        return {"offered": state["offered"][list(ids)]}

    def plan(self, state: State, roster: Roster) -> Plan:
        """Nobody's unit is merged with others': the server keeps everybody's copy, to hand it on."""
        units = {unit: MixedUnit(torch.diag(roster.has(unit).float())) for unit in roster.units}
        copies = {unit: torch.where(roster.has(unit)[:, None], state["offered"], -1) for unit in units}
        return Plan(units, asked={unit: roster.has(unit) for unit in units}, copies=copies)
