"""The plan of one unit over all clients: with whom, how loud and how close, a vector each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedquilt.sharing.planned import Numbers, Planned

PRIVATE = -1


@dataclass(frozen=True, eq=False, init=False, repr=False)
class UnitPlan(Planned):
    """The three vectors of one unit over all K clients.

    `circle[i]` is the id of the circle client i shares the unit in, -1: with nobody. `weight[i]` is how much its copy
    counts there, `pull[i]` how far it moves from its own copy to the circle's value (one number stands for all). For a
    private client weight and pull mean nothing and are kept as 0. Values are checked when a `Plan` takes the unit in.
    `pool` says that there are so many circles, 0, 1, ..., whoever is in them: one that is empty keeps its value, and
    each starts from first weights of its own draw.

    >>> unit = UnitPlan(circle=[0, 0, 7, -1], weight=[1, 3, 5, 9])
    >>> unit.sends.tolist(), unit.members.tolist()      # a circle of one member does not move
    ([True, True, False, False], [2, 1])
    """

    circle: Tensor
    weight: Tensor
    pull: Tensor
    pool: int | None
    _defining = ("circle", "weight", "pull")
    _constants = ("count", "whole", "for_all", "pool")
    _tensors = ("circle", "weight", "pull", "labels", "row", "members", "sends", "receives", "taken")

    def __init__(
        self, circle: Numbers, weight: Numbers | float = 1.0, pull: Numbers | float = 1.0, pool: int | None = None
    ) -> None:
        # Copies: a caller that goes on writing into its tensors must not change a plan.
        numbers = torch.as_tensor(circle).detach()
        ids = numbers.to("cpu", torch.int64, copy=True)
        if numbers.is_floating_point() and not torch.equal(numbers.cpu(), ids.to(numbers.dtype)):
            raise ValueError("circles are whole numbers, -1 for private; give one id per client")
        if ids.ndim != 1:
            raise ValueError(f"circle has shape {tuple(ids.shape)}; give one circle id per client")
        object.__setattr__(self, "circle", ids)
        object.__setattr__(self, "pool", pool)
        for key, given in (("weight", weight), ("pull", pull)):
            vector = torch.as_tensor(given).detach().to("cpu", torch.float32, copy=True)
            if vector.ndim == 0:
                vector = vector.repeat(len(ids))
            if vector.shape != ids.shape:
                raise ValueError(
                    f"{key} has shape {tuple(vector.shape)} but there are {len(ids)} clients; give one each"
                )
            object.__setattr__(self, key, torch.where(ids == PRIVATE, 0.0, vector))

    @property
    def constants(self) -> dict[str, Any]:
        return {} if self.pool is None else {"pool": self.pool}

    @cached_property
    def _circles(self) -> tuple[Tensor, Tensor, Tensor]:
        inside = self.circle >= 0
        row = torch.zeros_like(self.circle)
        if self.pool is not None:
            row[inside] = self.circle[inside]
            return torch.arange(self.pool), row, torch.bincount(self.circle[inside], minlength=self.pool)
        labels, dense, members = torch.unique(self.circle[inside], return_inverse=True, return_counts=True)
        row[inside] = dense
        return labels, row, members

    @cached_property
    def labels(self) -> Tensor:
        """(C,) the circle ids in use, ascending: row r of the unit's values is the value of circle labels[r]."""
        return self._circles[0]

    @cached_property
    def row(self) -> Tensor:
        """(K,) the row of each client's circle among the unit's values; 0 where private, as weight and pull are 0."""
        return self._circles[1]

    @cached_property
    def members(self) -> Tensor:
        """(C,) how many clients each circle has."""
        return self._circles[2]

    @cached_property
    def count(self) -> int:
        """How many circles there are."""
        return len(self.labels)

    @cached_property
    def shared(self) -> Tensor:
        """(K,) who is in a circle with somebody else; in a pool, in any: others were in it, or will be."""
        if not self.count:
            return torch.zeros(len(self), dtype=torch.bool)
        least = 2 if self.pool is None else 1
        return (self.circle >= 0) & (self.members[self.row] >= least)

    @cached_property
    def sends(self) -> Tensor:
        """(K,) who sends its copy to be merged."""
        return self.shared & (self.weight > 0)

    @cached_property
    def receives(self) -> Tensor:
        """(K,) who receives its circle's value."""
        return self.shared & (self.pull > 0)

    def _faults(self) -> Sequence[tuple[Tensor, Callable[[int], str]]]:
        last = torch.iinfo(torch.int64).max if self.pool is None else self.pool - 1
        return (
            (self.circle < PRIVATE, lambda i: f"the circle {int(self.circle[i])}; ids start at 0, and -1 is private"),
            (self.circle > last, lambda i: f"the circle {int(self.circle[i])}, which is not in a pool of {self.pool}"),
            (
                ~(torch.isfinite(self.weight) & (self.weight >= 0)),
                lambda i: f"the weight {float(self.weight[i]):g}; a weight is a finite number from 0 up",
            ),
            (
                ~((self.pull >= 0) & (self.pull <= 1)),
                lambda i: f"the pull {float(self.pull[i]):g}; a pull goes from 0 (keep mine) to 1 (take the circle's)",
            ),
        )

    def _sharing(self) -> tuple[str, int]:
        least = 2 if self.pool is None else 1
        sizes = sorted((n for n in self.members.tolist() if n >= least), reverse=True)
        shown = ", ".join(str(n) for n in (sizes if len(sizes) <= 12 else sizes[:10]))
        more = f", ... {sizes[-1]}" if len(sizes) > 12 else ""
        words = f"{len(sizes)} circle{'s' * (len(sizes) > 1)} of {shown}{more}" if sizes else ""
        return words, len(self) - sum(sizes)

    def peers(self) -> Iterator[tuple[int, int]]:
        """Pairs of a client and the circle it is in: clients with the same second number must have the same shapes."""
        return ((i, c) for i, c in enumerate(self.circle.tolist()) if c >= 0)

    def __repr__(self) -> str:
        return f"UnitPlan({self.describe()})"
