"""Which samples a client sees when: a function of (seed, client, round, epoch) alone.

The order of a client's samples is the order of their hashes, computed for all clients as one tensor program, so that it
does not depend on the engine, the device, or who else takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt._util.randomness import GOLDEN, mix, signed


def orders(streams: Tensor, counts: Tensor | None, longest: int) -> Tensor:
    """The order of each client's samples in each epoch, (k, epochs, longest), from their streams (k, epochs).

    Places past a client's count come last; `counts` None: all have `longest`.

    >>> import numpy as np
    >>> from fedquilt._util.randomness import streams
    >>> one = orders(torch.from_numpy(streams(np.array([7], dtype=np.uint64), 1, 2)), torch.tensor([3]), 4)
    >>> one.shape, sorted(one[0, 0, :3].tolist())
    (torch.Size([1, 2, 4]), [0, 1, 2])
    """
    samples = torch.arange(longest, device=streams.device)
    hashes = mix(streams[:, :, None] + samples * signed(GOLDEN))  # (k, epochs, longest)
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
