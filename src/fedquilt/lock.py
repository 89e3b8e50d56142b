"""One worker at a time in a directory, as long as it lives: a lock that a kill releases too.

Between processes the system keeps it. That lock is the whole process's, and closing the file anywhere in it gives the
lock away, so the threads of a process first settle among themselves who may so much as open the file.
"""

from __future__ import annotations

import os
from contextlib import suppress
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


def _inode(path: Path) -> int:
    """Which file is at a path now: the lock's last owner may have removed the one that was there; -1: none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1
