"""Settings that are one of a few words, as their type says."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints


@cache
def choices_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """The choices of each field of a dataclass that is a `Literal`."""
    try:
        hints = get_type_hints(kind)
    except NameError:  # of a class that is written where its hints are known, and nowhere else
        return {}
    return {f.name: get_args(hints[f.name]) for f in fields(kind) if get_origin(hints[f.name]) is Literal}


def check_choices(value: Any, name: str) -> None:
    """Refuse a dataclass with a field that is none of its choices; `name` begins the sentence.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Soup:
    ...     served: Literal["hot", "warm", "cold"] = "hot"
    >>> check_choices(Soup("frozen"), "soup")
    Traceback (most recent call last):
    ...
    ValueError: soup: served is hot, warm or cold, not 'frozen'
    """
    for key, choices in choices_of(value.__class__).items():
        given = getattr(value, key)
        if given not in choices:
            *most, last = map(str, choices)
            raise ValueError(f"{name}: {key} is {', '.join(most)} or {last}, not '{given}'")
