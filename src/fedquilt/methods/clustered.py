"""Clustered FL (Sattler et al. 2021). A group whose members pull apart once they have agreed as far as they can splits.

    Delta_i = theta_i - w_c,  c the group of client i.    A group is split in two, by complete linkage on the cosine
    distance of the Delta_i, where || sum_i (n_i / n_c) Delta_i || < eps_1  and  max_i || Delta_i || > eps_2
    w_c <- sum_i (n_i / n_c) theta_i    in every group, also in one that has just come to be

Norms are Euclidean, of whole updates. As in the authors' code nothing splits in the first rounds (`after`) nor in a
group of two, and there is no bound on how alike the halves may be. Deviations: a group splits only in a round in which
all of its members were heard; clients of unlike architectures are in groups of their own; a newcomer joins the biggest
group of its architecture. Running statistics are averaged but decide nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.sharing import PRIVATE, Plan, UnitPlan, circles_by_trait, cosine_distance, mean


@dataclass(frozen=True)
class Clustered(Method):
    """FedAvg in groups that split in two where the mean update is below `eps_1` and somebody's is above `eps_2`."""

    name: ClassVar[str] = "clustered"
    eps_1: float = 0.4
    eps_2: float = 1.6
    after: int = 20

    def __post_init__(self) -> None:
        if not self.eps_1 > 0:
            raise ValueError(f"Clustered FL with eps_1={self.eps_1} never splits a group: use the method 'fedavg'")
        if not self.eps_2 >= 0 or self.after < 0:
            raise ValueError(f"clustered: eps_2={self.eps_2} and after={self.after} must not be below 0")

    def begin(self, roster: Roster) -> State:
        return {"circle": circles_by_trait([repr(member.units) for member in roster.members])}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        if updates.round <= self.after:
            return state
        circle = state["circle"].clone()
        for group in circle.unique().tolist():
            members = (circle == group).nonzero()[:, 0]  # clients' numbers
            moves = _moves(members, updates, roster) if len(members) > 2 else None
            if moves is not None and self._splits(moves, roster.samples[members]):
                circle[members[_halves(moves) == 1]] = int(circle.max()) + 1
        return {"circle": circle} if not torch.equal(circle, state["circle"]) else state

    def _splits(self, moves: Tensor, samples: Tensor) -> bool:
        together = mean(moves, torch.zeros(len(moves), dtype=torch.int64), samples, 1).value
        return bool(together.norm() < self.eps_1) and bool(moves.norm(dim=1).max() > self.eps_2)

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        """Whoever has the architecture it had stays in its group."""
        circle = state["circle"].tolist()
        known = {i: m.units for i, m in enumerate(before.members) if roster.members[i].units == m.units}
        for i in [i for i in range(len(roster)) if i not in known]:
            peers = Counter(circle[j] for j, units in known.items() if units == roster.members[i].units)
            group = peers.most_common(1)[0][0] if peers else max(circle) + 1
            circle[i : i + 1] = [group]
            known[i] = roster.members[i].units
        return {"circle": torch.tensor(circle)}

    def plan(self, state: State, roster: Roster) -> Plan:
        samples, circle = roster.samples, state["circle"]
        return Plan({u: UnitPlan(torch.where(roster.has(u), circle, PRIVATE), samples) for u in roster.units})

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        return {"clients_in_clusters": state["circle"].unique(return_counts=True)[1].tolist()}


def _moves(members: Tensor, updates: Updates, roster: Roster) -> Tensor | None:
    """(k, parameters) how far the members of a group moved in a round; None where not all were heard, and well."""
    first, columns = roster.members[int(members[0])], []
    for unit in first.units:
        rows: dict[int, Tensor] = {}
        for ids, values in updates.parts(unit):
            mine = torch.isin(ids, members)
            if bool(mine.any()):
                moved = values[mine.to(values.device)] - updates.received(unit, ids[mine]).to(values.device)
                trained = moved.shape[1] - first.statistics.get(unit, 0)
                rows |= dict(zip(ids[mine].tolist(), moved[:, :trained].cpu(), strict=True))
        if len(rows) < len(members):
            return None
        columns.append(torch.stack([rows[i] for i in members.tolist()]))
    moves = torch.cat(columns, 1)
    return moves if bool(moves.isfinite().all()) else None


def _halves(moves: Tensor) -> Tensor:
    """(k,) 0 or 1: two groups of updates, by complete linkage on their cosine distance."""
    from sklearn.cluster import AgglomerativeClustering  # here: importing it takes longer than all of this package

    tree = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
    halves = torch.from_numpy(tree.fit(cosine_distance(moves).numpy()).labels_).long()
    return halves ^ halves[0]  # the first member's half keeps the group's number
