"""Merges that a few faulty or hostile clients cannot steer: median, trimmed mean, (multi-)Krum.

All circles at once, without a loop over circles or clients. A client with a weight counts once, whatever its weight: a
weight is a claim that a faulty client can make. `least` is the smallest circle in which a rule bears a single liar.
Rules `by_columns` find each number of a value from that number of the copies, and from sums over all (`columns`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.sharing.columns import column_blocks, over_columns
from fedquilt.sharing.weighted_sums import Merged, Sums, finite_rows


@dataclass(frozen=True)
class Median:
    """The coordinate-wise median of each circle; the middle of the two middle values when there are two.

    >>> Median()(torch.tensor([[1.0], [2.0], [900.0]]), torch.tensor([0, 0, 0]), torch.ones(3), 1).value
    tensor([[2.]])
    """

    least: ClassVar[int] = 3
    by_columns: ClassVar[bool] = True

    def __call__(self, values: Tensor, circle: Tensor, weight: Tensor, circles: int) -> Merged:
        seats = _Seats.of(values, circle, weight, circles)
        low = seats.start + (seats.count - 1).clamp(min=0) // 2
        high = seats.start + seats.count // 2
        # A circle nobody is heard in points at another one's row, or past the end; its value is not used.
        middle = torch.stack([low, high]).clamp(max=max(len(values) - 1, 0))
        found = [s[middle[0]] / 2 + s[middle[1]] / 2 for s in seats.ordered(values)]
        return Merged(torch.cat(found, 1), seats.count > 0, seats.refused, seats.weight)


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each circle without the `share` lowest and the `share` highest values of each coordinate.

    Of n clients heard, floor(share * n) go at either end; where that is nobody, all but the middle: the median.

    >>> TrimmedMean(0.25)(torch.tensor([[1.0], [2.0], [4.0], [900.0]]), torch.zeros(4).long(), torch.ones(4), 1).value
    tensor([[3.]])
    """

    by_columns: ClassVar[bool] = True
    share: float = 0.1

    def __post_init__(self) -> None:
        if self.share == 0:
            raise ValueError("a trimmed mean with share=0 is the mean: use the merge 'mean'")
        if not 0 < self.share < 0.5:
            raise ValueError(f"a trimmed mean with share={self.share} leaves nothing; give a share between 0 and 0.5")

    @property
    def least(self) -> int:
        """The smallest circle in which somebody goes at either end."""
        return math.ceil(1 / self.share - 1e-9)

    def __call__(self, values: Tensor, circle: Tensor, weight: Tensor, circles: int) -> Merged:
        seats = _Seats.of(values, circle, weight, circles)
        cut = share_of(seats.count, self.share)
        cut = torch.where(cut > 0, cut, (seats.count - 1).clamp(min=0) // 2)
        place = torch.arange(len(values), device=values.device) - seats.start[seats.row]
        kept = seats.seated & (place >= cut[seats.row]) & (place < (seats.count - cut)[seats.row])
        found = [Sums.of(s, seats.row, kept.float(), circles).mean().value for s in seats.ordered(values)]
        return Merged(torch.cat(found, 1), seats.count > 0, seats.refused, seats.weight)


@dataclass(frozen=True)
class Krum:
    """Multi-Krum (Blanchard et al. 2017): the mean of the `keep` copies of each circle that lie closest to their peers.

    A copy's score is the sum of its squared distances to its n - byzantine - 2 nearest peers in the circle. `keep=None`
    keeps n - byzantine; `keep=1` is Krum. Below 1, `byzantine` is a share of those heard in a circle. Krum promises
    nothing for n < 2 byzantine + 3; such a small circle takes its median.

    >>> copies = torch.tensor([[1.0], [1.1], [1.2], [0.9], [900.0]])
    >>> Krum(byzantine=1, keep=1)(copies, torch.zeros(5).long(), torch.ones(5), 1).value
    tensor([[1.]])
    """

    by_columns: ClassVar[bool] = True
    byzantine: int | float = 1
    keep: int | None = None

    def __post_init__(self) -> None:
        check_liars("Krum", self.byzantine)
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"Krum with keep={self.keep} keeps no copy; give 1 or more")

    @property
    def least(self) -> int:
        """The smallest circle that is not left to the median."""
        return 2 * max(1, math.floor(self.byzantine)) + 3

    def __call__(self, values: Tensor, circle: Tensor, weight: Tensor, circles: int) -> Merged:
        finite = finite_rows(values)
        counted = finite & (weight > 0)
        count = count_rows(circle, counted, circles)  # (C,)
        liars = liars_in(count, self.byzantine)
        peers = (circle == circle[:, None]) & counted & counted[:, None]
        peers &= ~torch.eye(len(values), dtype=torch.bool, device=values.device)
        middle = Median()(values, circle, weight, circles)
        distance = torch.where(peers, squared_distances(values, middle.value[circle], counted), math.inf)  # (k, k)
        near = (count - liars - 2).clamp(min=1)[circle]  # (k,) how many peers score
        place = torch.arange(len(values), device=values.device)
        nearest = distance.sort(1).values
        score = torch.where(place < near[:, None], nearest, 0.0).sum(1)  # (k,)
        beats = (score < score[:, None]) | ((score == score[:, None]) & (place < place[:, None]))
        rank = (beats & peers).sum(1)  # (k,) how many of the circle come before
        most = count - liars if self.keep is None else torch.full_like(count, self.keep)
        kept = counted & (rank < most.clamp(min=1)[circle])
        chosen = Sums.of(values, circle, kept.float(), circles).mean()
        small = count < 2 * liars + 3
        value = torch.where(small[:, None], middle.value, chosen.value)
        return Merged(value, count > 0, ~finite, middle.weight)


