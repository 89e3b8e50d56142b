"""Merging: the copies that clients sent become one value per circle. And installing: a client moves towards it.

Every rule takes `(values (k, size), circle (k,), weight (k,), circles)`, where `circle` holds row numbers below
`circles`, and gives a `Merged`. A row that is not finite is left out and told, never merged. A rule with
`needs_context` is also given a `MergeContext`: the circles' last values, and whom the server trusts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt.sharing.mixedunit import AnyUnit, MixedUnit
from fedquilt.sharing.robust import Median
from fedquilt.sharing.rule import NOTHING_KNOWN, MergeContext, Rule, apply_rule
from fedquilt.sharing.weighted_sums import Merged, Sums

Part = tuple[Tensor, Tensor]  # client numbers (k,) and their copies (k, size)


@dataclass(frozen=True)
class Mean:
    """The weighted mean of each circle.

    >>> mean(torch.tensor([[1.0], [4.0]]), torch.tensor([0, 0]), torch.tensor([1.0, 3.0]), 1).value
    tensor([[3.2500]])
    """

    def __call__(self, values: Tensor, circle: Tensor, weight: Tensor, circles: int) -> Merged:
        return Sums.of(values, circle, weight, circles).mean()


mean, median = Mean(), Median()


def merge_unit(
    unit: AnyUnit, parts: Sequence[Part], rule: Rule = mean, context: MergeContext = NOTHING_KNOWN
) -> Merged:  # fmt: skip
    """What was sent of one unit, merged by its plan. `parts`: one pair of client numbers and copies per family.
    `trusted` of the context is over all clients here, (K,).

    Whoever is not in a part is not heard. The rows of the result are those of `unit.labels`; of a mixed unit each
    client has a row of its own, its copy, to be mixed when somebody receives it (`mix`): who is not heard in a round is
    in the mixtures with what it sent last. Means add part by part; the robust rules look at all copies together.

    >>> from fedquilt.sharing.unitplan import UnitPlan
    >>> unit = UnitPlan(circle=[5, 5, -1, 2], weight=[1, 3, 1, 1])
    >>> merged = merge_unit(unit, [(torch.tensor([0, 1]), torch.tensor([[1.0], [4.0]]))])
    >>> merged.value[1], merged.heard                   # circle 2 is row 0: nobody was heard there
    (tensor([3.2500]), tensor([False,  True]))
    """
    if not parts:
        raise ValueError("nothing to merge; when no copy was sent a circle keeps its value")
    device, size = parts[0][1].device, parts[0][1].shape[1]
    here = unit.to(device)
    parts = [(ids.to(device, non_blocking=True), values) for ids, values in parts if len(ids)]
    if not parts:
        nobody = torch.zeros(here.count, dtype=torch.bool, device=device)
        return Merged(torch.zeros(here.count, size, device=device), nobody, nobody[:0], nobody.float())
    if isinstance(here, MixedUnit) and not isinstance(rule, Mean):
        raise ValueError(f"a mixed unit has no circles, so {rule} cannot merge it; use 'mean', or plan circles")
    weight = torch.ones(len(here), device=device) if isinstance(here, MixedUnit) else here.weight
    if not isinstance(rule, Mean):
        ids, values = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return apply_rule(rule, values, here.row[ids], weight[ids], here.count, context.of(ids))
    rows = [None if here.count == 1 else here.row[ids] for ids, _ in parts]
    sums = [Sums.of(v, row, weight[ids], here.count) for row, (ids, v) in zip(rows, parts, strict=True)]
    return sum(sums[1:], sums[0]).mean()


def mix(shares: Tensor, copies: Tensor) -> Merged:
    """Mixtures of copies (K, size), one for each row of shares (R, K); shares count in proportion to their sum.

    >>> mix(torch.tensor([[0.5, 0.25, 0.0]]), torch.tensor([[2.0], [8.0], [100.0]])).value
    tensor([[4.]])
    """
    return Sums.mixed(copies, shares).mean()


def install(own: Tensor, received: Tensor, pull: Tensor) -> Tensor:
    """(k, size) each own copy moved towards what was received: (1 - pull) own + pull received.

    With pull 1 exactly what was received and with pull 0 exactly one's own, whatever the other holds, NaN included.

    >>> install(torch.tensor([[0.0], [0.0]]), torch.tensor([[8.0], [8.0]]), torch.tensor([0.25, 1.0]))
    tensor([[2.],
            [8.]])
    """
    pull = pull[:, None]
    moved = torch.lerp(own, received, pull)
    torch.where(pull >= 1, received, moved, out=moved)
    return torch.where(pull <= 0, own, moved, out=moved)


def inherit(unit: AnyUnit, older: AnyUnit) -> Tensor:
    """(C,) for each circle of a new plan, the row of the older plan's values that it starts from, or -1 for none.

    A circle with the same id keeps its value, a mixture that of the same client. A new one (a group that split) starts
    from the circle most of its members were in. Only read when nobody is heard in the circle.

    >>> from fedquilt.sharing.unitplan import UnitPlan
    >>> inherit(UnitPlan([0, 0, 3, 3, 4]), UnitPlan([0, 0, 0, 0, -1])).tolist()
    [0, 0, -1]
    """
    unit, older = unit.to("cpu"), older.to("cpu")
    both = _has_row(unit)[: len(older)] & _has_row(older)  # whoever joined since was in no circle
    votes = torch.zeros(unit.count, max(1, older.count), dtype=torch.int64)
    votes.index_put_((unit.row[: len(older)][both], older.row[both]), torch.ones(1, dtype=torch.int64), accumulate=True)
    rows = torch.where(votes.any(1), votes.argmax(1), -1)
    if not older.count or type(unit) is not type(older):  # ids of circles and numbers of clients are not alike
        return rows
    same = unit.labels[:, None] == older.labels  # (C, older C)
    return torch.where(same.any(1), same.long().argmax(1), rows)


def _has_row(unit: AnyUnit) -> Tensor:
    """(K,) whose circle, or own mixture, has a row among the unit's values."""
    return torch.ones(len(unit), dtype=torch.bool) if isinstance(unit, MixedUnit) else unit.circle >= 0
