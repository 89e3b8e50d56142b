"""One exchange of letters as the server sees it: its record, what is in an answer, and how large one may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedquilt.deploy.transport.codec import Text
from fedquilt.deploy.transport.transport import Patience, Transport
from fedquilt.deploy.transport.wire import Refused, unpack

FROM_DEVICES = (
    "failed", "lost-state", "unreadable", "wrong-version", "unknown-method", "other-code", "bad-letter", "not-finite",
    "out-of-range", "unsafe-sum", "open-copy", "asked-again",
)  # fmt: skip
_HEAD, _NUMBER = 1 << 20, 12  # bytes of an answer beside its numbers, and of a count written out


@dataclass
class Exchange:
    """What one exchange of letters was: for the log and for `status`."""

    round: int
    what: str  # "hello", "round", "newcomer", "shares", "masked", "unmask", "sums" or "end", where clients only look
    attempt: int
    asked: list[str]
    answered: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)  # what a code does not say
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def open_answer(content: bytes, token: str, round_: int) -> tuple[dict[str, Any], Text]:
    """An answer's arrays and text, if it is the answer to the letter with this token and round."""
    if not content:
        raise Refused("failed")
    arrays, text = unpack(content)
    if text.get("token") != token:
        raise Refused("wrong-round")
    code = text.get("code")
    if code is not None:
        raise Refused(code if code in FROM_DEVICES else "failed")
    if text.get("round") != round_:
        raise Refused("wrong-round")
    return arrays, text


def collect(
    post: Transport, letters: Mapping[str, bytes], names: list[str], tokens: Mapping[int, str], record: Exchange,
    patience: Patience, read: Callable[[int, dict[str, Any], Text], bool | None],
) -> None:  # fmt: skip
    """Sends letters and reads each answer, noting what became of all in `record`; `tokens` are those of the letters, by
    the clients' numbers in `names`. `read` refuses an answer by `Refused`, and says True where no more are wanted."""
    start = time.perf_counter()
    record.bytes_down = {name: len(letter) for name, letter in letters.items()}
    for answer in post.exchange(letters, record.round, patience):
        record.bytes_up[answer.client] = record.bytes_up.get(answer.client, 0) + len(answer.content)
        enough = False
        try:
            if answer.code:
                raise Refused(answer.code)
            if answer.client not in letters:
                raise Refused("unknown-client")
            if answer.client in record.answered:
                raise Refused("duplicate")
            number = names.index(answer.client)
            enough = bool(read(number, *open_answer(answer.content, tokens[number], record.round)))
            record.answered.append(answer.client)
            patience.good()
        except Refused as refusal:
            record.refused[answer.client] = refusal.code
        if enough:
            break
    record.seconds = time.perf_counter() - start


def largest_answer(numbers: int, classes: int, tables: int) -> int:
    """Bytes that an honest answer has at most: a client's numbers, reports of some times that, and counts as text.

    >>> largest_answer(1000, 10, 4)
    1069856
    """
    return _HEAD + 4 * 4 * numbers + tables * classes * (classes + 1) * _NUMBER
