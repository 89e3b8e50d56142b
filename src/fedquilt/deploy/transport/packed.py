"""Codes of changes as arrays that travel, and back: whatever a client wrote, only a code of the agreed form is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.deploy.transport.wire import Refused
from fedquilt.sharing.compression import BITS, Code, Compression

Arrays = dict[str, NDArray[Any]]


def pack_code(code: Code, how: Compression, n: int) -> Arrays:
    """The code of one client's n numbers, (1, ...), as arrays.

    >>> how = Compression("topk", kept=0.5)
    >>> packed = pack_code(how.encode(torch.tensor([[3.0, 0.0, -4.0, 1.0]])), how, 4)
    >>> packed["value"].tolist(), packed["where"].tolist(), unpack_code(packed, how, 4, "u")["where"].tolist()
    ([3.0, -4.0], [5], [[0, 2]])
    """
    found = {}
    for part, (kind, _) in how.form(n).items():
        array = code[part][0].numpy(force=True)
        found[part] = np.packbits(_marks(array, n), bitorder="little") if kind == BITS else array.astype(kind)
    return found


def unpack_code(arrays: Mapping[str, NDArray[Any]], how: Compression, n: int, unit: str) -> Code:
    """The code (1, ...) in arrays that came from a client; `Refused` where they are not one of n numbers."""
    form, found = how.form(n), dict[str, NDArray[Any]]()
    if arrays.keys() != form.keys():
        raise Refused("missing-unit" if form.keys() - arrays.keys() else "unknown-unit", unit)
    for part, (kind, length) in form.items():
        array = arrays[part]
        if array.dtype != np.dtype("uint8" if kind == BITS else kind):
            raise Refused("wrong-dtype", unit)
        if array.shape != (length,):
            raise Refused("wrong-shape", unit)
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise Refused("not-finite", unit)
        found[part] = array
    if "scale" in found and float(found["scale"][0]) < 0:
        raise Refused("bad-code", unit)
    if "where" in found:
        found["where"] = _places(found["where"], form["where"][0])
        ascending = bool((np.diff(found["where"]) > 0).all()) and bool((found["where"] < n).all())
        if len(found["where"]) != form["value"][1] or not ascending:  # as many as there are values, and none twice
            raise Refused("bad-code", unit)
    return {part: torch.from_numpy(array.copy())[None] for part, array in found.items()}


def _places(array: NDArray[Any], kind: str) -> NDArray[np.int64]:
    """The places of numbers, from themselves or from a bit for each; bits after the n-th are places, too."""
    marks = np.unpackbits(array, bitorder="little") if kind == BITS else None
    return array.astype(np.int64) if marks is None else np.flatnonzero(marks).astype(np.int64)


def _marks(places: NDArray[Any], n: int) -> NDArray[np.bool_]:
    marks = np.zeros(n, dtype=np.bool_)
    marks[places] = True
    return marks
