"""Reading arrays from a file of anybody's: what is not plain arrays, or would fill the memory, is said before it does.

NumPy believes an array's header. Here its shape has to go with the bytes that follow, and the bytes that a file
unpacks to with its own size.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HARMLESS = 2**28  # bytes that any file may unpack to
_DENSEST = 100  # how many times its own size a bigger one may: samples do not pack that well
_ENCRYPTED = 0x1  # among the flags of a file in an archive
_SUFFIX = ".npy"


class NotArrays(ValueError):
    """A file is not one of plain arrays; the message says why, and does not name it."""


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.npz"
    >>> np.savez(path, x=np.ones((2, 3)))
    >>> read_arrays(path)["x"].shape
    (2, 3)
    """
    try:
        with zipfile.ZipFile(path) as archive:
            inside = {info.filename.removesuffix(_SUFFIX): info for info in archive.infolist()}
            unpacked = sum(info.file_size for info in inside.values())
            if unpacked > max(_HARMLESS, _DENSEST * path.stat().st_size):
                raise NotArrays(f"its {path.stat().st_size:,} bytes would unpack to {unpacked:,}")
            return {name: _array(archive, info, name) for name, info in inside.items()}
    except NotArrays:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise NotArrays(f"it is no archive of arrays ({error})") from error
    except MemoryError as error:
        raise NotArrays("its arrays do not fit in memory") from error


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> NDArray[Any]:
    if info.flag_bits & _ENCRYPTED:
        raise NotArrays(f"{name} is encrypted")
    with archive.open(info) as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, kind = read_header[version](file)
        except (ValueError, KeyError) as error:
            raise NotArrays(f"{name} is not an array ({error})") from error
        if kind.hasobject:
            raise NotArrays(f"{name} holds Python objects, which would be a pickle, not numbers or texts")
        told, there = math.prod(shape) * kind.itemsize, info.file_size - file.tell()
    if min(shape, default=0) < 0 or told != there:
        raise NotArrays(f"{name} says that it is {kind} of shape {shape}, {told:,} bytes, but {there:,} are there")
    with archive.open(info) as file:
        found: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return found
