"""One process at a time in a directory, as long as it lives: a lock that a kill releases too."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without POSIX locks: nobody is kept out there
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"


class Held(BlockingIOError):
    """Another process is at work in the directory."""


class Lock:
    """A lock on a directory. It belongs to this process alone: forked workers do not hold it.

    >>> import tempfile
    >>> lock = Lock(Path(tempfile.mkdtemp()))
    >>> lock.take()
    >>> lock.release()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: int | None = None

    def take(self) -> None:
        """Take it, or say who has it."""
        while self._file is None and fcntl is not None:
            file = os.open(self.folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_ino == _inode(self.folder / NAME):
                    self._file = file
                    with suppress(OSError):  # only a courtesy to whoever finds the lock taken
                        os.ftruncate(file, 0)
                        os.write(file, f"{os.getpid()}\n".encode())
            except OSError:
                owner = os.read(file, 20).decode(errors="replace").strip() or "unknown"
                raise Held(
                    f"another process (number {owner}) is at work in '{self.folder}'; wait for it, or end it"
                ) from None
            finally:
                if self._file is None:
                    os.close(file)

    def release(self) -> None:
        """Give it back."""
        if self._file is not None:
            (self.folder / NAME).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def _inode(path: Path) -> int:
    """Which file is at a path now: the lock's last owner may have removed the one that was there; -1: none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1
