"""Numbers that look random and are functions of what they are for: hashes, the same on every machine and device."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt._util.plain_values import python

Numbers = NDArray[np.uint64]
GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_of(*parts: object) -> int:
    """A 63-bit number from any values, the same on every machine, whoever's numbers they are.

    >>> key_of(0, "phone-3") == key_of(0, "phone-3") != key_of(1, "phone-3")
    True
    """
    digest = hashlib.blake2b(repr(python(parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_device(device: torch.device, *parts: object) -> None:
    """Seed the generator that dropout draws from on a device; `torch.manual_seed` would visit every kind of device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(key_of(*parts))
    else:
        torch.default_generator.manual_seed(key_of(*parts))


def signed(number: int) -> int:
    """A number's low 64 bits as a signed integer, which is what tensors hold."""
    return (number + 2**63) % 2**64 - 2**63


def mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors; shifts are made logical by masking the sign's copies."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * signed(_FIRST)
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * signed(_SECOND)
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def mix_number(z: int) -> int:
    """The same on one number, whose low 64 bits count; unsigned."""
    low = 2**64 - 1
    z = (((z & low) ^ ((z & low) >> 30)) * _FIRST) & low
    z = ((z ^ (z >> 27)) * _SECOND) & low
    return z ^ (z >> 31)


def _mix_here(z: Numbers) -> Numbers:
    """The same on unsigned numbers in host memory, where a few hundred take less time than one launch on a device."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def streams(keys: Numbers, round_: int, epochs: int) -> NDArray[np.int64]:
    """(k, epochs) the random stream of each client, by its key, in each epoch of a round."""
    epoch = np.arange(1, epochs + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    start = _mix_here(keys + np.uint64(round_ * GOLDEN % 2**64))
    return _mix_here(start[:, None] + epoch).view(np.int64)


def each_of(count: int, share: float, key: int) -> tuple[int, ...]:
    """Those of the numbers from 0 to count that are chosen, each by itself, with a probability: maybe none.

    >>> each_of(10, 1.0, key=1) == tuple(range(10)), len(each_of(10_000, 0.25, key=1))
    (True, 2611)
    """
    hashes = _mix_here(np.uint64(key) + np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN))
    return tuple(np.flatnonzero((hashes >> np.uint64(11)) * 2.0**-53 < share).tolist())


def some_of(count: int, number: int, key: int) -> tuple[int, ...]:
    """Some of the numbers from 0 to count, in order: those with the lowest hashes.

    >>> some_of(10, 10, key=1) == tuple(range(10)), len(some_of(10, 3, key=2))
    (True, 3)
    """
    if number >= count:
        return tuple(range(count))
    hashes = _mix_here(np.uint64(key) + np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN))
    return tuple(np.sort(hashes.argpartition(number)[:number]).tolist())
