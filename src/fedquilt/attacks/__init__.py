"""Attacks: clients that lie, to see what a merge and a method bear. One dict of names, `ATTACKS`."""

from __future__ import annotations

from typing import Any

from fedquilt._util.suggest import did_you_mean
from fedquilt._util.wording import settings_of
from fedquilt.attacks.attack import Attack, Sent
from fedquilt.attacks.lies import ALittleIsEnough, Gaussian, Impostor, InnerProduct, LabelFlip, Mimic, SignFlip

ATTACKS: dict[str, type[Attack]] = {
    kind.name: kind for kind in (SignFlip, LabelFlip, ALittleIsEnough, InnerProduct, Mimic, Gaussian, Impostor)
}

__all__ = [
    "ATTACKS",
    "ALittleIsEnough",
    "Attack",
    "Gaussian",
    "Impostor",
    "InnerProduct",
    "LabelFlip",
    "Mimic",
    "Sent",
    "SignFlip",
    "attack_of",
    "pick",
]


def attack_of(name: str) -> type[Attack]:
    """The kind of attack of a name."""
    if name not in ATTACKS:
        raise ValueError(did_you_mean(name, ATTACKS, "attack"))
    return ATTACKS[name]


def pick(name: str, **settings: Any) -> Attack:
    """The attack of that name, with its settings.

    >>> pick("alie", liars=0.4)
    ALittleIsEnough(liars=0.4, tau=1.5)
    """
    kind = attack_of(name)
    for key in settings:
        if key not in settings_of(kind):
            raise ValueError(did_you_mean(key, settings_of(kind), f"setting of the attack {name}"))
    return kind(**settings)
