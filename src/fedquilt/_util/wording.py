"""What tables, lists and reports say in the same way everywhere; with Python's own library alone, as it loads fast."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def percent(value: float | None, sign: bool = False) -> str:
    """A share in per cent.

    >>> percent(0.849), percent(0.06, sign=True), percent(-0.0001, sign=True), percent(None)
    ('84.9', '+6.0', '+0.0', '–')
    """
    if value is None:
        return "–"
    return f"{100 * value:{'+' if sign else ''}.1f}".replace("-0.0", "+0.0" if sign else "0.0")


def megabytes(value: float | None) -> str:
    """Megabytes to three digits, or to the whole one.

    >>> megabytes(0), megabytes(0.0123), megabytes(15.241), megabytes(1234.5), megabytes(None)
    ('0', '0.0123', '15.2', '1,234', '–')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def worst_decile(values: Sequence[float], higher: bool = True) -> float:
    """The mean over the worst tenth of the clients, at least one; `higher` says whether more is better.

    >>> worst_decile([0.9, 0.5, 0.8]), worst_decile([0.9, 0.5, 0.8], higher=False)
    (0.5, 0.9)
    """
    tenth = sorted(values, reverse=not higher)[: max(1, len(values) // 10)]
    return sum(tenth) / len(tenth)


def finite(value: Any) -> Any:
    """A value as JSON can hold it, which has no NaN and no infinity: they become null.

    >>> finite({"gain": float("nan"), 3: (0.5, float("inf"))})
    {'gain': None, '3': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(table: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Nested tables as dotted names.

    >>> flat({"seed": 0, "method": {"name": "feddl", "linkage": "average"}})
    [('seed', 0), ('method.name', 'feddl'), ('method.linkage', 'average')]
    """
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{above}.{key}" if above else str(key)
        pairs.extend(flat(value, name) if isinstance(value, Mapping) else [(name, value)])
    return pairs


def first_line(thing: object) -> str:
    """The first line of a docstring: what lists show.

    >>> first_line(percent)
    'A share in per cent.'
    """
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def settings_of(thing: Callable[..., Any]) -> dict[str, Any]:
    """The settings that a function or class takes by name, without the seed, and their defaults.

    A setting that has to be given has the default `inspect.Parameter.empty`.

    >>> settings_of(percent)
    {'value': <class 'inspect._empty'>, 'sign': False}
    """
    parameters = inspect.signature(thing).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "seed"]
    return {p.name: p.default for p in named}
