"""FedPAC (Xu et al. 2023). Features of a label agree among clients, and each has a mixture of heads that suits it.

    head:   an epoch of CE, the body being frozen
    body:   epochs of CE + lambda ||f(x) - C_y||^2 / width, that head being frozen;     C: prototypes, as in FedProto
    body   <- sum_j (n_j / n) body_j
    head_i <- sum_j a_ij head_j,   a_i = argmin a' (diag(V) + D_i) a,   a_j >= 0, sum_j a_j = 1
              V_j = (E ||f||^2 - sum_c ||h_jc||^2) / n_j                  how uncertain a head of j is
              D_i[j, k] = sum_c <h_ic - h_jc, h_ic - h_kc>                how biased j's and k's are for i
              h_jc = p_j(c) mean of f over label c                        of the received body, before training

The quadratic problem is solved exactly, as one of non-negative least squares; parts below 0.001 are dropped, as in the
authors' code. All rows are solved from what was sent, and mixed from that: no head is mixed of mixtures of the same
round. Deviation: where only some clients take part, the others' heads and statistics are those that they sent last.
Clients whose heads have unlike shapes are not mixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.families.layout import Signature
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.method import State
from fedquilt.interface.steps import Do, Install, Send, Step, Train, but_last, last
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.prototypes import (
    COUNTS,
    given_prototypes,
    near_prototypes,
    own_prototypes,
    shared_prototypes,
    with_prototypes,
    with_samples,
)
from fedquilt.sharing import MixedUnit, Plan, nobody

_LEAST = 1e-3  # a part of a mixture that is not worth it


@dataclass(frozen=True)
class FedPAC(FedAvg):
    """One body, kept near common prototypes by `lam`; heads are mixed for each client by a quadratic problem.

    Heads train for `head_epochs` at `head_rate` (None: the learning rate of local training).
    """

    name: ClassVar[str] = "fedpac"
    needs_classes: ClassVar[str] = "compares prototypes of classes"
    lam: float = 1.0
    head_epochs: int = 1
    head_rate: float | None = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.lam < math.inf:
            raise ValueError(f"FedPAC with lam={self.lam} aligns no features; give a finite one above 0")
        if self.head_epochs < 1 or (self.head_rate is not None and not 0 < self.head_rate < math.inf):
            raise ValueError(
                f"fedpac: head_epochs={self.head_epochs}, head_rate={self.head_rate} train no head; give at least 1, "
                "and a rate above 0"
            )

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        return with_prototypes(model, member, classes)

    def local(self) -> tuple[Step, ...]:
        return (
            Install(),
            Do(self._statistics, data="train", reports=("h", "v")),
            Train(units=last(1), epochs=self.head_epochs, lr=self.head_rate),
            Train(near_prototypes(self.lam), but_last(1), given=given_prototypes),
            Do(own_prototypes, data="train", reports=("samples",)),
            Send(with_samples),
        )

    def _statistics(self, me: Me) -> Mapping[str, Tensor]:
        assert me.data is not None
        features, _ = me.model.features(me.data.x)
        of_label = me.data.of_labels(me.classes)  # (classes, n)
        count = of_label.sum().clamp(min=1)
        h = of_label @ features / count  # (classes, width): p(c) times the mean of c
        spread = (of_label.sum(0) * features.square().sum(1)).sum() / count - h.square().sum()
        return {"h": h, "v": spread / count}

    # --- server half -----------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        widths = {member.units["label-0"] for member in roster.members}
        if len(widths) > 1:
            raise ValueError(
                f"fedpac: clients' features have {len(widths)} unlike widths, and heads cannot be compared; give "
                "models with features of one width, or use the method 'fedproto'"
            )
        k, classes, (width,) = len(roster), roster.classes, next(iter(widths))[0]
        return {
            COUNTS: torch.zeros(k, classes), "h": torch.zeros(k, classes, width), "v": torch.zeros(k),
            "heard": torch.zeros(k, dtype=torch.bool), "matrix": torch.zeros(k, k),
        }  # fmt: skip

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        state, matrix = self._told(state, updates), torch.zeros(len(roster), len(roster))
        for ids in _with_like_heads(roster, state["heard"]):
            for place, i in enumerate(ids.tolist()):
                matrix[i, ids] = mixture_for(place, state["h"][ids], state["v"][ids])
        return {**state, "matrix": matrix}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        if len(roster) == len(before):
            same = all(old.units == new.units for old, new in zip(before.members, roster.members, strict=True))
            return state if same else self.begin(roster)
        longer = {name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in state.items()}
        longer["matrix"] = nn.functional.pad(longer["matrix"], (0, 1))
        if not updates.ups:
            return longer
        known = self._told(longer, updates)
        for ids in _with_like_heads(roster, known["heard"]):
            if int(ids[-1]) == len(before):  # the newcomer's own row: nobody else gets anything of it yet
                longer["matrix"][-1, ids] = mixture_for(len(ids) - 1, known["h"][ids], known["v"][ids])
        return longer

    def plan(self, state: State, roster: Roster) -> Plan:
        plan = super().plan(state, roster).but(nobody([COUNTS], len(roster)).units) | shared_prototypes(
            roster, state[COUNTS]
        )
        matrix, heads = state["matrix"], [_head(member) for member in roster.members]
        # of a newcomer there is no copy: it keeps its own part itself
        pull = torch.where(state["heard"], 1.0, 1 - matrix.diagonal())
        mixed, asked = {}, dict(plan.asked)
        for unit in dict.fromkeys(name for name, _ in heads):
            mine = torch.tensor([name == unit for name, _ in heads])
            mixed[unit], asked[unit] = MixedUnit(matrix * mine * mine[:, None], pull), mine
        return plan.but(mixed, asked)

    def _told(self, state: State, updates: Updates) -> State:
        ids = updates.ids
        told = {name: updates.report(report) for name, report in ((COUNTS, "samples"), ("h", "h"), ("v", "v"))}
        now = {name: state[name].index_copy(0, who, value.cpu()) for name, (who, value) in told.items()}
        return {**state, **now, "heard": state["heard"].index_fill(0, ids, True)}


def mixture_for(i: int, h: Tensor, v: Tensor) -> Tensor:
    """(k,) the parts of k clients' heads in the mixture of client i, from statistics h (k, classes, width) and v (k,).

    >>> h = torch.tensor([[[1.0]], [[1.0]], [[99.0]]])
    >>> mixture_for(0, h, torch.tensor([0.2, 0.1, 0.1]))
    tensor([0.3333, 0.6667, 0.0000])
    """
    from scipy.optimize import nnls

    apart = (h[i] - h).flatten(1).double()  # (k, classes * width)
    scale = max(float(v.double().mean()), 1e-30)
    problem = (torch.diag(v.double().clamp(min=1e-6 * scale)) + apart @ apart.T) / scale
    # a is in proportion to the b >= 0 that makes b' P b / 2 - sum b least; with P = L L' that is least squares
    lower = torch.linalg.cholesky(problem)
    aim = torch.linalg.solve_triangular(lower, torch.ones(len(v), 1, dtype=torch.float64), upper=False)
    parts, _ = nnls(lower.T.numpy(), aim[:, 0].numpy())
    parts = np.where(parts < _LEAST * parts.sum(), 0.0, parts)
    return torch.from_numpy(parts / parts.sum()).float()


def _head(member: ClientInfo) -> tuple[str, Signature]:
    """The unit that is the head of a client's model, and its shapes."""
    return [pair for pair in member.units.items() if pair[0] in member.kinds and member.kinds[pair[0]]][-1]


def _with_like_heads(roster: Roster, heard: Tensor) -> list[Tensor]:
    """The numbers of clients that were heard, those with heads of one shape together."""
    groups: dict[tuple[str, Signature], list[int]] = {}
    for number in heard.nonzero()[:, 0].tolist():
        groups.setdefault(_head(roster.members[number]), []).append(number)
    return [torch.tensor(ids) for ids in groups.values()]
