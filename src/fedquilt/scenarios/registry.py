"""Looking a scenario up by name and building it with settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedquilt._util.plain_values import python, whole
from fedquilt._util.suggest import did_you_mean
from fedquilt._util.wording import settings_of
from fedquilt.scenario import Scenario

Builder = Callable[..., Scenario]


def build_from(scenarios: Mapping[str, Builder], name: str, seed: int, settings: Mapping[str, Any]) -> Scenario:
    """Build the scenario of that name; an unknown name or setting is refused with the nearest one."""
    if name not in scenarios:
        raise ValueError(did_you_mean(name, scenarios, "scenario"))
    builder = scenarios[name]
    for key in settings:
        if key not in settings_of(builder):
            raise ValueError(f"scenario '{name}': " + did_you_mean(key, settings_of(builder), "setting"))
    seed, settings = whole(seed, "seed"), python(dict(settings))
    origin = {"name": name, "seed": seed, "settings": settings}
    return replace(builder(seed=seed, **settings), origin=origin)
