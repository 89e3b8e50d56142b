"""FedDL (Tu, Ouyang, Zhou, He, Xing 2021): layers are shared with whoever answers alike, bottom up.

Algorithm 2, and the equations: 1-3 are `sharing.affinity`; section 5.1 and eq. 4 are `sharing.group_by_affinity`; eq.
5-6 are the merge of a circle with weight = freq; eq. 7-8 are the pull. Units are the layers; the output layer is never
shared.

Settled here, where the paper is silent or cannot be followed:
- A decayed interval is no whole number: a layer is grouped in the first round whose step is not below the interval.
- Two clients that are left in a group stay together: nothing is below the mean of their one divergence.
- freq is the number of a client's links, in the paper "the times the user being accessed during" grouping.
- `linkage="component"` is the letter: with more than about ten clients, links below the mean join nearly everyone.
  `linkage="average"` cuts an agglomerative tree at the same threshold and does form groups.
- Whoever is heard for the first time after a layer was grouped (a newcomer, section 7, or a client that was not chosen
  then) joins the closest groups while they are close enough, and others stay put: `sharing.tree.place`.
- Whoever is alone in its group cannot be split off any more, so it is not asked for a whole model again. (The
  closest two of a group always stay together: that every group has one member, the paper's early stop, happens only
  where models are of unlike shapes or give no finite answers.)
- Clients of unlike architectures are grouped by themselves from the first layer that differs.
- A restart (`regroup_every`) forgets all groups and begins at the bottom at once; upper layers rest until regrouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.sharing import Plan, UnitPlan, affinity, group_by_affinity
from fedquilt.sharing.grouping import Linkage
from fedquilt.sharing.tree import Tree, below, first_of_each, place, with_others


@dataclass(frozen=True)
class FedDL(Method):
    """Layers are shared with whoever is alike, found bottom up while training.

    `interval` rounds pass before the first layer is grouped, and (1 - `decay`) times as many before each next one. With
    `regroup_every`, all layers are grouped anew so many rounds after the last one was. A group's id is the number of
    its first client.
    """

    name: ClassVar[str] = "feddl"
    needs_classes: ClassVar[str] = "compares the class probabilities of models on common samples"
    interval: float = 2
    decay: float = 0.25
    linkage: Linkage = "component"
    regroup_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interval < 0 or not 0 <= self.decay < 1:
            raise ValueError(
                f"feddl: interval={self.interval} must be 0 or more rounds and decay={self.decay} from 0 to below 1"
            )
        if self.regroup_every is not None and self.regroup_every < 1:
            raise ValueError(f"feddl: regroup_every={self.regroup_every} never rests; give 1 or more rounds, or None")

    def begin(self, roster: Roster) -> State:
        common = roster.needed_common("feddl compares models")
        for member in roster.members:
            if len(member.units) < 2:
                raise ValueError(
                    f"client '{member.name}' has one layer, its output, which FedDL never shares: cut its model into "
                    "layers, or use the method 'local'"
                )
        return {
            "step": 0,
            "interval": float(self.interval),
            "done": False,
            "circle": [],  # for each grouped layer (K,), -1: not heard since
            "freq": [],
            "answers": torch.zeros(len(roster), len(common), roster.classes),
            "heard": torch.zeros(len(roster), dtype=torch.bool),
        }

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        """Algorithm 2, lines 4-13; merging (line 10) and aligning (line 11) follow from the plan."""
        state, due = dict(state), self._due(state)
        if bool(self._looked_at(state)[updates.ids].any()):
            state, divergence = self._listen(state, updates, roster)
            if due:
                if state["done"]:
                    state |= {"circle": [], "freq": [], "interval": float(self.interval)}
                state |= self._group(state, divergence, roster)
        state["step"] += 1
        return state

    def _group(self, state: State, divergence: Tensor, roster: Roster) -> State:
        """Lines 6-8: one more layer is shared, in groups that split those of the layer below."""
        layers = _layers(roster)
        circle, freq = group_by_affinity(divergence, below(state["circle"], state["heard"], layers), self.linkage)
        circles = [*state["circle"], first_of_each(circle)]
        return {
            "circle": circles,
            "freq": [*state["freq"], freq],
            "step": 0,
            "interval": (1 - self.decay) * state["interval"],
            "done": len(circles) == len(layers) or not bool(with_others(circle).any()),
        }

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        """Section 7: existing groups are as one user each, and the newcomer finds its place among them."""
        if len(roster) == len(before):
            return self.begin(roster) if bool(roster.changed(before).any()) else state
        out, nothing = torch.tensor([-1]), torch.tensor([0])
        state = {
            **state,
            "circle": [torch.cat([circle, out]) for circle in state["circle"]],
            "freq": [torch.cat([freq, nothing]) for freq in state["freq"]],
            "answers": torch.cat([state["answers"], torch.zeros_like(state["answers"][:1])]),
            "heard": torch.cat([state["heard"], torch.tensor([False])]),
        }
        if set(updates.units) >= set(roster.members[-1].units):
            state, _ = self._listen(state, updates, roster)
        return state

    def _due(self, state: State) -> bool:
        """Whether the coming round groups a layer (Algorithm 2, line 5)."""
        if state["done"]:
            return self.regroup_every is not None and bool(state["step"] >= self.regroup_every)
        return bool(state["step"] >= state["interval"])

    def plan(self, state: State, roster: Roster) -> Plan:
        """What the groups say: circle = group, weight = freq (eq. 6), pull = lambda (eq. 8); whole models if asked."""
        private = torch.full((len(roster),), -1)
        circles = {unit: private.clone() for unit in roster.units}
        freqs = {unit: torch.zeros(len(roster)) for unit in roster.units}
        for layer, circle, freq in zip(_layers(roster), state["circle"], state["freq"], strict=False):
            for i, unit in enumerate(layer):
                if unit is not None:
                    circles[unit[0]][i], freqs[unit[0]][i] = circle[i], freq[i]
        plans = {unit: align(circles[unit], freqs[unit]) for unit in roster.units}
        looked_at = self._looked_at(state)
        return Plan(plans, {unit: looked_at & roster.has(unit) & ~plans[unit].sends for unit in roster.units})

    def _looked_at(self, state: State) -> Tensor:
        """(K,) who has to send a whole model in the coming round: to be grouped, if not alone yet, or to be placed."""
        if not self._due(state):
            return _waiting(state)
        if state["done"] or not state["circle"]:
            return torch.ones_like(state["heard"])
        return with_others(state["circle"][-1]) | _waiting(state)

    def _listen(self, state: State, updates: Updates, roster: Roster) -> tuple[State, Tensor]:
        """Eq. 1-3: run the whole models that were sent on the common samples; the divergence of all heard so far.

        Who was not heard before finds its place among the groups that there are.
        """
        ids, probabilities = updates.probabilities(roster.needed_common("feddl compares models"))
        waiting = ids[_waiting(state)[ids]].tolist()
        answers, heard = state["answers"].clone(), state["heard"].clone()
        answers[ids], heard[ids] = probabilities.cpu(), True
        known = heard.nonzero()[:, 0]
        divergence = torch.zeros(len(roster), len(roster))
        divergence[known[:, None], known] = affinity(answers[known].to(probabilities.device)).cpu()
        state = {**state, "answers": answers, "heard": heard}
        tree = Tree(state["circle"], state["freq"])
        for i in waiting:
            tree = place(i, divergence, tree, heard, _layers(roster), self.linkage)
        return state | {"circle": list(tree.circles), "freq": list(tree.links)}, divergence


def align(circle: Tensor, freq: Tensor) -> UnitPlan:
    """Eq. 5-8 as a plan: mu_i = freq_i / sum of freq in the group, lambda_i = min(1, mu_i * size of the group).

    >>> align(torch.tensor([0, 0, 0, 3]), torch.tensor([1, 2, 1, 1])).pull.tolist()
    [0.75, 1.0, 0.75, 0.0]
    """
    together = (circle == circle[:, None]) & (circle >= 0)  # (K, K)
    size = together.sum(1)
    share = freq * size / (together * freq).sum(1).clamp(min=1)  # mu_i * size
    alone = size < 2
    return UnitPlan(torch.where(alone, -1, circle), freq, torch.where(alone, 0.0, share.clamp(max=1)))


def _waiting(state: State) -> Tensor:
    """(K,) who has no place yet among the groups that there are."""
    if not state["circle"]:
        return torch.zeros_like(state["heard"])
    waiting: Tensor = state["circle"][0] < 0
    return waiting


def _layers(roster: Roster) -> Sequence[Sequence[tuple[str, object] | None]]:
    """By height, each client's layer with its shapes; None where that is its output layer or above."""
    return list(zip_longest(*(list(member.units.items())[:-1] for member in roster.members)))
