"""What is promised to whom, as one value that a user gives, a run keeps and every client is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any, Literal

from fedquilt._util.plain_values import python, whole
from fedquilt._util.suggest import did_you_mean
from fedquilt._util.toml import values_of

Level = Literal["client", "local", "sample", "distributed"]

# what is protected at each level, and from whom
LEVELS: dict[str, str] = {
    "client": (
        "each client as a whole: whether it took part can hardly be told from the models that the server gives out; "
        "the server itself is trusted"
    ),
    "local": (
        "each client as a whole, from the server too: the updates that it sends hardly tell which data it has, "
        "though scores that it reports may"
    ),
    "sample": (
        "each training sample, from the server too: the updates that its client sends hardly tell whether it was "
        "there, though scores that it reports may"
    ),
    "distributed": (
        "each client as a whole, from the server too: whether its change or none was among them can hardly be told "
        "from the sums that the server opens, where the share dp.honest of their clients adds noise as agreed"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of a run: a promise `epsilon` at `delta`, or a `noise` from which the promise follows.

    `level` says what is protected. client: each client's change is clipped to the length `clip`, all of its units
    together, and the server adds Gaussian noise of `noise` * `clip` to the sum of each circle. local: the client clips
    its change and adds that noise itself. sample: the gradient of each sample is clipped and every step gets noise.
    distributed: under secure sums, each client adds a share of that noise, such that the share `honest` of a sum's
    clients adds all of it; the server sees no sum without. A
    circle of fewer than `smallest` clients is refused, since noise does not shrink with it. With `adaptive`, at the
    level client, the clip follows the `quantile` of the clients' changes (Andrew et al. 2021), by `clip_rate` a round.

    >>> Privacy(epsilon=8)
    Privacy(epsilon=8, delta=1e-05, level='client')
    """

    epsilon: float | None = None
    delta: float = 1e-5
    level: Level = "client"
    clip: float = 1.0
    noise: float | None = None
    smallest: int = 5
    adaptive: bool = False
    quantile: float = 0.5
    clip_rate: float = 0.2
    honest: float = 0.5

    def __post_init__(self) -> None:
        for key in (f.name for f in fields(self)):
            object.__setattr__(self, key, python(getattr(self, key)))
        if self.level not in LEVELS:
            raise ValueError(did_you_mean(str(self.level), LEVELS, "level of privacy"))
        for key in ("epsilon", "delta", "clip", "noise", "quantile", "clip_rate", "honest"):
            value = getattr(self, key)
            if value is None and key in ("epsilon", "noise"):
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"dp.{key}={value!r} must be a finite number")
        if whole(self.smallest, "dp.smallest") < 2:
            raise ValueError(f"dp.smallest={self.smallest} must be at least 2: one client is no sum")
        if self.epsilon is None and self.noise is None:
            raise ValueError("privacy needs a promise or a noise: set dp.epsilon (8, say), or dp.noise")
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"dp.epsilon={self.epsilon} would take endless noise; give a number above 0")
        if self.noise is not None and self.noise < 0:
            raise ValueError(f"dp.noise={self.noise} must not be negative")
        if not 0 < self.delta < 1:
            raise ValueError(f"dp.delta={self.delta} must be between 0 and 1, and far below one over the clients")
        if not self.clip > 0:
            raise ValueError(f"dp.clip={self.clip} leaves nothing of an update; give a length above 0")
        if not 0 < self.quantile < 1 or not self.clip_rate > 0:
            raise ValueError("dp.quantile must be between 0 and 1, and dp.clip_rate above 0")
        if not 0 < self.honest <= 1:
            raise ValueError(f"dp.honest={self.honest} must be above 0 and at most 1: the share of a sum's clients")
        if self.level == "distributed" and self.noise == 0:
            raise ValueError("dp.noise=0 has no shares; leave dp.level=distributed out, or give a noise above 0")
        if self.adaptive and self.level != "client":
            raise ValueError(f"dp.adaptive belongs to dp.level=client; with dp.level={self.level} the clip stays")
        idle = {
            "smallest": (self.level in ("client", "distributed"), "dp.level=client and distributed"),
            "honest": (self.level == "distributed", "dp.level=distributed"),
            "quantile": (self.adaptive, "dp.adaptive=true"),
            "clip_rate": (self.adaptive, "dp.adaptive=true"),
        }
        for f in fields(self):
            does, where = idle.get(f.name, (True, ""))
            if not does and getattr(self, f.name) != f.default:
                raise ValueError(f"dp.{f.name} is of {where} and would do nothing here; leave it out")

    @staticmethod
    def of(text: Mapping[str, Any] | None) -> Privacy | None:
        """What `text` gave; None where nothing is said."""
        return Privacy(**values_of(text)) if text else None

    def __repr__(self) -> str:
        usual = {f.name: f.default for f in fields(self)}
        always = ("delta", "level")
        told = {key: value for key, value in asdict(self).items() if key in always or value != usual[key]}
        return f"Privacy({', '.join(f'{key}={value!r}' for key, value in told.items())})"

    @property
    def found(self) -> float:
        """The noise multiplier; finding it for an `epsilon` is the accountant's."""
        assert self.noise is not None, "the noise was not found yet"
        return self.noise

    @property
    def text(self) -> dict[str, Any]:
        """The settings as plain values, without those that were not given: `Privacy(**text)` is this again."""
        return {key: value for key, value in asdict(self).items() if value is not None}