def check_liars(rule: str, byzantine: float) -> None:
    """Refuse a number of liars that cannot be guarded against: whole, or a share of a circle below a half."""
    if byzantine == 0:
        raise ValueError(f"{rule} with byzantine=0 has nobody to guard against: use the merge 'mean'")
    if not (0 < byzantine < 0.5 or (byzantine >= 1 and byzantine == byzantine // 1)):
        raise ValueError(f"{rule}: byzantine={byzantine} must be a number of clients, or a share of a circle below 0.5")


def liars_in(count: Tensor, byzantine: float) -> Tensor:
    """(C,) how many liars are guarded against in circles of so many, (C,): at least one."""
    if byzantine >= 1:
        return torch.full_like(count, int(byzantine))
    return share_of(count, byzantine).clamp(min=1)


def share_of(count: Tensor, share: float) -> Tensor:
    """(C,) the share of so many, rounded down.

    >>> share_of(torch.tensor([100, 450]), 0.26)
    tensor([ 26, 117])
    """
    return (share * count.double() + 1e-9).floor().long()  # 1e-9: 0.29 * 100 is 28.999...


def count_rows(circle: Tensor, counted: Tensor, circles: int) -> Tensor:
    """(C,) how many rows count in each circle; whole numbers, so that the order of adding cannot matter."""
    return torch.zeros(circles, dtype=torch.int64, device=circle.device).index_add_(0, circle, counted.long())


def squared_distances(values: Tensor, middle: Tensor, counted: Tensor) -> Tensor:
    """(k, k) squared distances in each circle, from a Gram matrix in double precision.

    Rows are taken from the `middle` (k, width) of their circle: what all have in common would only cost digits. It is
    the median, since one huge copy would drag a mean along, and what tells the others apart would be lost in it.
    """

    def products(columns: slice) -> Tensor:
        apart = values[:, columns].double() - middle[:, columns]
        clean = torch.where(counted[:, None], apart, 0.0)
        return clean @ clean.T

    gram = over_columns(values, products)
    square = gram.diagonal()
    return (square + square[:, None] - 2 * gram).clamp(min=0)


@dataclass(frozen=True)
class _Seats:
    """Rows regrouped by circle, and in each column by value: circle c sits at start[c] .. start[c] + count[c] - 1."""

    circle: Tensor  # (k,) as given, with `circles` for rows that do not count: they sit at the end
    start: Tensor  # (C,)
    count: Tensor  # (C,)
    row: Tensor  # (k,) the circle sitting at each place; any, where nobody is seated
    seated: Tensor  # (k,) bool
    refused: Tensor  # (k,) bool
    weight: Tensor  # (C,) what those who count weigh together

    @classmethod
    def of(cls, values: Tensor, circle: Tensor, weight: Tensor, circles: int) -> _Seats:
        finite = finite_rows(values)
        counted = finite & (weight > 0)
        circle = torch.where(counted, circle, circles)
        count = count_rows(circle, counted, circles + 1)[:circles]
        row = circle.sort().values
        total = weight.new_zeros(circles + 1).index_add_(0, circle, weight)[:circles]
        return cls(circle, count.cumsum(0) - count, count, row.clamp(max=circles - 1), row < circles, ~finite, total)

    def ordered(self, values: Tensor) -> Iterator[Tensor]:
        """Blocks of columns, each (k, block), sorted by circle and then by value."""
        for columns in column_blocks(values):
            by_value, order = values[:, columns].sort(0)
            by_circle = self.circle[order].sort(dim=0, stable=True).indices
            yield by_value.gather(0, by_circle)
