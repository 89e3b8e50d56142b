"""Plain values as TOML, and back to what they were before they became text. Reading is `tomllib`'s."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NONE = {"none": True}  # TOML has no word for None


def values_of(text: Any) -> Any:
    """Values as they were before TOML or JSON held them: lists are tuples again, and None is None.

    >>> values_of({"blocks": [3, [3]], "width": {"none": True}})
    {'blocks': (3, (3,)), 'width': None}
    """
    if text == NONE:
        return None
    if isinstance(text, Mapping):
        return {key: values_of(part) for key, part in text.items()}
    return tuple(values_of(part) for part in text) if isinstance(text, list | tuple) else text


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Plain values as TOML; a key whose value is None is left out, since TOML has no word for it.

    >>> print(to_toml({"seed": 0, "method": {"name": "fedprox", "settings": {"mu": 0.1}}}))
    seed = 0
    <BLANKLINE>
    [method]
    name = "fedprox"
    <BLANKLINE>
    [method.settings]
    mu = 0.1
    <BLANKLINE>
    """
    lines = [f"{_key(key)} = {_text(value)}" for key, value in table.items() if not _apart(value) and value is not None]
    text = "\n".join(lines) + ("\n" if lines else "")
    for key, value in table.items():
        if _apart(value):
            name = f"{path}.{_key(key)}" if path else _key(key)
            text += f"\n[{name}]\n" + to_toml(value, name)
    return text


def _apart(value: Any) -> bool:
    """Whether a value is a table with a heading of its own."""
    return isinstance(value, Mapping) and value != NONE


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _quoted(key)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(part) for part in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_text(v)}" for k, v in value.items()) + "}"
    return _quoted(value) if isinstance(value, str) else str(value)
