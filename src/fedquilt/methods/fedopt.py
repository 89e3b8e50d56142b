"""Server optimisers: FedAvgM (Hsu et al. 2019), FedAdagrad, FedAdam and FedYogi (Reddi et al. 2021, Algorithm 2).

Clients do as in FedAvg. The merge's move, Delta = sum_i (n_i / n) theta_i - w, is a gradient to a server's optimiser:

    FedAvgM      m <- beta m + Delta;                         w <- w + eta m
    the others   m <- beta_1 m + (1 - beta_1) Delta;          w <- w + eta m / (sqrt(v) + tau)
    FedAdagrad   v <- v + Delta^2
    FedAdam      v <- beta_2 v + (1 - beta_2) Delta^2
    FedYogi      v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)

v starts at tau^2, and there is no correction of a bias, as in the paper. m and v go with their circle, so that any plan
can have a server optimiser in each of its circles. Running statistics are averaged and never optimised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.method import Heard
from fedquilt.methods.fedavg import FedAvg

Memory = Mapping[str, Tensor]


def check_rate(method: str, rate: float) -> None:
    """Refuse a server's learning rate by which nothing is ever learnt."""
    if not 0 < rate < math.inf:
        raise ValueError(f"{method} with rate={rate} never learns; give a finite rate above 0")


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg whose server goes on in the direction it came from: momentum `beta`, step size `rate`."""

    name: ClassVar[str] = "fedavgm"
    beta: float = 0.9
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.name, self.rate)
        if not 0 <= self.beta < 1:
            raise ValueError(f"fedavgm: beta={self.beta} must be from 0 to below 1")
        if self.beta == 0 and self.rate == 1:
            raise ValueError("FedAvgM without momentum and with rate=1 is FedAvg: use the method 'fedavg'")

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Memory
    ) -> tuple[Tensor, Memory]:  # fmt: skip
        m = self.beta * memory.get("m", torch.zeros_like(held)) + merged - held
        return held + self.rate * m, {"m": m}


@dataclass(frozen=True)
class FedAdagrad(FedAvg):
    """FedAvg whose server takes smaller steps where it has moved much; `rate` is its step size, `tau` its caution."""

    name: ClassVar[str] = "fedadagrad"
    rate: float = 0.1
    betas: tuple[float, float] = (0.0, 0.99)
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_rate(self.name, self.rate)
        if not self.tau > 0 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"{self.name}: tau={self.tau} must be above 0, betas={self.betas} from 0 to below 1")

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Memory
    ) -> tuple[Tensor, Memory]:  # fmt: skip
        delta = merged - held
        m = self.betas[0] * memory.get("m", torch.zeros_like(held)) + (1 - self.betas[0]) * delta
        v = self.second(memory.get("v", torch.zeros_like(held)) + self.tau**2, delta.square())
        return held + self.rate * m / (v.sqrt() + self.tau), {"m": m, "v": v - self.tau**2}  # so that 0 is its start

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The second moment, from the last one and the square of the move."""
        return v + square


@dataclass(frozen=True)
class FedAdam(FedAdagrad):
    """FedAvg whose server is Adam, without its correction of a bias."""

    name: ClassVar[str] = "fedadam"
    betas: tuple[float, float] = (0.9, 0.99)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.betas[1] * v + (1 - self.betas[1]) * square


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAvg whose server is Yogi: Adam whose second moment forgets no faster than moves are big."""

    name: ClassVar[str] = "fedyogi"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.betas[1]) * square * (v - square).sign()
