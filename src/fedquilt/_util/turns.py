"""One thread at a time where PyTorch has something once for a whole process.

Random generators, the switch of the attention's fast path, precisions of matrix products, tracing (which puts functions
of its own into `nn.Module`) and capturing belong to the process, not to a thread: where models are built, tried,
trained or run, threads take turns.
"""

from __future__ import annotations

import os
import threading
from contextlib import ContextDecorator


class _OneAtATime(ContextDecorator):
    """Held by one thread at a time, which may take it again."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget who holds it: in a forked process the other threads are not there to give it back."""
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *of_error: object) -> None:
        self.lock.release()


one_at_a_time = _OneAtATime()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=one_at_a_time.renew)
