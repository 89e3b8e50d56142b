"""Names that become files and folders."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def plain_name(name: object, longest: int = 150) -> bool:
    """Whether a text can be the name of a file or folder and nothing else.

    >>> plain_name("digits-modfl-0"), plain_name("../x"), plain_name("")
    (True, False, False)
    """
    return isinstance(name, str) and len(name) <= longest and _NAME.fullmatch(name) is not None


def check_names(names: Sequence[str]) -> None:
    """Client names become folder names, so they are plain.

    >>> check_names(["phone-1", "../x"])
    Traceback (most recent call last):
    ...
    ValueError: the client name '../x' cannot be a folder; use letters, digits, '.', '_' and '-', at most 64
    """
    for name in names:
        if not plain_name(name, 64):
            raise ValueError(
                f"the client name '{name}' cannot be a folder; use letters, digits, '.', '_' and '-', at most 64"
            )
    if len(set(names)) < len(names):
        raise ValueError("two clients have the same name; names must be unique")
