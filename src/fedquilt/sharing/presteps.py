"""What is done to the copies of a circle before a rule merges them: bucketing, and mixing with nearest neighbours.

Clients that differ look like liars to a robust rule. Both steps make honest copies more alike, so that less is lost on
them: `bucketing+median`, `nnm+krum`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedquilt._util.randomness import GOLDEN, key_of, mix, signed
from fedquilt.sharing.robust import Median, check_liars, count_rows, liars_in, squared_distances
from fedquilt.sharing.rule import NOTHING_KNOWN, MergeContext, Rule, apply_rule
from fedquilt.sharing.weighted_sums import Merged, Sums, finite_rows


class Prepared(NamedTuple):
    """Copies as the next step sees them, in as many rows; those that count for nothing have the weight 0."""

    values: Tensor  # (k, size)
    circle: Tensor  # (k,)
    weight: Tensor  # (k,)
    trusted: Tensor | None  # (k,) bool


class PreStep(Protocol):
    """Something done to copies before they are merged."""

    def least(self, after: int) -> int:
        """The smallest circle that leaves a rule enough, which needs `after` copies itself."""

    def __call__(self, copies: Prepared, circles: int, key: int) -> Prepared: ...


@dataclass(frozen=True)
class NearestNeighbours:
    """Each copy becomes the mean of itself and its nearest peers, n - byzantine of n in all (Allouah et al. 2023, NNM).

    Below 1, `byzantine` is a share of those heard in a circle; at least one is guarded against.
    """

    byzantine: int | float = 1

    def __post_init__(self) -> None:
        check_liars("nnm", self.byzantine)

    def least(self, after: int) -> int:
        """The smallest circle in which the honest are more."""
        return max(after, 2 * max(1, math.floor(self.byzantine)) + 1)

    def __call__(self, copies: Prepared, circles: int, key: int) -> Prepared:
        values, circle, weight, _ = copies
        counted = weight > 0
        count = count_rows(circle, counted, circles)
        near = (count - liars_in(count, self.byzantine)).clamp(min=1)[circle]  # (k,)
        together = (circle == circle[:, None]) & counted & counted[:, None]
        middle = Median()(values, circle, weight, circles).value[circle]
        distance = torch.where(together, squared_distances(values, middle, counted), math.inf)  # (k, k)
        distance.fill_diagonal_(-1)  # itself first, also among equals
        rank = distance.argsort(dim=1, stable=True).argsort(dim=1)
        mixed = Sums.mixed(values, (rank < near[:, None]) & together).mean().value
        return copies._replace(values=mixed)


@dataclass(frozen=True)
class Bucketing:
    """Copies are put into buckets of `size` at random in each round, and their means are merged (Karimireddy 2022).

    A liar spoils a bucket: with buckets of two, a rule has to bear twice the share of liars.
    """

    size: int = 2

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"buckets of size={self.size} hold single copies: leave 'bucketing' out, or give 2")

    def least(self, after: int) -> int:
        """The smallest circle with so many buckets."""
        return (after - 1) * self.size + 1

    def __call__(self, copies: Prepared, circles: int, key: int) -> Prepared:
        values, circle, weight, trusted = copies
        k = len(values)
        counted = weight > 0
        place = torch.arange(k, device=values.device)
        chance = mix(place * signed(GOLDEN) + signed(key))
        apart = counted if trusted is None else counted & ~trusted  # a trusted copy stays by itself
        peers = (circle == circle[:, None]) & apart & apart[:, None]
        earlier = (chance < chance[:, None]) | ((chance == chance[:, None]) & (place < place[:, None]))
        rank = (peers & earlier).sum(1)
        # a bucket lies in the row of its first member: who comes `rank % size` places earlier in the same circle
        first = peers & (rank == (rank - rank % self.size)[:, None])
        bucket = torch.where(apart, first.long().argmax(1), place)
        means = Sums.of(values, bucket, counted.double(), k).mean()
        return Prepared(means.value, circle, means.heard.float(), trusted)


@dataclass(frozen=True)
class Composed:
    """A rule after steps that prepare its copies; made by name, as in `pick("nnm+krum")`.

    A circle in which fewer than `least` are heard takes the median of its copies as they are.
    """

    before: tuple[PreStep, ...]
    rule: Rule
    needs_context: ClassVar[bool] = True

    @property
    def least(self) -> int:
        """The smallest circle in which it bears a liar."""
        least = int(getattr(self.rule, "least", 1))
        for step in reversed(self.before):
            least = step.least(least)
        return least

    @property
    def by_columns(self) -> bool:
        """Whether the rule is; the steps before it are."""
        return bool(getattr(self.rule, "by_columns", False))

    @property
    def trusted(self) -> tuple[str, ...]:
        """The names of clients that the rule trusts."""
        return tuple(getattr(self.rule, "trusted", ()))

    def __call__(
        self, values: Tensor, circle: Tensor, weight: Tensor, circles: int, context: MergeContext = NOTHING_KNOWN
    ) -> Merged:  # fmt: skip
        finite = finite_rows(values)
        counted = finite & (weight > 0)
        weighs = Sums.of(values.new_zeros(len(values), 1), circle, weight * counted, circles).mean().weight
        copies = Prepared(values, circle, counted.to(values.dtype), context.trusted)
        for number, step in enumerate(self.before):
            copies = step(copies, circles, key_of(context.key, number))
        known = context._replace(trusted=copies.trusted)
        merged = apply_rule(self.rule, copies.values, copies.circle, copies.weight, circles, known)
        small = count_rows(circle, counted, circles) < self.least
        if values.is_cuda or bool(small.any()):  # only a CPU can be asked without waiting
            middle = Median()(values, circle, weight, circles).value
            merged = merged._replace(value=torch.where(small[:, None], middle, merged.value))
        return merged._replace(refused=~finite, weight=weighs)
