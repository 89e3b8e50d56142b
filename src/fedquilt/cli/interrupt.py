"""Ctrl-C at a bad moment: while compiled libraries are loaded."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_COMPILED = frozenset({"numpy", "scipy", "sklearn", "torch"})
_AGAIN = 0.1  # seconds until a Ctrl-C that came too early comes again


@contextmanager
def patient_ctrl_c() -> Iterator[None]:
    """While this holds, a Ctrl-C waits for libraries that are being loaded: interrupted in there, they abort."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # somebody else's to handle
        return

    main_thread = threading.get_ident()

    def handler(number: int, frame: FrameType | None) -> None:
        if not _loading():
            raise KeyboardInterrupt
        # To the main thread itself: one that waits for something is not woken by a signal to another.
        later = threading.Timer(_AGAIN, signal.pthread_kill, [main_thread, number])
        later.daemon = True
        later.start()

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _loading() -> bool:
    """Whether a compiled library is being imported now."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in _COMPILED]
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)
