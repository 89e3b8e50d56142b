"""What follows: the next readings of a signal or a series, from those before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedquilt.tasks.regression import Regression


@dataclass(frozen=True)
class Forecasting(Regression):
    """The next readings of a series: targets (n, steps) or (n, channels, steps), and a model gives as many numbers.

    It is a regression; rows also tell the error of every step, and channel.
    """

    kind: ClassVar[str] = "forecasting"
    simplest: ClassVar[str] = "always answering with the mean reading"

    def target(self, y: Tensor, whose: str) -> Tensor:
        if y.ndim not in (2, 3):
            raise ValueError(
                f"{whose}: targets of shape {tuple(y.shape)} are no readings that follow; give (n, steps) or "
                "(n, channels, steps)"
            )
        return y.float()
