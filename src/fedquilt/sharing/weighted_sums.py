"""Weighted sums per circle: the addable statistics that a mean is made of.

Sums are kept in double precision: the mean of equal copies is that copy, and the order of the clients does not show.
Nothing here waits for the device: no value is read back, so a round on a GPU runs through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedquilt.sharing.columns import column_blocks

# Up to here a dense product beats adding rows one by one on a CPU. A GPU always takes the product: its index_add sums
# in whatever order threads arrive, and the same seed must give the same bits.
_FEW_CIRCLES = 16
_LEAST = torch.finfo(torch.float64).tiny


class Merged(NamedTuple):
    """One value per circle; whether anybody was heard there; which of the given rows were not finite and left out."""

    value: Tensor  # (C, size)
    heard: Tensor  # (C,) bool
    refused: Tensor  # (k,) bool
    weight: Tensor  # (C,) the weight of all that was merged

    def onto(self, previous: Tensor) -> Tensor:
        """(C, size) the new values, and the previous one where a circle was not heard."""
        return torch.where(self.heard[:, None], self.value, previous)


@dataclass(frozen=True)
class Sums:
    """Weighted sums per circle and the weights in them. They add, so families can contribute to one circle in turn.

    >>> circle = torch.tensor([0])
    >>> one = Sums.of(torch.tensor([[1.0]]), circle, torch.tensor([1.0]), 1)
    >>> four = Sums.of(torch.tensor([[4.0]]), circle, torch.tensor([3.0]), 1)
    >>> (one + four).mean().value
    tensor([[3.2500]])
    """

    total: Tensor  # (C, size) float64
    weight: Tensor  # (C,) float64
    refused: Tensor  # (k,) bool, of all parts in turn

    @classmethod
    def of(cls, values: Tensor, circle: Tensor | None, weight: Tensor, circles: int) -> Sums:
        """The sums of one part; a dense product over few circles, else one index_add. `circle` None: there is one."""
        finite = finite_rows(values)
        weight = weight.double() * finite
        if circle is None or circles == 1:
            return cls._product(values, finite, weight[None])
        if values.is_cuda or circles <= _FEW_CIRCLES:
            rows = torch.arange(circles, device=values.device)
            return cls._product(values, finite, torch.where(circle == rows[:, None], weight, 0.0))
        total = values.new_zeros(circles, values.shape[1], dtype=torch.float64)
        for columns in column_blocks(values):
            total[:, columns].index_add_(0, circle, _clean(values, columns, finite).mul_(weight[:, None]))
        return cls(total, weight.new_zeros(circles).index_add_(0, circle, weight), ~finite)

    @classmethod
    def nothing(cls, circles: int, size: int, device: torch.device) -> Sums:
        """The sums of no copies."""
        total = torch.zeros(circles, size, dtype=torch.float64, device=device)
        return cls(total, total.new_zeros(circles), torch.zeros(0, dtype=torch.bool, device=device))

    @classmethod
    def mixed(cls, values: Tensor, shares: Tensor) -> Sums:
        """The sums of the dense form: `shares` (R, k) says how much of each copy goes into each of R values."""
        finite = finite_rows(values)
        return cls._product(values, finite, shares.double() * finite)

    @classmethod
    def _product(cls, values: Tensor, finite: Tensor, shares: Tensor) -> Sums:
        total = values.new_empty(len(shares), values.shape[1], dtype=torch.float64)
        for columns in column_blocks(values):  # written in place: small results between big temporaries litter the heap
            torch.mm(shares, _clean(values, columns, finite), out=total[:, columns])
        return cls(total, shares.sum(1), ~finite)

    def to(self, device: torch.device) -> Sums:
        """The same on a device."""
        return Sums(self.total.to(device), self.weight.to(device), self.refused.to(device))

    def __add__(self, other: Sums) -> Sums:
        refused = torch.cat([self.refused, other.refused])
        return Sums(self.total + other.total, self.weight + other.weight, refused)

    def mean(self) -> Merged:
        """The weighted means. The only place where anything is divided by a sum of weights."""
        heard = self.weight > 0
        value = self.total / self.weight.clamp(min=_LEAST)[:, None]
        return Merged(value.float(), heard, self.refused, self.weight.float())

    def moved(self, held: Tensor, noise: Tensor, expected: Tensor) -> Merged:
        """Values (C, size) moved by the sum of the copies' changes with noise, over the weight that was expected (C,).

        Who was really heard does not show: not in the weight, and not in whether a circle is moved.
        """
        change = self.total - self.weight[:, None] * held + noise
        value = held + change / expected.clamp(min=_LEAST)[:, None]
        return Merged(value.float(), expected > 0, self.refused, expected.float())


def finite_rows(values: Tensor) -> Tensor:
    """(k,) whether each row is finite; fast reductions and no copy, where `isfinite` would write a mask of all."""
    if values.shape[1] == 0:
        return torch.ones(len(values), dtype=torch.bool, device=values.device)
    # On a GPU both ends are found at once; on a CPU that takes longer than finding one after the other.
    low, high = values.aminmax(dim=1) if values.is_cuda else (values.amin(1), values.amax(1))
    return high - low < math.inf  # NaN passes through both and is not below anything


def _clean(values: Tensor, columns: slice, finite: Tensor) -> Tensor:
    """(k, block) doubles, 0 for what is not finite: such a row has the weight 0, but 0 * NaN is NaN."""
    block = values[:, columns].double()
    if values.is_cuda or not bool(finite.all()):  # only a CPU can be asked without waiting
        torch.nan_to_num(block, nan=0.0, posinf=0.0, neginf=0.0, out=block)
    return block
