"""Who takes part in a round, and which samples a client sees when: a function of (seed, client, round, epoch) alone.

The order of a client's samples is the order of their hashes, computed for all clients as one tensor program, so that it
does not depend on the engine, the device, or who else takes part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt.values import python

Numbers = NDArray[np.uint64]
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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


def _signed(number: int) -> int:
    """A number's low 64 bits as a signed integer, which is what tensors hold."""
    return (number + 2**63) % 2**64 - 2**63


def mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors; shifts are made logical by masking the sign's copies."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _signed(_FIRST)
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _signed(_SECOND)
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
    epoch = np.arange(1, epochs + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    start = _mix_here(keys + np.uint64(round_ * _GOLDEN % 2**64))
    return _mix_here(start[:, None] + epoch).view(np.int64)


def some_of(count: int, number: int, key: int) -> tuple[int, ...]:
    """Some of the numbers from 0 to count, in order: those with the lowest hashes.

    >>> some_of(10, 10, key=1) == tuple(range(10)), len(some_of(10, 3, key=2))
    (True, 3)
    """
    hashes = _mix_here(np.uint64(key) + np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN))
    if number < count:
        return tuple(np.sort(hashes.argpartition(number)[:number]).tolist())
    return tuple(range(count))


def orders(streams: Tensor, counts: Tensor | None, longest: int) -> Tensor:
    """The order of each client's samples in each epoch, (k, epochs, longest), from their streams (k, epochs).

    Places past a client's count come last; `counts` None: all have `longest`.

    >>> one = orders(torch.from_numpy(streams(np.array([7], dtype=np.uint64), 1, 2)), torch.tensor([3]), 4)
    >>> one.shape, sorted(one[0, 0, :3].tolist())
    (torch.Size([1, 2, 4]), [0, 1, 2])
    """
    samples = torch.arange(longest, device=streams.device)
    hashes = mix(streams[:, :, None] + samples * _signed(_GOLDEN))  # (k, epochs, longest)
    if counts is not None:
        hashes = hashes.masked_fill(samples >= counts[:, None, None], torch.iinfo(torch.int64).max)
    return hashes.argsort(dim=2)


@dataclass(frozen=True)
class Schedule:
    """Where each step of each client finds its batch: positions into the order of an epoch.

    For k clients and S steps of batches of B: `epoch` (k, S), `position` (k, S, B), `mask` (k, S, B) or None where no
    batch is padded and nobody ends early, `steps` the number of steps of each client.
    """

    epoch: Tensor
    position: Tensor
    mask: Tensor | None
    steps: tuple[int, ...]
    longest: int

    @staticmethod
    def of(
        counts: Sequence[int], batch: int, epochs: int, device: torch.device | str = "cpu", longest: int | None = None
    ) -> Schedule:
        """The schedule of clients with these sample counts, of which none is over `longest` (default: the highest).

        >>> Schedule.of([4, 3], batch=2, epochs=1).mask[1].tolist()
        [[1.0, 1.0], [1.0, 0.0]]
        """
        count = torch.tensor(counts)[:, None]  # (k, 1)
        longest = longest or max(counts)
        batch = min(batch, longest)
        per_epoch = (count + batch - 1) // batch
        most = int(per_epoch.max()) * epochs
        step = torch.arange(most)[None]  # (1, S)
        epoch = step // per_epoch
        position = (step % per_epoch)[:, :, None] * batch + torch.arange(batch)  # (k, S, B)
        real = (position < count[:, :, None]) & (epoch < epochs)[:, :, None]
        mask = None if bool(real.all()) else real.float().to(device)
        return Schedule(
            epoch.clamp(max=epochs - 1).to(device),
            torch.where(real, position, 0).to(device),
            mask,
            tuple((per_epoch[:, 0] * epochs).tolist()),
            longest,
        )

    def indices(self, order: Tensor, starts: Tensor) -> Tensor:
        """Rows of the sample table for every step, (k, S, B), from the orders (k, epochs, longest)."""
        k, steps, batch = self.position.shape
        flat = (self.epoch * self.longest)[:, :, None] + self.position  # (k, S, B) places in (epochs * longest)
        return order.flatten(1).gather(1, flat.flatten(1)).view(k, steps, batch) + starts[:, None, None]
