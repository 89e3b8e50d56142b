"""Checksums of a run's files: what was changed after it was written is noticed before a number of it is used.

While a run goes on, its checkpoint says how long each file of lines was and what its checksum was up to there. At the
end `checksums.json` says it of every file that the run is read for, and `models/models.json` of every model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

NAME = "checksums.json"
SINCE = 2  # the format of run directories that has checksums; older ones are read as they are


class Damaged(ValueError):
    """A folder that does not hold what it should; the sentence says what is wrong and that nothing was touched."""


def digest(data: bytes) -> str:
    """A checksum of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """A checksum of a file, which need not fit in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Growing:
    """The length and the checksum of a file that only grows, each byte read once however often they are asked for.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lines"
    >>> growing = Growing(path)
    >>> _ = path.write_bytes(b"one")
    >>> growing.now() == (3, digest(b"one"))
    True
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._length, self._hash = 0, hashlib.sha256()

    def now(self) -> tuple[int, str]:
        """How long the file is, and its checksum; a file that is not there is empty."""
        length = self.path.stat().st_size if self.path.is_file() else 0
        if length < self._length:  # it was cut
            self._length, self._hash = 0, hashlib.sha256()
        if length > self._length:
            with self.path.open("rb") as file:
                file.seek(self._length)
                while self._length < length and (part := file.read(min(2**20, length - self._length))):
                    self._hash.update(part)
                    self._length += len(part)
        return self._length, self._hash.hexdigest()


def seal(checksums: Mapping[str, str]) -> str:
    """The text of `checksums.json`, which has a checksum of its own."""
    files = dict(sorted(checksums.items()))
    return json.dumps({"check": digest(json.dumps(files).encode()), "files": files}, indent=1) + "\n"


def sealed(folder: Path, format_: object) -> dict[str, str]:
    """The checksums of a finished run's files by name; none for a run of a format that had none yet."""
    path = folder / NAME
    if not path.is_file():
        if isinstance(format_, int) and format_ >= SINCE:
            raise Damaged(f"'{path}' is gone, so nobody can say whether the run is as it was; get it from a copy")
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        files: dict[str, str] = found["files"]
        whole = found["check"] == digest(json.dumps(files).encode())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"'{path}' cannot be read ({error}); get it from a copy of the run") from None
    if not whole:
        raise Damaged(f"'{path}' was changed after it was written (its checksum differs); get it from a copy")
    return files


def check(path: Path, found: str, wanted: str | None) -> None:
    """Refuse a file whose checksum is not the wanted one; where nobody knows that (None) there is nothing to say."""
    if wanted is not None and found != wanted:
        raise Damaged(
            f"'{path}' was changed or cut short after the run wrote it (its checksum differs); it was left as it is: "
            "get it from a copy, or run again"
        )
