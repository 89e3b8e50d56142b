"""Reading members of official archives in memory: nothing is unpacked to disk, nothing is unpickled."""

from __future__ import annotations

import errno
import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.data.errors import DataDamaged

_BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    UnicodeDecodeError,
    NotImplementedError,  # a zip method or encryption this Python cannot read
    RuntimeError,  # an encrypted member
    OverflowError,
    struct.error,
)


def refuse(path: Path, why: str) -> DataDamaged:
    """The error for an archive that is not what it should be.

    >>> print(refuse(Path("a.zip"), "it has no member 'b'"))
    a.zip is not usable: it has no member 'b'; delete it and fetch the official archive again
    """
    return DataDamaged(f"{path.name} is not usable: {why}; delete it and fetch the official archive again")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a broken archive raises into one sentence."""
    try:
        yield
    except DataDamaged:
        raise
    except _BROKEN as error:
        raise refuse(path, f"it is truncated or of another format ({type(error).__name__}: {error})") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place in the file that is none; all others are the disk's
            raise
        raise refuse(path, f"it is truncated or of another format ({error})") from error


def tar_members(path: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """The named members of a tar archive, read in one pass that stops when all are found."""
    found: dict[str, bytes] = {}
    with reading(path), tarfile.open(path, "r:*") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if name in wanted and member.isfile():
                content = tar.extractfile(member)
                found[name] = content.read() if content is not None else b""
                if len(found[name]) != member.size:
                    raise refuse(path, f"its member '{name}' is cut short")
            if len(found) == len(set(wanted)):
                break
    for name in wanted:
        if name not in found:
            raise refuse(path, f"it has no member '{name}'")
    return found


@contextmanager
def open_zip(path: Path, inside: bytes | None = None) -> Iterator[zipfile.ZipFile]:
    """A zip archive for reading; `inside` are the bytes of a zip found within `path`."""
    with reading(path), zipfile.ZipFile(path if inside is None else io.BytesIO(inside)) as archive:
        yield archive


def zip_member(path: Path, archive: zipfile.ZipFile, ending: str) -> str:
    """The one member whose path is `ending` or ends in `/ending` (official zips differ in their top folder)."""
    hits = [n for n in archive.namelist() if (n == ending or n.endswith("/" + ending)) and "__MACOSX" not in n]
    if not hits:
        raise refuse(path, f"it has no member '{ending}'")
    return min(hits, key=len)


def table(path: Path, member: str, content: IO[bytes] | bytes, **options: Any) -> NDArray[np.float64]:
    """A text table of numbers as a two-dimensional array."""
    text = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        values = np.loadtxt(text, dtype=np.float64, ndmin=2, **options)
    except ValueError as error:
        raise refuse(path, f"its member '{member}' is not a table of numbers ({error})") from error
    if values.size == 0 or not np.isfinite(values).all():
        raise refuse(path, f"its member '{member}' is empty or holds values that are not finite")
    return values


def idx(path: Path, content: bytes, member: str | None = None) -> NDArray[np.uint8]:
    """The array of a gzipped IDX file, the format of MNIST: two zero bytes, type, rank, sizes, then the values."""
    whose = f"its member '{member}'" if member else "it"
    with reading(path):
        raw = gzip.decompress(content)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise refuse(path, f"{whose} is not an IDX file of bytes")
    shape = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    values = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3])
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise refuse(path, f"{whose} promises {' x '.join(map(str, shape))} values and holds {values.size}")
    return values.reshape(shape)
