"""What an attack is: some clients, drawn by the seed, train on other labels, send other copies or report lies.

Liars take part as all others do, and what they hold at home stays what they trained. They know what the honest of their
circle send in the same round, which is more than most liars do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of, some_of
from fedquilt.client import Client
from fedquilt.sharing import Sums


@dataclass(frozen=True)
class Sent:
    """The copies of one unit that were sent in a round, all of one shape, and what they were before training."""

    ids: Tensor  # (k,) the clients' numbers
    copies: Tensor  # (k, size)
    start: Tensor  # (k, size)
    circle: Tensor  # (k,) numbers from 0 up
    lies: Tensor  # (k,) bool
    key: int  # a hash of the seed, the round and the unit

    @property
    def moves(self) -> Tensor:
        """(k, size) what clients learnt."""
        return self.copies - self.start

    def of_honest(self, values: Tensor) -> Tensor:
        """(k, size) for each copy the mean of the honest ones' values in its circle; 0 where there are none."""
        circles = len(self.circle)
        return Sums.of(values, self.circle, (~self.lies).double(), circles).mean().value[self.circle]


@dataclass(frozen=True)
class Attack:
    """The base of all attacks. `liars` is the share of clients that lie; subclasses say in what.

    Who lies is drawn by `draw`, or by the run's seed where there is none.
    """

    name: ClassVar[str] = ""
    liars: float = 0.2
    draw: int | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.liars < 1:
            raise ValueError(f"{self.name} with liars={self.liars}: give a share of the clients between 0 and 1")

    def drawn(self, clients: Sequence[int], seed: int) -> tuple[int, ...]:
        """Who lies, of clients of these numbers: as many as the share says, at least one and not all."""
        number = min(max(1, round(self.liars * len(clients))), len(clients) - 1)
        if number < 1:
            raise ValueError("an attack needs two clients at least, one that lies and one that is lied to")
        by = seed if self.draw is None else self.draw
        return tuple(clients[at] for at in some_of(len(clients), number, key_of("liars", by)))

    def client(self, client: Client) -> Client:
        """A liar as it trains."""
        return client

    def copies(self, sent: Sent) -> Tensor:
        """(k, size) what is sent in the place of copies; rows of the honest are not looked at."""
        return sent.copies

    def reports(self, reports: Mapping[str, Tensor], ids: Tensor, lies: Tensor) -> Mapping[str, Tensor]:
        """What is reported, (k, ...) by name, by clients of one family; rows of the honest must stay as they are."""
        return reports


def noise(shape: Sequence[int], key: int, device: torch.device) -> Tensor:
    """Standard normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(key)).to(device)
