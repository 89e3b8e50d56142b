"""Damage to bytes and texts that fuzzing draws, and how much of it: little in the normal suite, much by `make fuzz`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

T = TypeVar("T")
# What the command says as a sentence; anything else is a traceback, and so a defect.
SENTENCES = (ValueError, LookupError, OSError)


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """So many examples in the normal suite, and as many times more as a profile has more than hypothesis' 100.

    Those of the normal suite are the same each time, so that it passes or fails for what was changed.
    """
    more = max(1, settings().max_examples // 100)
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    often = examples * more
    return settings(max_examples=often, deadline=None, suppress_health_check=quiet, derandomize=more == 1)


def attempt(what: Callable[[], T], also: tuple[type[Exception], ...] = ()) -> tuple[T | None, str]:
    """What something gave, and nothing; or None and the sentence by which it was refused."""
    expected: tuple[type[Exception], ...] = (*SENTENCES, *also)
    try:
        return what(), ""
    except expected as error:
        return None, str(error).strip() or type(error).__name__


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes with a few changes: bits flipped, parts cut, doubled, moved, or strewn in; numbers and words exchanged."""
    data = whole
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(1, 12))
        way = draw(st.sampled_from(["flip", "cut", "end", "double", "strew", "number", "word", "byte"]))
        if way == "flip" and data:
            data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        elif way == "byte" and data:
            data = data[:at] + draw(st.sampled_from([b"\x00", b"\xff", b"\n", b'"', b"[", b"}", b"-"])) + data[at + 1 :]
        elif way == "cut":
            data = data[:at] + data[at + length :]
        elif way == "end":
            data = data[:at]
        elif way == "double":
            data = data[: at + length] + data[at:]
        elif way == "strew":
            data = data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
        elif way == "number":
            data = _exchanged(
                draw, data, rb"-?\d+(\.\d+)?", [b"0", b"-1", b"7", b"1e99", b"nan", b"2.5", b"9" * 25, b'"x"']
            )
        else:
            data = _exchanged(
                draw, data, rb'"[^"\n]*"|true|false', [b'""', b"[]", b"{}", b"3", b"true", b'"\\u0000"', b'"a"']
            )
    return data


def _exchanged(draw: st.DrawFn, data: bytes, pattern: bytes, others: list[bytes]) -> bytes:
    """The data with one match of a pattern replaced."""
    found = list(re.finditer(pattern, data[:20_000]))
    if not found:
        return data
    match = draw(st.sampled_from(found))
    return data[: match.start()] + draw(st.sampled_from(others)) + data[match.end() :]
