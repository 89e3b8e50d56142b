"""A metric as tables, curves and statistics need to know it: its name, which way is better, how it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedquilt._util.wording import percent

PerSample = Callable[[Any, Any], Any]  # of outputs (n, ...) and targets (n, ...), tensors: one number a sample, (n,)
_TAKEN = ("round", "client", "readout", "split", "samples", "loss", "training_loss")


@dataclass(frozen=True)
class Metric:
    """What a client's predictions are worth, as one number.

    `higher` says whether more is better, `percent` whether it is a share from 0 to 1 that is shown in per cent, `low`
    and `high` what it cannot be below and above. With a `function` it is one of your own: of outputs and targets of
    some samples it gives a number for each, and a client's score is their mean.

    >>> within_ten = Metric("within 10", function=lambda out, y: ((out - y).abs() <= 10).float()[:, 0], percent=True)
    >>> within_ten.heading, within_ten.show(0.25), Metric("rmse", higher=False).show(53.2149)
    ('within 10 %', '25.0', '53.21')
    """

    name: str
    higher: bool = True
    percent: bool = False
    low: float = -math.inf
    high: float = math.inf
    function: PerSample | None = None

    def __post_init__(self) -> None:
        if not self.name or self.name in _TAKEN:
            raise ValueError(f"a metric cannot be called '{self.name}'; rows have that for something else")
        if self.percent and not math.isfinite(self.low):
            object.__setattr__(self, "low", 0.0)
            object.__setattr__(self, "high", 1.0)

    @property
    def heading(self) -> str:
        """What a column of it is headed by."""
        return f"{self.name} %" if self.percent else self.name

    @property
    def unit(self) -> str:
        """What follows a number of it."""
        return " %" if self.percent else ""

    def show(self, value: float | None, sign: bool = False) -> str:
        """A value, or a difference of two, without its unit."""
        if value is None or self.percent:
            return percent(value, sign)
        text = f"{value:+.4g}" if sign else f"{value:.4g}"
        return text if "e" not in text or abs(value) < 1e-3 else f"{value:{'+' if sign else ''},.0f}"

    def around(self, mean: float, deviation: float, wide: int = 0) -> str:
        """A mean and how far scores are from it, to as many places; without the unit.

        >>> Metric("rmse").around(1.9704, 0.23718), ACCURACY.around(0.8, 0.0651)
        ('1.97 ± 0.24', '80.0 ± 6.5')
        """
        shown, spread = self.show(mean), self.show(deviation)
        if not self.percent and "e" not in shown and "," not in shown:
            spread = f"{deviation:.{len(shown.partition('.')[2])}f}"
        return f"{shown} ± {spread:>{wide}}"

    def gain(self, score: float, bar: float) -> float:
        """How much better a score is than another: above 0 whichever way is better."""
        return score - bar if self.higher else bar - score

    def told(self) -> dict[str, Any]:
        """What readers of a run have to know of it, as plain values."""
        bounds = {key: value for key in ("low", "high") if math.isfinite(value := getattr(self, key))}
        return {"name": self.name, "higher_is_better": self.higher, "percent": self.percent, **bounds}


ACCURACY = Metric("accuracy", percent=True)


def metric_of(found: Mapping[str, Any]) -> Metric:
    """The metric that a summary, or the settings of a run, say leads; accuracy where they say nothing.

    >>> metric_of({"metric": {"name": "rmse", "higher_is_better": False, "percent": False, "low": 0.0}}).higher
    False
    >>> metric_of({}) == ACCURACY
    True
    """
    told = found.get("metric") or found.get("task", {}).get("metric")
    if not isinstance(told, Mapping) or "name" not in told:
        return ACCURACY
    low, high = float(told.get("low", -math.inf)), float(told.get("high", math.inf))
    return Metric(str(told["name"]), bool(told.get("higher_is_better", True)), bool(told.get("percent")), low, high)
