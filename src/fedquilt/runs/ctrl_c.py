"""A first Ctrl-C that lets a round end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def first_ctrl_c(wanted: bool) -> Iterator[list[int]]:
    """While this holds, the first Ctrl-C is only noted, so that a round can end and be kept; a second ends at once."""
    stop: list[int] = []
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: FrameType | None) -> None:
        stop.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
