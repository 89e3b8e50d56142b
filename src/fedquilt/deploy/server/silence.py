"""Who is asked: clients that were silent again and again are put aside for a while, so that no round waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_LONGEST = 32  # rounds
_GLITCH = 5.0  # seconds of waiting that nobody needs to hear of


class NoQuorum(RuntimeError):
    """Too few clients answered, again and again."""


class Silence:
    """How often in a row each client was silent, and until which round it is not asked.

    >>> silence = Silence()
    >>> for round_ in (1, 2, 4):
    ...     silence.note(round_, silent=["a"], heard=["b"])
    >>> [silence.aside("a", round_) for round_ in range(5, 9)], silence.aside("b", 5)
    ([True, True, False, False], False)
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        kept = kept or {}
        self.times: dict[str, int] = dict(kept.get("times", {}))
        self.until: dict[str, int] = dict(kept.get("until", {}))

    def aside(self, name: str, round_: int) -> bool:
        """Whether a client is not asked in a round."""
        return round_ <= self.until.get(name, 0)

    def note(self, round_: int, silent: Iterable[str], heard: Iterable[str]) -> None:
        """Notes who was silent: the second time in a row costs a round, each further time twice as many."""
        for name in heard:
            self.times.pop(name, None)
            self.until.pop(name, None)
        for name in silent:
            self.times[name] = self.times.get(name, 0) + 1
            if self.times[name] > 1:
                self.until[name] = round_ + min(_LONGEST, 2 ** (self.times[name] - 2))

    def wait_for(
        self,
        there: Callable[[], set[str]],
        names: Sequence[str],
        needed: int,
        round_: int,
        timeout: float,
        tell: Callable[[str], None],
    ) -> list[str]:
        """Those of some clients that are there, waiting a while until there are enough; all if there are not. Whom it
        waits for is told, and at the end that it waits for nobody."""
        start, told = time.monotonic(), ""
        try:
            while True:
                now = there()
                found = [name for name in names if name in now]
                heard = [name for name in found if not self.aside(name, round_)]
                if len(heard) >= max(1, needed):
                    return heard
                if len(found) >= needed:
                    return found
                passed = time.monotonic() - start
                if passed > timeout:
                    return list(names)
                missing = ", ".join(name for name in names if name not in now)
                if passed > _GLITCH and missing != told:
                    tell(missing)
                    told = missing
                time.sleep(1)
        finally:
            if told:
                tell("")

    def kept(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"times": self.times, "until": self.until}
