"""What to say about a name that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(wrong: str, known: Iterable[str], what: str) -> str:
    """A sentence about a name that nobody knows, with the nearest one that somebody does.

    >>> did_you_mean("fedavgg", ["fedavg", "local"], "method")
    "there is no method 'fedavgg'; did you mean 'fedavg'?"
    >>> did_you_mean("x", [], "setting")
    "there is no setting 'x'; there are none here"
    """
    names = list(known)
    spellings = dict.fromkeys([wrong, wrong.lower(), wrong.lower().replace("_", "-"), wrong.lower().replace("-", "_")])
    near = [match for spelling in spellings for match in get_close_matches(spelling, names, n=1)]
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names) or 'none here'}"
    return f"there is no {what} '{wrong}'; {hint}"
