"""Who puts which units to use, kept from round to round: for methods whose clients choose units for themselves.

What is known is a dict of tensors, part of a method's state: by unit (K,), whether a client has a use for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedquilt.interface.messages import Roster

Usage = dict[str, Tensor]


def at_first(roster: Roster) -> Usage:
    """Everybody uses all that it has."""
    return {unit: roster.has(unit) for unit in roster.units}


def after_hearing(usage: Usage, units: Sequence[str], ids: Sequence[int], now: Tensor) -> Usage:
    """The same where clients said which of some units they use, now (k, units).

    >>> after_hearing({"a": torch.tensor([True, True])}, ["a"], [1], torch.tensor([[False]]))["a"].tolist()
    [True, False]
    """
    found = {unit: using.clone() for unit, using in usage.items()}
    for at, unit in enumerate(units):
        found[unit][list(ids)] = now[:, at].cpu()
    return found


def after_joining(usage: Usage, before: Roster, roster: Roster) -> Usage:
    """Whoever is new, or has another model now, uses all that it has; the others what they did."""
    new, found = roster.changed(before), {}
    for unit in roster.units:
        known = torch.zeros(len(roster), dtype=torch.bool)
        if unit in usage:
            known[: len(usage[unit])] = usage[unit]
        found[unit] = torch.where(new, roster.has(unit), known)
    return found


def usage_facts(usage: Usage, units: Sequence[str], roster: Roster) -> dict[str, float]:
    """The share of some units that are in use, over all clients that have them, and how many selections there are."""
    use = torch.stack([usage[unit] for unit in units], dim=1)  # (K, units)
    has = torch.stack([roster.has(unit) for unit in units], dim=1)
    return {
        "blocks_in_use": float(use.sum() / has.sum()),
        "selections_of_blocks": len(set(map(tuple, use.tolist()))),
    }
