"""Messages as bytes: arrays and a little plain text, in the safetensors format, never a pickle.

A message is one block of bytes. Its arrays have names and their dtype and shape are checked against their length when
it is opened, so a header cannot lie about what follows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

Arrays = Mapping[str, NDArray[Any]]
VERSION = 2

# Why an update was left out, or why a client could not make one. A code travels; a sentence is shown.
REASONS = {
    "unknown-client": "it came from a node that is no client of this run",
    "unreadable": "it could not be decoded",
    "wrong-version": "it was made by another version of fedquilt",
    "wrong-round": "it belongs to another round",
    "duplicate": "the client had already answered in this round",
    "unknown-unit": "it held a unit that the client was not asked for",
    "missing-unit": "it lacked a unit that the client was asked for",
    "wrong-shape": "an array had another shape than the model",
    "wrong-dtype": "an array had another number format than agreed",
    "not-finite": "it held NaN or infinite values",
    "bad-code": "it named numbers of a unit that are not there, one of them twice, or a scale below 0",
    "out-of-range": "it held a number beyond the range of secure sums",
    "unsafe-sum": "what the server asked for would not have kept the client's copy secret",
    "bad-keys": "its public keys were another client's, or such that nobody can agree on a secret with it",
    "bad-shares": "shares of secrets that it gave or holds were none, so that a secure sum could not be trusted",
    "spoilt-sum": "the secure sum of its circle came to nothing, since a member did not keep to the protocol",
    "open-copy": "the device's owner sends copies under secure sums only",
    "absurd-norm": "it went absurdly far from what the client was sent",
    "far-from-others": "it was many times as far from what was sent as the others of its round",
    "too-large": "it had many times the bytes that were expected",
    "bad-declaration": "what it declared of itself cannot be",
    "other-model": "its model has other units or shapes than the server knows",
    "unknown-method": "the method is none of the library's own, and the device's owner has not allowed it",
    "other-code": "the device's code of the method is not the server's",
    "asked-again": "the server asked for a second answer of a round, which the promise of privacy does not cover",
    "bad-letter": "the server's letter made no sense to the device",
    "failed": "the client's own program failed; its log says why",
    "lost-state": "the client's kept state was gone, so it starts afresh",
    "no-answer": "no answer came in time",
}


class Refused(Exception):
    """An update that is left out; `code` is one of `REASONS`, `unit` says where, if anywhere.

    >>> str(Refused("not-finite", "head"))
    'it held NaN or infinite values (head)'
    """

    def __init__(self, code: str, unit: str = "") -> None:
        super().__init__(REASONS[code] + (f" ({unit})" if unit else ""))
        self.code, self.unit = code, unit


def pack(arrays: Arrays, text: Mapping[str, Any]) -> bytes:
    """Arrays and plain text (anything JSON can say) as one block of bytes.

    >>> arrays, text = unpack(pack({"head": np.ones(3, np.float32)}, {"round": 2}))
    >>> arrays["head"].tolist(), text
    ([1.0, 1.0, 1.0], {'round': 2})
    """
    told = json.dumps({**text, "version": VERSION}, allow_nan=False, separators=(",", ":"))
    apart = {name: array.copy(order="C") for name, array in arrays.items()}  # ascontiguousarray gives numbers an axis
    return save(apart, metadata={"fedquilt": told})


def unpack(content: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """What `pack` packed; anything else is `Refused`."""
    try:
        arrays = load(content)
        length = int.from_bytes(content[:8], "little")
        told = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fedquilt"])
        version = told.pop("version")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise Refused("unreadable") from None
    if version != VERSION:
        raise Refused("wrong-version")
    return arrays, told


def check_values(values: Arrays, expected: Mapping[str, int], sent: Arrays, largest_change: float) -> None:
    """Refuses decoded unit values that a merge must not see.

    `expected` has the size of every unit the client was asked for, `sent` what it was sent of it.

    >>> check_values({"head": np.float32([1, 2])}, {"head": 3}, {}, 1000)
    Traceback (most recent call last):
    ...
    fedquilt.deploy.transport.wire.Refused: an array had another shape than the model (head)
    """
    for unit in values:
        if unit not in expected:
            raise Refused("unknown-unit", unit[:60])
    for unit, size in expected.items():
        if unit not in values:
            raise Refused("missing-unit", unit)
        value = values[unit]
        if value.dtype != np.float32:
            raise Refused("wrong-dtype", unit)
        if value.shape != (size,):
            raise Refused("wrong-shape", unit)
        if not bool(np.isfinite(value).all()):
            raise Refused("not-finite", unit)
        # A unit of many small numbers may grow from nothing, so the bound never falls below that of ordinary weights.
        before = sent.get(unit, np.zeros(size, np.float32)).astype(np.float64)
        usual = max(float(np.linalg.norm(before)), math.sqrt(size))
        if float(np.linalg.norm(value.astype(np.float64) - before)) > largest_change * usual:
            raise Refused("absurd-norm", unit)
