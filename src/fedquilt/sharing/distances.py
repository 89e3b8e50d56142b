"""Merges that weigh copies by how far they are from a point: geometric median, norm bound, centred clipping, FLTrust.

As in `robust`, all circles at once and every client once, whatever its weight. Those that start from a circle's last
value take the circle's median in its place where there is none yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.sharing.columns import over_columns
from fedquilt.sharing.robust import Median
from fedquilt.sharing.rule import NOTHING_KNOWN, MergeContext
from fedquilt.sharing.weighted_sums import Merged, Sums, finite_rows

_LEAST = torch.finfo(torch.float64).tiny
_TRUSTED = "server"


@dataclass(frozen=True)
class GeometricMedian:
    """The point of each circle with the least sum of distances to its copies (Pillutla et al. 2022, RFA).

    `steps` of Weiszfeld's algorithm from the coordinate-wise median, with distances of at least `smoothing`.

    >>> copies = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [900.0, 900.0]])
    >>> GeometricMedian(steps=100)(copies, torch.zeros(5).long(), torch.ones(5), 1).value.round(decimals=2)
    tensor([[1.5800, 1.5800]])
    """

    by_columns: ClassVar[bool] = True
    least: ClassVar[int] = 3
    steps: int = 8
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a geometric median with steps={self.steps} is the median: use the merge 'median'")
        if not self.smoothing > 0:
            raise ValueError(f"a geometric median with smoothing={self.smoothing} may divide by 0; give more than 0")

    def __call__(self, values: Tensor, circle: Tensor, weight: Tensor, circles: int) -> Merged:
        merged = Median()(values, circle, weight, circles)
        counted = ~merged.refused & (weight > 0)
        value = merged.value
        for _ in range(self.steps):
            near = counted / distances(values, value, circle, counted).clamp(min=self.smoothing)
            value = Sums.of(values, circle, near, circles).mean().value
        return merged._replace(value=value)


@dataclass(frozen=True)
class NormBound:
    """The mean of each circle's moves from its last value, none of them longer than `radius` (Sun et al. 2019).

    Without a radius it is the median of the lengths that are heard in the circle.

    >>> copies, held = torch.tensor([[1.0], [2.0], [900.0]]), MergeContext(torch.tensor([[0.0]]))
    >>> NormBound(radius=3)(copies, torch.zeros(3).long(), torch.ones(3), 1, held).value
    tensor([[2.0000]])
    """

    needs_context: ClassVar[bool] = True
    by_columns: ClassVar[bool] = True
    least: ClassVar[int] = 3
    radius: float | None = None

    def __post_init__(self) -> None:
        _check_radius("a norm bound", self.radius)

    def __call__(
        self, values: Tensor, circle: Tensor, weight: Tensor, circles: int, context: MergeContext = NOTHING_KNOWN
    ) -> Merged:  # fmt: skip
        return _clipped(values, circle, weight, circles, context, self.radius, 1)


@dataclass(frozen=True)
class CentredClipping:
    """Several times the mean of moves, none longer than `radius`, each from where the last led (Karimireddy 2021).

    It begins at the circle's last value.
    Without a radius it is the median distance of the circle's copies from its last value.

    >>> copies, held = torch.tensor([[1.0], [2.0], [900.0]]), MergeContext(torch.tensor([[0.0]]))
    >>> CentredClipping(radius=3, steps=2)(copies, torch.zeros(3).long(), torch.ones(3), 1, held).value
    tensor([[2.6667]])
    """

    needs_context: ClassVar[bool] = True
    by_columns: ClassVar[bool] = True
    least: ClassVar[int] = 3
    radius: float | None = None
    steps: int = 3

    def __post_init__(self) -> None:
        _check_radius("centred clipping", self.radius)
        if self.steps == 1:
            raise ValueError("centred clipping with one step bounds norms: use the merge 'norm-bound'")
        if self.steps < 1:
            raise ValueError(f"centred clipping with steps={self.steps} hears nobody; give 2 or more")

    def __call__(
        self, values: Tensor, circle: Tensor, weight: Tensor, circles: int, context: MergeContext = NOTHING_KNOWN
    ) -> Merged:  # fmt: skip
        return _clipped(values, circle, weight, circles, context, self.radius, self.steps)


@dataclass(frozen=True)
class FLTrust:
    """Moves count by the cosine to the move of clients that the server trusts, and as long as that (Cao et al. 2021).

    A move that goes the other way counts nothing. `trusted` are names of clients; "server" is one that the server makes
    of the samples it holds (`Scenario.common`). Copies of the trusted are not merged themselves. A circle in which none
    of them is heard takes its median, one in which all others go the other way stays where it is.

    >>> copies, held = torch.tensor([[3.0, 0.0], [-9.0, 0.0], [0.0, 9.0], [1.0, 0.0]]), torch.zeros(1, 2)
    >>> context = MergeContext(held, trusted=torch.tensor([False, False, False, True]))
    >>> FLTrust()(copies, torch.zeros(4).long(), torch.ones(4), 1, context).value
    tensor([[1., 0.]])
    """

    needs_context: ClassVar[bool] = True
    by_columns: ClassVar[bool] = True
    least: ClassVar[int] = 2
    trusted: tuple[str, ...] = (_TRUSTED,)

    def __post_init__(self) -> None:
        if not self.trusted:
            raise ValueError("FLTrust trusts nobody; name clients: --set trusted=NAME,...")

    def __call__(
        self, values: Tensor, circle: Tensor, weight: Tensor, circles: int, context: MergeContext = NOTHING_KNOWN
    ) -> Merged:  # fmt: skip
        middle = Median()(values, circle, weight, circles)
        counted = ~middle.refused & (weight > 0)
        held = _start(context, lambda: middle.value)
        nobody = torch.zeros_like(counted)
        trusted = nobody if context.trusted is None else context.trusted.to(values.device) & counted
        root = Sums.of(values, circle, trusted.double(), circles).mean()
        others = counted & ~trusted

        def products(columns: slice) -> Tensor:
            start = held[:, columns].double()
            move = torch.where(others[:, None], values[:, columns].double() - start[circle], 0.0)
            towards = (root.value[:, columns].double() - start)[circle]
            return torch.stack([(move * towards).sum(1), move.square().sum(1), towards.square().sum(1)])

        along, length, step = over_columns(values, products)
        length, step = length.sqrt(), step.sqrt()
        trust = others * (along / (length * step).clamp(min=_LEAST)).clamp(min=0)
        scale = step / length.clamp(min=_LEAST)
        moved = Sums.of(values, circle, torch.where(trust > 0, trust * scale, 0.0), circles).mean().value
        far = Sums.of(torch.where(trust > 0, scale, 0.0)[:, None], circle, trust, circles).mean().value
        value = torch.where(root.heard[:, None], torch.lerp(held, moved, far), middle.value)
        return middle._replace(value=value)


def distances(values: Tensor, centre: Tensor, circle: Tensor, counted: Tensor) -> Tensor:
    """(k,) how far each copy is from the centre (C, size) of its circle, in double precision; 0 for who counts not."""

    def squares(columns: slice) -> Tensor:
        apart = values[:, columns].double() - centre[:, columns].double()[circle]
        return torch.where(counted[:, None], apart, 0.0).square().sum(1)

    return over_columns(values, squares).sqrt()


def _check_radius(rule: str, radius: float | None) -> None:
    if radius is not None and not (0 < radius < math.inf):
        raise ValueError(f"{rule} with radius={radius} lets nothing or everything pass; give a length above 0, or none")


def _start(context: MergeContext, middle: Callable[[], Tensor]) -> Tensor:
    """(C, size) the circles' last values, and the middle of what is heard where there is none."""
    if context.held is None:
        return middle()
    return context.held if context.known is None else torch.where(context.known[:, None], context.held, middle())


