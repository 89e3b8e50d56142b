"""Files of a run directory as text, and what the text says; what was changed after it was written is noticed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt._util.checksums import Damaged, check, digest, sealed


def texts_of(folder: Path, settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Files of a run as text; if it is finished, as they were then."""
    is_finished = (folder / "summary.json").is_file()
    wanted = sealed(folder, settings.get("format")) if is_finished else {}
    gone = [name for name in names if name in wanted and not (folder / name).is_file()]
    if gone:
        raise Damaged(f"'{folder / gone[0]}' is gone; get it from a copy, or run again")
    return {name: text_of(folder / name, wanted.get(name)) for name in names}


def text_of(path: Path, checksum: str | None = None) -> str:
    """A file with this checksum (None: nobody knows it) as text; empty where there is none."""
    data = path.read_bytes() if path.is_file() else b""
    check(path, digest(data), checksum)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not text ({error}); get it from a copy, or run again") from None


def json_of(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not JSON ({error}); remove it to report the rest of the run") from None
    return found if isinstance(found, dict) else {}


def toml_of(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not TOML ({error}); remove it to report the rest of the run") from None


def lines_of(path: Path, text: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a last line cut short (the run goes on, or was killed) is left out."""
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        return list(json.loads("[" + ",".join(lines) + "]"))  # one call: four times as fast as one a line
    except (ValueError, RecursionError):
        found = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                if number < len(lines):
                    raise ValueError(f"line {number} of '{path}' is not JSON ({error})") from None
        return found


def find(*places: Any) -> Any:
    """The value of the key given last, in the first place that has it, at the top or one table down."""
    *tables, key = places
    for table in tables:
        if key in table:
            return table[key]
    for table in tables:
        for inner in table.values():
            if isinstance(inner, dict) and key in inner:
                return inner[key]
    return None


def name_of(value: Any, fallback: str) -> str:
    """A scenario or method is given by its name or as a table with a name in it."""
    if isinstance(value, dict):
        value = value.get("name", fallback)
    return fallback if value is None else str(value)
