"""Who is asked: clients that were silent again and again are put aside for a while, so that no round waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedquilt.deploy.transport.wire import REASONS

_LONGEST = 32  # rounds
_GLITCH = 5.0  # seconds of waiting that nobody needs to hear of


class NoQuorum(RuntimeError):
    """Too few clients answered, or too few answers could be taken, again and again."""


def no_quorum(round_: int, attempts: int, quorum: float, told: Mapping[str, str]) -> NoQuorum:
    """What ends a run; `told` has why each client's answer to the last attempt was left out, or nothing.

    >>> print(no_quorum(1, 2, 0.5, {"a": "no-answer", "b": ""}))
    round 1 was tried 2 times and fewer than 50% of its clients answered; `fedquilt deploy status` says who is there
    >>> str(no_quorum(1, 2, 0.5, {"a": "not-finite", "b": "not-finite", "c": "no-answer"})).partition("; ")[2]
    'at the last try it held NaN or infinite values (a, b), no answer came in time (c)'
    """
    tried = f"round {round_} was tried {attempts} times and fewer than {quorum:.0%} of its clients "
    reasons: dict[str, list[str]] = {}
    for name, code in told.items():
        if code:
            reasons.setdefault(REASONS[code], []).append(name)
    if reasons.keys() <= {REASONS["no-answer"]}:
        return NoQuorum(f"{tried}answered; `fedquilt deploy status` says who is there")
    shown = (f"{why} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" for why, names in reasons.items())
    return NoQuorum(f"{tried}gave an answer that could be taken; at the last try {', '.join(shown)}")


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