def _clipped(
    values: Tensor, circle: Tensor, weight: Tensor, circles: int, context: MergeContext, radius: float | None,
    steps: int,
) -> Merged:  # fmt: skip
    """The circles' last values, moved `steps` times by the mean of cut moves.

    v + mean(s_i (x_i - v)) is v, moved towards the mean of x_i that is weighted by s_i, by the mean of s_i.
    """
    finite = finite_rows(values)
    counted = finite & (weight > 0)
    each = counted.double()
    whole = Sums.of(values.new_zeros(len(values), 1), circle, weight * counted, circles).mean()  # who is heard
    value = _start(context, lambda: Median()(values, circle, weight, circles).value)
    bound: Tensor | float = radius if radius is not None else _usual(values, value, circle, counted, circles)[circle]
    for _ in range(steps):
        away = distances(values, value, circle, counted)
        scale = each * (bound / away.clamp(min=_LEAST)).clamp(max=1)
        towards = Sums.of(values, circle, scale, circles).mean().value
        far = Sums.of(scale[:, None], circle, each, circles).mean().value
        value = torch.lerp(value, towards, far)
    return Merged(value, whole.heard, ~finite, whole.weight)


def _usual(values: Tensor, centre: Tensor, circle: Tensor, counted: Tensor, circles: int) -> Tensor:
    """(C,) the median distance of each circle's copies from its centre."""
    away = distances(values, centre, circle, counted)
    return Median()(away[:, None], circle, counted.double(), circles).value[:, 0]
