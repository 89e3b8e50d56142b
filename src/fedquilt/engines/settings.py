"""How clients train: one value that a scenario carries, a user overrides and a run records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

from fedquilt._util.plain_values import python
from fedquilt._util.suggest import did_you_mean

OptimiserName = Literal["sgd", "adam", "adamw"]
SamplingName = Literal["fixed", "poisson"]
PrecisionName = Literal["float32", "bf16"]


@dataclass(frozen=True)
class Training:
    """Settings of local training, the same on every client unless a method says otherwise.

    `decay_at` multiplies the learning rate by `decay` once the given shares of all rounds are over, so
    `decay_at=(0.5, 0.75), decay=0.1` is a step schedule over rounds. `share` is the part of the clients chosen in each
    round: that number of them, or with `sampling="poisson"` each by itself with that probability, so that a round may
    have more, fewer or none. The optimiser's state is fresh in each round, as in FedAvg. With `precision="bf16"` layers
    multiply in bfloat16, half the bytes and about three digits; weights, norms, losses and steps stay float32.

    In a simulation whose clients declare `speed` and `bandwidth`, a round closes after `deadline` virtual seconds, or,
    semi-asynchronously, with so many `arrivals` (0: it waits for all); what is late then counts (1 + s)^-`staleness`.

    >>> Training(lr=1.0, decay_at=(0.5,), decay=0.1, rounds=10).rate(6)
    0.1
    """

    rounds: int = 20
    epochs: int = 1
    batch: int = 32
    optimiser: OptimiserName = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 1.0
    decay_at: tuple[float, ...] = ()
    share: float = 1.0
    sampling: SamplingName = "fixed"
    deadline: float = 0.0
    arrivals: int = 0
    staleness: float = 0.5
    precision: PrecisionName = "float32"

    def __post_init__(self) -> None:
        def refuse(what: str) -> None:
            raise ValueError(f"training settings: {what}")

        for key in (f.name for f in fields(self)):
            object.__setattr__(self, key, python(getattr(self, key)))
        for keys, kind, told in (
            (("rounds", "epochs", "batch", "arrivals"), Integral, "a whole number"),
            (("lr", "momentum", "weight_decay", "eps", "decay", "share", "deadline", "staleness"), Real, "a number"),
        ):
            for key in keys:
                value = getattr(self, key)
                if isinstance(value, bool) or not isinstance(value, kind):
                    refuse(f"{key}={value!r} must be {told}")
        if self.rounds < 1 or self.epochs < 1 or self.batch < 1:
            refuse(f"rounds ({self.rounds}), epochs ({self.epochs}) and batch ({self.batch}) must be at least 1")
        for key in ("lr", "weight_decay", "eps"):
            if not math.isfinite(getattr(self, key)):
                refuse(f"{key}={getattr(self, key)} must be a finite number")
        if not self.lr > 0:
            refuse(f"lr={self.lr} trains nothing; give a rate above 0")
        if not self.eps > 0:
            refuse(f"eps={self.eps} must be above 0")
        if self.optimiser not in ("sgd", "adam", "adamw"):
            refuse(f"optimiser '{self.optimiser}' is not known; take sgd, adam or adamw")
        if self.momentum < 0 or self.momentum >= 1:
            refuse(f"momentum={self.momentum} must be in [0, 1)")
        if self.nesterov and self.momentum == 0:
            refuse("nesterov needs a momentum above 0")
        if self.optimiser != "sgd" and (self.momentum or self.nesterov):
            refuse(f"momentum and nesterov belong to sgd; {self.optimiser} takes betas")
        if self.weight_decay < 0:
            refuse(f"weight_decay={self.weight_decay} must not be negative")
        if not all(0 <= b < 1 for b in self.betas) or len(self.betas) != 2:
            refuse(f"betas={self.betas} must be two numbers in [0, 1)")
        if self.sampling == "poisson" and self.arrivals:
            refuse("arrivals lets the first to answer count, so clients are not chosen by chance; set sampling=fixed")
        if self.sampling not in ("fixed", "poisson"):
            refuse(f"sampling '{self.sampling}' is not known; take fixed or poisson")
        if self.precision not in ("float32", "bf16"):
            refuse(f"precision '{self.precision}' is not known; take float32 or bf16")
        if not 0 < self.share <= 1:
            refuse(f"share={self.share} must be above 0 and at most 1")
        for key in ("deadline", "arrivals", "staleness"):
            if not 0 <= getattr(self, key) < math.inf:
                refuse(f"{key}={getattr(self, key)} must be a number from 0 up")
        if not 0 < self.decay <= 1 or any(not 0 < at < 1 for at in self.decay_at):
            refuse("decay must be in (0, 1] and decay_at shares of the rounds between 0 and 1")

    def rate(self, round_: int) -> float:
        """The learning rate of a round, counted from 1."""
        passed = sum((round_ - 1) >= at * self.rounds for at in self.decay_at)
        return self.lr * self.decay**passed

    def but(self, changes: Mapping[str, Any]) -> Training:
        """A copy with some settings changed; an unknown name is refused."""
        known = [f.name for f in fields(self)]
        for key in changes:
            if key not in known:
                raise ValueError(did_you_mean(key, known, "training setting"))
        return replace(self, **changes)
