"""FedDL (Tu, Ouyang, Zhou, He, Xing 2021): layers are shared with whoever answers alike, bottom up.

Algorithm 2, and the equations: 1-3 are `sharing.affinity`; section 5.1 and eq. 4 are `sharing.group_by_affinity`; eq.
5-6 are the merge of a circle with weight = freq; eq. 7-8 are the pull. Units are the layers; the output layer is never
shared.

Settled here, where the paper is silent or cannot be followed:
- A decayed interval is no whole number: a layer is grouped in the first round whose step is not below the interval.
- Two clients that are left in a group stay together: the mean of their one divergence is not above it.
- `linkage="component"` is the letter: with more than about ten clients, links below the mean join nearly everyone.
  `linkage="average"` cuts an agglomerative tree at the same threshold and does form groups.
- Whoever is heard for the first time after a layer was grouped (a newcomer, section 7, or a client that was not chosen
  then) joins, layer by layer, the closest group, if that is not farther off than the threshold, the mean over the pairs
  of the group below and itself; else it is alone from there on. Others stay put. How far off a group is, is its closest
  member (one link joins a component) or the mean over its members (average), as in grouping.
- Whoever is alone in its group cannot be split off any more, so it is not asked for a whole model again. (Links up to
  the mean always leave the closest two of a group together: that every group has one member, the paper's early stop,
  happens only where models are of unlike shapes or give no finite answers.)
- Clients of unlike architectures are grouped by themselves from the first layer that differs.
- A restart (`regroup_every`) forgets all groups and begins at the bottom at once; upper layers rest until regrouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.messages import Roster, Updates
from fedquilt.methods.base import Method, State
from fedquilt.sharing import Plan, UnitPlan, affinity, group_by_affinity, refine
from fedquilt.sharing.circles import Linkage


@dataclass(frozen=True)
class FedDL(Method):
    """Layers are shared with whoever is alike, found bottom up while training.

    `interval` rounds pass before the first layer is grouped, and (1 - `decay`) times as many before each next one. With
    `regroup_every`, all layers are grouped anew so many rounds after the last one was. A group's id is the number of
    its first client.
    """

    name: ClassVar[str] = "feddl"
    interval: float = 2
    decay: float = 0.25
    linkage: Linkage = "component"
    regroup_every: int | None = None

    def __post_init__(self) -> None:
        if self.interval < 0 or not 0 <= self.decay < 1:
            raise ValueError(
                f"feddl: interval={self.interval} must be 0 or more rounds and decay={self.decay} from 0 to below 1"
            )
        if self.linkage not in ("component", "average"):
            raise ValueError(f"feddl: linkage '{self.linkage}' is not known; take component or average")
        if self.regroup_every is not None and self.regroup_every < 1:
            raise ValueError(f"feddl: regroup_every={self.regroup_every} never rests; give 1 or more rounds, or None")

    def begin(self, roster: Roster) -> State:
        if roster.common is None or len(roster.common) == 0:
            raise ValueError(
                "feddl compares models on samples that the server holds, and there are none; give the scenario "
                "common=(x, y), or use a method that does not look at models, such as 'modfl' or 'fedper'"
            )
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
            "answers": torch.zeros(len(roster), len(roster.common), roster.classes),
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
        layer = len(state["circle"])
        circle, freq = group_by_affinity(divergence, _below(state["circle"], state["heard"], roster), self.linkage)
        circle = first_of_each(circle)
        last = layer + 1 == max(len(member.units) for member in roster.members) - 1
        return {
            "circle": [*state["circle"], circle],
            "freq": [*state["freq"], freq],
            "step": 0,
            "interval": (1 - self.decay) * state["interval"],
            "done": last or not bool(_with_others(circle).any()),
        }

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        """Section 7: existing groups are as one user each, and the newcomer finds its place among them."""
        if len(roster) == len(before):
            same = all(old.units == new.units for old, new in zip(before.members, roster.members, strict=True))
            return state if same else self.begin(roster)
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
        for layer, (circle, freq) in enumerate(zip(state["circle"], state["freq"], strict=True)):
            for i, unit in enumerate(_layer(roster, layer)):
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
        return _with_others(state["circle"][-1]) | _waiting(state)

    def _listen(self, state: State, updates: Updates, roster: Roster) -> tuple[State, Tensor]:
        """Eq. 1-3: run the whole models that were sent on the common samples; the divergence of all heard so far.

        Who was not heard before finds its place among the groups that there are.
        """
        assert roster.common is not None
        ids, probabilities = updates.probabilities(roster.common.x)
        waiting = ids[_waiting(state)[ids]].tolist()
        answers, heard = state["answers"].clone(), state["heard"].clone()
        answers[ids], heard[ids] = probabilities.cpu(), True
        known = heard.nonzero()[:, 0]
        divergence = torch.zeros(len(roster), len(roster))
        divergence[known[:, None], known] = affinity(answers[known].to(probabilities.device)).cpu()
        state = {**state, "answers": answers, "heard": heard}
        for i in waiting:
            state |= place(i, divergence, state, roster, self.linkage)
        return state, divergence


def place(i: int, divergence: Tensor, state: State, roster: Roster, linkage: Linkage) -> State:
    """A client joins the closest group of each grouped layer while that is close enough, and then is alone."""
    circles, freqs = [c.clone() for c in state["circle"]], [f.clone() for f in state["freq"]]
    for layer, (circle, freq) in enumerate(zip(circles, freqs, strict=True)):
        below = _below(circles[:layer], state["heard"], roster)
        if below[i] < 0:
            continue
        circle[i], freq[i] = i, 1
        peers = ((below == below[i]) & (circle >= 0)).nonzero()[:, 0]
        peers = peers[peers != i]
        if len(peers) == 0:
            continue
        groups = sorted(set(circle[peers].tolist()))
        away = [divergence[i, peers[circle[peers] == group]] for group in groups]
        far = torch.stack([d.nan_to_num(torch.inf).min() if linkage == "component" else d.nanmean() for d in away])
        far = far.nan_to_num(torch.inf)
        everyone = torch.cat([peers, torch.tensor([i])])
        within = divergence[everyone[:, None], everyone]
        threshold = within[~torch.eye(len(everyone), dtype=torch.bool)].nanmean()  # with one other: they stay together
        if bool(far.min() <= threshold):
            circle[i] = groups[int(far.argmin())]
            links = divergence[i, peers[circle[peers] == circle[i]]] <= threshold
            freq[i] = max(1, int(links.sum()))
    return {"circle": circles, "freq": freqs}


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


def first_of_each(circle: Tensor) -> Tensor:
    """(K,) each group named by the number of its first client, so that a name lasts as long as its first member stays.

    >>> first_of_each(torch.tensor([1, 0, -1, 1])).tolist()
    [0, 1, -1, 0]
    """
    first: dict[int, int] = {}
    return torch.tensor([-1 if c < 0 else first.setdefault(c, i) for i, c in enumerate(circle.tolist())])


def _with_others(circle: Tensor) -> Tensor:
    """(K,) whose group has more members than itself."""
    return ((circle[:, None] == circle) & (circle >= 0)).sum(1) > 1


def _waiting(state: State) -> Tensor:
    """(K,) who has no place yet among the groups that there are."""
    if not state["circle"]:
        return torch.zeros_like(state["heard"])
    waiting: Tensor = state["circle"][0] < 0
    return waiting


def _below(circles: Sequence[Tensor], heard: Tensor, roster: Roster) -> Tensor:
    """(K,) the groups that the next layer's groups must lie in; -1 for clients without it, or not heard yet."""
    groups = circles[-1] if circles else torch.where(heard, 0, -1)
    return refine(groups, _layer(roster, len(circles)))


def _layer(roster: Roster, layer: int) -> Sequence[tuple[str, object] | None]:
    """Each client's layer of that height with its shapes; None where that is its output layer or above."""
    return [list(member.units.items())[layer] if layer < len(member.units) - 1 else None for member in roster.members]
