"""IFCA (Ghosh et al. 2020, Algorithm 1, model averaging). Clients choose among the models of a few clusters.

    j_i = argmin_j f_i(w_j) on the client's training samples;   theta_i = local training from w_{j_i}
    w_j <- sum over {i: j_i = j} of (n_i / n_j) theta_i;         a model that nobody chose keeps its value

All k models go down to every client, one comes up, with the number of the one it was. Each starts from first weights of
its own draw. Deviation: copies are weighted by samples (the paper's clients have equally many). Clients of unlike
architectures have clusters of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedquilt.interface.me import Me
from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.steps import Do, Step, Train
from fedquilt.sharing import Plan, UnitPlan


@dataclass(frozen=True)
class IFCA(Method):
    """Each client trains the one of `clusters` models that fits its training samples best."""

    name: ClassVar[str] = "ifca"
    clusters: int = 2

    def __post_init__(self) -> None:
        if self.clusters < 2:
            raise ValueError(f"IFCA with clusters={self.clusters} leaves nothing to choose: use the method 'fedavg'")

    def local(self) -> tuple[Step, ...]:
        return Do(self._choose, data="train", reports=("choice",)), Train()

    def _choose(self, me: Me) -> Mapping[str, Tensor]:
        """The model with the lowest loss, and its number."""
        data, units = me.data, me.offers
        assert data is not None
        losses = []
        for number in range(self.clusters):
            model = me.at({unit: values[number] for unit, values in units.items()})
            losses.append(data.loss(model(data.x)))
        choice = torch.stack(losses).nan_to_num(torch.inf).argmin()
        chosen = {unit: values.index_select(0, choice.view(1)).squeeze(0) for unit, values in units.items()}
        return chosen | {"choice": choice}

    def begin(self, roster: Roster) -> State:
        return {"choice": torch.zeros(len(roster), dtype=torch.int64)}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        ids, said = updates.report("choice")
        choice = state["choice"].clone()
        choice[ids] = said.cpu().clamp(0, self.clusters - 1)
        return {"choice": choice}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        new = torch.zeros(len(roster) - len(before), dtype=torch.int64)
        state = {"choice": torch.cat([state["choice"], new])}
        return self.learn(state, updates, roster) if updates.ups else state

    def plan(self, state: State, roster: Roster) -> Plan:
        units = {}
        for unit in roster.units:
            circle = torch.where(roster.has(unit), state["choice"], -1)
            units[unit] = UnitPlan(circle, roster.samples, pool=self.clusters)
        everybody = {unit: roster.has(unit) for unit in roster.units}
        return Plan(units, asked=everybody, offered=everybody)

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        return {"clients_in_clusters": torch.bincount(state["choice"], minlength=self.clusters).tolist()}
