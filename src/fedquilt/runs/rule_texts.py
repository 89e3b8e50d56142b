"""Merges, attacks and settings as plain values, and back: what `run.toml` holds of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedquilt import attacks
from fedquilt._util.plain_values import python
from fedquilt._util.toml import NONE, values_of
from fedquilt.attacks import ATTACKS, Attack
from fedquilt.sharing import MERGES, Rule, named_settings, pick


def rule_to(rule: Rule) -> dict[str, Any]:
    """A merge as its name and settings."""
    found = named_settings(rule)
    if found is None:
        raise ValueError(f"a run on disk can only use the merges {', '.join(MERGES)}, not {rule}")
    return dict(plain(found))


def rule_from(text: Mapping[str, Any]) -> Rule:
    """The merge that `rule_to` described."""
    return pick(text["name"], **values_of({key: value for key, value in text.items() if key != "name"}))


def attack_to(attack: Attack) -> dict[str, Any]:
    """An attack as its name and settings."""
    if ATTACKS.get(attack.name) is not type(attack):
        raise ValueError(f"a run on disk can only use the attacks {', '.join(ATTACKS)}, not {attack}")
    return {"name": attack.name, **plain({key: value for key, value in asdict(attack).items() if value is not None})}


def attack_from(text: Mapping[str, Any] | None) -> Attack | None:
    """The attack that `attack_to` described, where there was one."""
    return None if text is None else attacks.pick(text["name"], **{k: v for k, v in text.items() if k != "name"})


def plain(value: Any) -> Any:
    """A setting as TOML and JSON can hold it; `values_of` turns it back."""
    value = python(value)
    if value is None:
        return NONE
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise ValueError(f"a run on disk cannot keep the setting {value!r}; use numbers, texts, lists and tables")
