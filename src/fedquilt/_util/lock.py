"""One worker at a time in a directory, as long as it lives: locks that a kill releases too.

`Lock` refuses whoever comes second. Between processes the system keeps it: a lock of the whole process, which workers
that it forks do not inherit. Closing the file anywhere in the process gives it away, so the threads first settle among
themselves who may so much as open the file.

`in_turn` lets whoever comes second wait. It is a lock of the open file, which threads need not settle anything for; a
process that is forked inside of it would hold it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without POSIX locks: nobody is kept out there
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
_held: dict[tuple[int, int, int], Lock] = {}  # by process, which a fork changes, and directory


class Held(BlockingIOError):
    """Another process, or another thread of this one, is at work in the directory."""


class Lock:
    """A lock on a directory. It belongs to this object in this process alone: forked workers do not hold it.

    >>> import tempfile
    >>> lock = Lock(Path(tempfile.mkdtemp()))
    >>> lock.take()
    >>> lock.release()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: int | None = None
        self._key: tuple[int, int, int] | None = None

    def take(self) -> None:
        """Take it, or say who has it."""
        if self._key is not None:
            return
        place = self.folder.stat()
        key = (os.getpid(), place.st_dev, place.st_ino)
        if _held.setdefault(key, self) is not self:  # one step, which no other thread can come between
            raise Held(f"another thread of this process is at work in '{self.folder}'; wait for it")
        try:
            self._take_among_processes()
            self._key = key
        finally:
            if self._key is None:
                del _held[key]

    def _take_among_processes(self) -> None:
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
        if self._key is not None:
            _held.pop(self._key, None)
            self._key = None


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Wait until nobody else, of this process or another, is inside with the same file; the file stays.

    >>> import tempfile
    >>> with in_turn(Path(tempfile.mkdtemp()) / "lock"):
    ...     print("alone")
    alone
    """
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _inode(path: Path) -> int:
    """Which file is at a path now: the lock's last owner may have removed the one that was there; -1: none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1
