"""What every engine is: it takes rows of clients, trains them in place, and says how they did."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedquilt.engines.objective import Objective
from fedquilt.engines.sample_noise import SampleNoise
from fedquilt.engines.settings import Training
from fedquilt.families.copies import copy_of
from fedquilt.families.layout import Layout
from fedquilt.tasks import Classification, Task

_TABLE_BYTES = 2**27  # of samples on a CPU; more are not copied together, but as clients train


@dataclass(frozen=True)
class Samples:
    """The training samples of a family's clients: client j has the first `count[j]` of the part of number `part[j]`.

    `key[j]` is the client's random key: with the round it decides the order of its samples. The table of all parts is
    made when it is first asked for; who trains clients one by one never asks.

    >>> pairs = [(torch.zeros(3, 1), torch.zeros(3)), (torch.ones(2, 1), torch.ones(2))]
    >>> samples = Samples(tuple(pairs), (1, 0), (2, 3), (7, 8))
    >>> samples.start, samples.y.tolist()
    ((3, 0), [0.0, 0.0, 0.0, 1.0, 1.0])
    """

    parts: tuple[tuple[Tensor, Tensor], ...]
    part: tuple[int, ...]
    count: tuple[int, ...]
    key: tuple[int, ...]

    @cached_property
    def x(self) -> Tensor:
        """All samples."""
        return torch.cat([x for x, _ in self.parts]) if len(self.parts) > 1 else self.parts[0][0]

    @cached_property
    def y(self) -> Tensor:
        """All targets."""
        return torch.cat([y for _, y in self.parts]) if len(self.parts) > 1 else self.parts[0][1]

    @cached_property
    def start(self) -> tuple[int, ...]:
        """Where each client's samples start in the table of all."""
        starts = list(accumulate([0, *(len(y) for _, y in self.parts)]))
        return tuple(starts[part] for part in self.part)

    @cached_property
    def bytes(self) -> int:
        """How much memory the samples take."""
        return sum(x.numel() * x.element_size() for x, _ in self.parts)

    def table(self, members: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
        """A table with the samples and labels of some clients, and where theirs start in it.

        It is that of all clients, which is made once, but on a CPU where those are many: there only theirs are copied.
        """
        if device.type != "cpu" or self.bytes <= _TABLE_BYTES:
            return self.x, self.y, self._starts[members]
        mine = [self.parts[self.part[member]] for member in members]
        starts = np.cumsum([0, *(len(y) for _, y in mine[:-1])])
        return torch.cat([x for x, _ in mine]), torch.cat([y for _, y in mine]), starts

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.array(self.start)

    def to(self, device: torch.device) -> Samples:
        """The same samples on a device, in one table."""
        if device.type == "cpu":
            return self
        x, y = self.x.to(device), self.y.to(device)
        sizes = [len(y) for _, y in self.parts]
        moved = replace(self, parts=tuple(zip(x.split(sizes), y.split(sizes), strict=True)))
        moved.__dict__.update(x=x, y=y)  # the parts are views of the table: it need not be made of them again
        return moved


@dataclass(frozen=True)
class TrainingJob:
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

    def part(self, start: int, stop: int) -> TrainingJob:
        """The job of some of the clients, with all they need where their rows are."""
        device = self.rows.device
        return TrainingJob(
            self.rows[start:stop],
            self.members[start:stop],
            self.round,
            self.lr,
            None if self.scale is None else self.scale[start:stop].to(device),
            {name: value[start:stop].to(device) for name, value in self.extras.items()},
            self.home and start == 0 and stop >= len(self.rows),
        )

    def some(self, places: Sequence[int]) -> TrainingJob:
        """The job of the clients at some places; of neighbours the rows themselves are in it, else a copy."""
        if list(places) == list(range(places[0], places[0] + len(places))):
            return self.part(places[0], places[0] + len(places))
        at = torch.tensor(places)
        return TrainingJob(
            self.rows[at],
            tuple(self.members[place] for place in places),
            self.round,
            self.lr,
            None if self.scale is None else self.scale[at],
            {name: value[at] for name, value in self.extras.items()},
        )


@dataclass(frozen=True)
class TrainingSpec:
    """What an engine is built for: a family's module, how it lies in a row, its samples, settings and objective.

    `trains` names the parameters that are trained, None: all. On a CPU a step of a stack is traced
    when it has come `trace_after` times. `apart` says why each client has to train from a fresh copy of the module,
    with Python's generators seeded for it; empty: it need not. `private` clips each sample's gradient and adds noise.
    """

    template: nn.Module
    layout: Layout
    samples: Samples
    training: Training
    objective: Objective
    device: torch.device
    trains: frozenset[str] | None = None
    trace_after: int = 12
    apart: str = ""
    task: Task = field(default_factory=Classification)
    private: SampleNoise | None = None

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters that are trained."""
        return tuple(name for name in self.layout.parameter_names if self.trains is None or name in self.trains)

    def precision(self) -> AbstractContextManager[object]:
        """While this holds, layers compute as precisely as they are to train."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.training.precision == "bf16")

    @property
    def exactly(self) -> TrainingSpec:
        """The same at full precision, to find out how a model behaves: rounding would look like behaviour."""
        return replace(self, training=replace(self.training, precision="float32"))

    def module(self) -> nn.Module:
        """A copy of the module for the engine to keep, in training mode, on the device."""
        return copy_of(self.template).to(self.device).train()


class Constants:
    """The buffers and frozen parameters of an engine's module that are in no client's row: nothing may write them.

    >>> net = nn.BatchNorm1d(2)
    >>> constants = Constants(net, in_rows=("weight", "bias", "running_mean", "running_var"))
    >>> _ = net(torch.ones(3, 2))
    >>> constants.check()
    Traceback (most recent call last):
    RuntimeError: buffer 'num_batches_tracked' is written now, and was not in the trial; write it in each step
    """

    def __init__(self, module: nn.Module, in_rows: Collection[str]) -> None:
        self.module = module
        self.known = {n: (tensor, tensor._version) for n, tensor in self._tensors().items() if n not in in_rows}

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def check(self) -> None:
        """Refuse what a step wrote: all clients would share it."""
        now = self._tensors() if self.known else {}
        for name, (tensor, version) in self.known.items():
            if now.get(name) is not tensor or tensor._version != version:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise RuntimeError(f"{kind} '{name}' is written now, and was not in the trial; write it in each step")


class Engine(Protocol):
    """Trains clients of one family. All engines give the same numbers."""

    name: ClassVar[str]
    stacks: ClassVar[bool]  # whether it trains stacks of clients, not one by one

    def __init__(self, recipe: TrainingSpec) -> None: ...

    def train(self, job: TrainingJob) -> Tensor:
        """Train the rows of the job in place; the mean loss of each client over its steps, (k,)."""

    def close(self) -> None:
        """Give back processes and memory."""
