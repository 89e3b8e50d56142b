"""What every engine is: it takes rows of clients, trains them in place, and says how they did."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedquilt.stacks import Layout
from fedquilt.training.objective import Objective
from fedquilt.training.settings import Training


@dataclass(frozen=True)
class Samples:
    """The training samples of a family's clients in one table; client j owns `count[j]` rows from `start[j]` on.

    `key[j]` is the client's random key: with the round it decides the order of its samples.
    """

    x: Tensor
    y: Tensor
    start: tuple[int, ...]
    count: tuple[int, ...]
    key: tuple[int, ...]

    def to(self, device: torch.device) -> Samples:
        """The same samples on a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))


@dataclass(frozen=True)
class Job:
    """One round's training of some clients of a family.

    `rows` (k, width) are trained in place. `members` are the clients' places in the family's `Samples`. `scale` is
    None or multiplies the learning rate, (k, 1) or (k, parameters). `extras` are whatever the method prepared, with the
    client first. `home` says that rows of these clients lie in this memory in every round.
    """

    rows: Tensor
    members: tuple[int, ...]
    round: int
    lr: float
    scale: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    home: bool = False

    def part(self, start: int, stop: int) -> Job:
        """The job of some of the clients, with all they need where their rows are."""
        device = self.rows.device
        return Job(
            self.rows[start:stop],
            self.members[start:stop],
            self.round,
            self.lr,
            None if self.scale is None else self.scale[start:stop].to(device),
            {name: value[start:stop].to(device) for name, value in self.extras.items()},
            self.home and start == 0 and stop >= len(self.rows),
        )


@dataclass(frozen=True)
class Recipe:
    """What an engine is built for: a family's module, how it lies in a row, its samples, settings and objective."""

    template: nn.Module
    layout: Layout
    samples: Samples
    training: Training
    objective: Objective
    device: torch.device

    def module(self) -> nn.Module:
        """A copy of the module for the engine to keep, in training mode, on the device."""
        return copy.deepcopy(self.template).to(self.device).train()


def memory_budget(device: torch.device) -> int:
    """How many bytes clients stacked in training may take: two fifths of a GPU; on a CPU 128 MiB, or less if that is
    a seventh of its memory: there bigger stacks are not faster.

    It follows from the size of the machine alone, never from what happens to be free.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 5 * 2
    try:
        return min(2**27, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 7)
    except (ValueError, OSError, AttributeError):
        return 2**27


class Engine(Protocol):
    """Trains clients of one family. All engines give the same numbers."""

    name: ClassVar[str]

    def __init__(self, recipe: Recipe) -> None: ...

    def train(self, job: Job) -> Tensor:
        """Train the rows of the job in place; the mean loss of each client over its steps, (k,)."""

    def close(self) -> None:
        """Give back processes and memory."""
