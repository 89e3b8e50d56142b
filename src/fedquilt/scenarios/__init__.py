"""The papers' federations, and the bundled one: `build("digits", seed=0)`; `SCENARIOS` has them all by name."""

from __future__ import annotations

from typing import Any

from fedquilt.scenario import Scenario
from fedquilt.scenarios.digits import digits
from fedquilt.scenarios.registry import Builder, build_from, describe, settings_of

SCENARIOS: dict[str, Builder] = {
    "digits": digits,
}


def build(name: str, seed: int = 0, **settings: Any) -> Scenario:
    """The scenario of that name, built with these settings; a wrong name or setting is refused with the nearest one.

    >>> len(build("digits", clients=8).clients)
    8
    >>> build("digitz")
    Traceback (most recent call last):
    ...
    ValueError: there is no scenario 'digitz'; did you mean 'digits'?
    """
    return build_from(SCENARIOS, name, seed, settings)


__all__ = ["SCENARIOS", "build", "describe", "settings_of"]
