"""Looking a scenario up by name and building it with settings."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedquilt.scenario import Scenario

Builder = Callable[..., Scenario]


def nearest(wrong: str, known: Iterable[str], kind: str) -> str:
    """A sentence about a name nobody knows, with the nearest known one.

    >>> nearest("digit", ["digits", "femnist"], "scenario")
    "there is no scenario 'digit'; did you mean 'digits'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(wrong.replace("_", "-"), names, n=1, cutoff=0.5) or difflib.get_close_matches(
        wrong, names, n=1, cutoff=0.5
    )
    hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(names)}"
    return f"there is no {kind} '{wrong}'; {hint}"


def settings_of(builder: Builder) -> dict[str, Any]:
    """The keyword settings of a scenario and their defaults, without the seed."""
    return {k: p.default for k, p in inspect.signature(builder).parameters.items() if k != "seed"}


def describe(builder: Builder) -> str:
    """The first line of a scenario's docstring: what lists show."""
    return (inspect.getdoc(builder) or "").partition("\n")[0]


def build_from(scenarios: Mapping[str, Builder], name: str, seed: int, settings: Mapping[str, Any]) -> Scenario:
    """Build the scenario of that name; an unknown name or setting is refused with the nearest one."""
    if name not in scenarios:
        raise ValueError(nearest(name, scenarios, "scenario"))
    builder = scenarios[name]
    for key in settings:
        if key not in settings_of(builder):
            raise ValueError(f"scenario '{name}': " + nearest(key, settings_of(builder), "setting"))
    origin = {"name": name, "seed": seed, "settings": dict(settings)}
    return replace(builder(seed=seed, **settings), origin=origin)
