"""Plans of the usual patterns: everyone, nobody, by trait, by label, and among those who have a use for a unit."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import torch
from torch import Tensor

from fedquilt.sharing.grouping import circles_by_labels, circles_by_trait
from fedquilt.sharing.plan import Plan
from fedquilt.sharing.planned import Numbers
from fedquilt.sharing.unitplan import UnitPlan


def everyone(units: Sequence[str], samples: Numbers, pull: Numbers | float = 1.0) -> Plan:
    """Every unit in one circle of all clients, weighted by sample counts: FedAvg.

    >>> print(everyone(["conv", "head"], samples=[10, 30]))
    conv       1 circle of 2
    head       1 circle of 2
    """
    samples = torch.as_tensor(samples)
    unit = UnitPlan(torch.zeros(len(samples), dtype=torch.int64), samples, pull)
    return Plan(dict.fromkeys(units, unit))


def nobody(units: Sequence[str], clients: int) -> Plan:
    """Every unit private: local training.

    >>> print(nobody(["head"], clients=3))
    head       private
    """
    return Plan(dict.fromkeys(units, UnitPlan(torch.full((clients,), -1), 0.0, 0.0)))


def by_trait(
    units: Sequence[str], values: Sequence[Hashable], weights: Numbers | float = 1.0, pull: Numbers | float = 1.0
) -> Plan:
    """Every unit in one circle per distinct value of a trait; None keeps a client's copy private.

    >>> print(by_trait(["configuration"], ["gen1", "gen2", "gen1", "gen2", "gen1"]))
    configuration  2 circles of 3, 2
    """
    return Plan(dict.fromkeys(units, UnitPlan(circles_by_trait(values), weights, pull)))


def by_labels(
    labels: Sequence[Collection[int]],
    classes: int,
    weights: Numbers | float = 1.0,
    pull: Numbers | float = 1.0,
    units: Sequence[str] | None = None,
) -> Plan:
    """A unit per label, shared by the clients that have it: score sharing. `weights` may be (K,) or (K, classes).

    >>> print(by_labels([{0, 1}, {1, 2}, {1, 2}], classes=3))
    label-0    private
    label-1    1 circle of 3
    label-2    1 circle of 2; 1 private
    """
    names = units if units is not None else [f"label-{label}" for label in range(classes)]
    if len(names) != classes:
        raise ValueError(f"{len(names)} unit names for {classes} labels; give one name per label")
    loud = torch.as_tensor(weights, dtype=torch.float32)
    if loud.ndim == 2 and loud.shape != (len(labels), classes):
        raise ValueError(f"weights have shape {tuple(loud.shape)}; give (clients, labels) = {(len(labels), classes)}")
    strange = sorted({label for owned in labels for label in owned if not 0 <= label < classes})
    if strange:
        raise ValueError(f"a client owns label {strange[0]}, but there are {classes}, from 0 up")
    circle = circles_by_labels(labels, classes)
    return Plan(
        {name: UnitPlan(circle[c], loud[:, c] if loud.ndim == 2 else loud, pull) for c, name in enumerate(names)}
    )


def in_use(circle: Tensor, using: Tensor, samples: Tensor) -> tuple[UnitPlan, Tensor]:
    """A unit in its circles (K,), shared by those who have a use for it now, (K,); and who is asked to send it too.

    A circle outlasts its users: its value is kept where nobody has a use for it, and whoever is the only one sends its
    copy too, so that the next to join starts from that.

    >>> plan, asked = in_use(torch.tensor([0, 0, 0]), torch.tensor([True, False, False]), torch.ones(3))
    >>> plan.lists, asked.tolist()
    ({'circle': [0, -1, -1], 'weight': [1.0, 0.0, 0.0], 'pull': [1.0, 0.0, 0.0]}, [True, False, False])
    """
    using = using & (circle >= 0)
    inside, alone = using.clone(), torch.zeros_like(using)
    for number in sorted(set(circle.tolist()) - {-1}):
        members = circle == number
        if not bool(using[members].any()):
            inside[members.nonzero()[0]] = True  # weight and pull 0: nothing moves, but the value is kept
        elif int(using[members].sum()) == 1:
            alone |= using & members
    return UnitPlan(torch.where(inside, circle, -1), samples * using, using.float()), alone
