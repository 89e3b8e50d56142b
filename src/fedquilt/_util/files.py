"""Files that are there whole or as they were before, whatever happens: a kill, a full disk, a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEW = ".new"  # how the name of a file ends while it is written; one that is found was left behind by a kill


class DiskFull(OSError):
    """A full disk, as a sentence; what was whole before is whole."""


@contextmanager
def written_whole(path: Path, *, sync: bool = True, by_many: bool = False) -> Iterator[Path]:
    """Where to write a file, beside its place; it takes the place when all is written, and is removed if that fails.

    Without `sync` a power cut may still take it. Where processes that know nothing of each other may write the same
    file (`by_many`), each writes beside the others, and the last counts.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with written_whole(folder / "numbers") as new:
    ...     _ = new.write_text("1 2 3")
    >>> [file.name for file in folder.iterdir()]
    ['numbers']
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}{NEW}" if by_many else path.name + NEW)
    try:
        yield new
        if sync:
            with new.open("rb") as file:
                os.fsync(file.fileno())
        new.replace(path)
        if sync:
            sync_folder(path.parent)
    finally:
        new.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with written_whole(path) as new:
        new.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a file of text whole or not at all; line ends stay as they are, since checksums are of these bytes."""
    with written_whole(path) as new, new.open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder last through a power cut."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
