"""FedAMP (Huang et al. 2021). Each client has a mixture of its own: of its model and of those that are like it.

    xi_ij = alpha A'(||w_i - w_j||^2),  A'(d) = exp(-d / sigma) / sigma        for all others j
    u_i   = (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j                            at the server, from the last models
    w_i   <- argmin F_i(w) + mu / 2 ||w - u_i||^2                              local training, from u_i

mu is the paper's lambda / alpha, the only place where lambda counts. `similarity="cosine"` is HeurFedAMP, for deep
networks: others share 1 - own by softmax of sigma cos(w_i, w_j).

Settled here: with `sigma` None distances are measured by their mean, so that mixtures do not depend on the size of a
network, and with `alpha` None equal models are mixed in equal parts (alpha = sigma / K). An alpha that could give
others more than everything is refused. The server keeps everybody's last model, so mixtures are the paper's when only
some clients take part; who was never heard is in no mixture. Clients of unlike architectures are never mixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import proximal, task_loss
from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.steps import Install, Step, Train
from fedquilt.sharing import MixedUnit, Plan, cosine_distance, squared_distances

_LEAST = 1e-12  # a mean distance, where all models are the same


@dataclass(frozen=True)
class FedAMP(Method):
    """Clients receive mixtures of models like theirs, and stay near them, by `mu`."""

    name: ClassVar[str] = "fedamp"
    mu: float = 0.1
    sigma: float | None = None
    alpha: float | None = None
    similarity: Literal["distance", "cosine"] = "distance"
    own: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < math.inf or any(s is not None and not 0 < s < math.inf for s in (self.sigma, self.alpha)):
            raise ValueError(f"fedamp: give mu={self.mu} from 0 up, sigma={self.sigma} and alpha={self.alpha} above 0")
        if self.alpha is not None and (self.sigma is None or self.similarity == "cosine"):
            raise ValueError("fedamp: alpha goes with distances and a sigma of your own; give sigma too, or no alpha")
        if self.own is not None and (self.similarity == "distance" or not 0 <= self.own <= 1):
            raise ValueError(f"fedamp: own={self.own} is a client's own part with similarity=cosine, from 0 to below 1")
        if self.own == 1:
            raise ValueError("FedAMP with own=1 mixes nothing: use the method 'local'")

    def local(self) -> tuple[Step, ...]:
        return Install(), Train(task_loss() + proximal(self.mu))

    # --- server half -----------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        self._check(len(roster) - 1)
        return {"shares": torch.zeros(len(roster), len(roster)), "heard": torch.zeros(len(roster), dtype=torch.bool)}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        heard = state["heard"].index_fill(0, updates.ids, True)
        shares = torch.zeros_like(state["shares"])
        for ids in _alike(roster, heard):
            shares[ids[:, None], ids] = self._shares(updates, roster, ids)
        return {"shares": shares, "heard": heard}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        if len(roster) == len(before):
            return self.begin(roster) if bool(roster.changed(before).any()) else state
        self._check(len(roster) - 1)
        shares, heard = nn.functional.pad(state["shares"], (0, 1, 0, 1)), nn.functional.pad(state["heard"], (0, 1))
        for ids in _alike(roster, heard.index_fill(0, updates.ids, True)):
            if int(ids[-1]) == len(before):  # the newcomer's own row: nobody else gets anything of it yet
                shares[-1, ids] = self._shares(updates, roster, ids)[-1]
        return {"shares": shares, "heard": heard}

    def plan(self, state: State, roster: Roster) -> Plan:
        others = state["shares"].sum(1)
        matrix = state["shares"] + torch.diag((1 - others).clamp(min=0))
        pull = torch.where(state["heard"], 1.0, others)  # of a newcomer there is no copy: it keeps its part itself
        units = {}
        for unit in roster.units:
            has = roster.has(unit)
            units[unit] = MixedUnit(matrix * has * has[:, None], pull)
        return Plan(units, asked={unit: roster.has(unit) for unit in roster.units})

    def _check(self, others: int) -> None:
        if self.alpha is not None and self.sigma is not None and self.alpha * others > self.sigma:
            raise ValueError(
                f"fedamp: with alpha={self.alpha:g}, sigma={self.sigma:g} and {others + 1} clients, others could get "
                f"more than everything; give an alpha up to sigma / {others} = {self.sigma / others:g}"
            )

    def _shares(self, updates: Updates, roster: Roster, ids: Tensor) -> Tensor:
        """(k, k) how much clients of one architecture get of each other, xi; of themselves nothing."""
        member = roster.members[int(ids[0])]
        copies = [updates.latest(unit, ids) for unit in member.units]
        learned = [c.shape[1] - member.statistics.get(u, 0) for c, u in zip(copies, member.units, strict=True)]
        w = torch.cat([copy[:, :size] for copy, size in zip(copies, learned, strict=True)], 1)  # (k, parameters)
        others = ~torch.eye(len(ids), dtype=torch.bool, device=w.device)
        if self.similarity == "cosine":
            apart = cosine_distance(w).to(w.device)
            sigma = self.sigma or 1 / float(apart[others].mean().clamp(min=_LEAST))
            near = (-sigma * apart).masked_fill(~others, -math.inf)  # sigma cos, less what is the same for all
            return (near.softmax(1) * (1 - (1 / len(ids) if self.own is None else self.own))).float().cpu()
        apart = squared_distances(w, w.mean(0).expand_as(w), others.any(1))
        sigma = self.sigma or float(apart[others].mean().clamp(min=_LEAST))
        most = 1 / len(roster) if self.alpha is None else self.alpha / sigma
        return (most * (-apart / sigma).exp() * others).float().cpu()


def _alike(roster: Roster, heard: Tensor) -> list[Tensor]:
    """The numbers of clients that were heard, those of one architecture together; nobody who is alone."""
    groups: dict[str, list[int]] = {}
    for number in heard.nonzero()[:, 0].tolist():
        groups.setdefault(roster.members[number].architecture, []).append(number)
    return [torch.tensor(ids) for ids in groups.values() if len(ids) > 1]
