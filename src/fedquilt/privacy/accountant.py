"""What noise costs: epsilon by dp-accounting's privacy loss distributions, and the noise for an epsilon.

Nothing here is an accountant of our own. What a run does is told to Google's `dp-accounting` as events: Gaussian noise,
Poisson sampling, so many times. Sums of noise in whole numbers, which are not quite Gaussian, are told to it as what is
proved of them: concentrated privacy (Kairouz, Liu and Steinke 2021), counted by Renyi divergences. Two runs are
neighbours if one differs from the other by one client (or sample) that sends nothing in its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedquilt.privacy.settings import LEVELS, Privacy

_FINE, _COARSE = 1e-4, 1e-3  # steps of the grid of privacy losses; epsilon is rounded up on either
_MANY = 500  # events from which on the coarse grid rounds too much
# Noise below which no promise is looked for: its epsilon has many digits before the point. The grid is as much coarser
# there as its range is longer, so that nobody waits for digits after it; one with steps beyond 1 is of no use.
_LEAST = 0.2
_TOLERANCE = 1e-4  # of a noise multiplier


@dataclass(frozen=True)
class Use:
    """How one client (or sample) is used in a round: with probability `rate` in each of `times` noisy sums."""

    rate: float = 1.0
    times: int = 1


@dataclass(frozen=True)
class Budget:
    """What a run promises, and what it has spent after some rounds.

    >>> Budget(Privacy(noise=10.0), Use()).epsilon(100, fine=True)              # doctest: +ELLIPSIS
    4.377...
    """

    privacy: Privacy
    use: Use

    def epsilon(self, rounds: int, fine: bool = False) -> float:
        """Epsilon after so many rounds, rounded up; `fine`, on a grid that takes ten times as long."""
        whole = self.privacy.level == "distributed"
        times, delta = self.use.times * rounds, self.privacy.delta
        return epsilon_of(_accounted(self.privacy), self.use.rate, times, delta, fine, whole)

    def told(self, rounds: int) -> str:
        """What is protected after so many rounds, in a sentence."""
        spent, privacy = self.epsilon(rounds, fine=True), self.privacy
        if math.isinf(spent):
            return f"Nothing is promised: without noise, clipping to {privacy.clip:g} hides nobody."
        shown = f"{spent:.3g}" if spent < 1000 else f"{spent:.0f}"
        return f"Private with epsilon {shown} at delta {privacy.delta:g}, for {LEVELS[privacy.level]}."


def _accounted(privacy: Privacy) -> float:
    """The noise against how far the protected can move a sum. Local privacy is that of any data against any other, and
    two clipped changes are up to twice the clip apart."""
    return privacy.found / 2 if privacy.level == "local" else privacy.found


def found(privacy: Privacy, use: Use, rounds: int) -> Privacy:
    """The same promise with its noise; where both are given, a noise that does not keep the promise is refused."""
    if privacy.noise is None:
        assert privacy.epsilon is not None
        twice = 2 if privacy.level == "local" else 1
        noise = twice * noise_for(privacy.epsilon, privacy.delta, use, rounds, privacy.level == "distributed")
        return Privacy(**{**privacy.text, "noise": noise})
    if privacy.epsilon is not None:
        spent = Budget(privacy, use).epsilon(rounds, fine=True)
        if spent > privacy.epsilon:
            raise ValueError(
                f"dp.noise={privacy.noise:g} comes to epsilon {spent:.4g} in {rounds} rounds, which is more than "
                f"dp.epsilon={privacy.epsilon:g}; take fewer rounds, or leave dp.noise out, and it is found"
            )
    return privacy


@lru_cache(maxsize=4096)
def epsilon_of(
    noise: float, rate: float, times: int, delta: float, fine: bool = True, whole: bool = False
) -> float:  # fmt: skip
    """Epsilon of so many sums with Gaussian noise, each over a Poisson sample of this rate; `whole`: noise in whole
    numbers, over all."""
    if times == 0 or rate == 0:
        return 0.0
    if noise**2 == 0:  # or so little that it is nothing to a computer
        return math.inf
    step = _step(noise / math.sqrt(times) if rate >= 1 else noise, fine or times > _MANY)
    accountant = _accountant(step, whole or step > 1)
    found = float(accountant.compose(_event(noise, rate, times, whole)).get_epsilon(delta))
    return found + step if _COARSE < step <= 1 and not whole else found  # it may be rounded to a step


@lru_cache(maxsize=256)
def noise_for(epsilon: float, delta: float, use: Use, rounds: int, whole: bool = False) -> float:
    """The least noise that keeps a promise over so many rounds.

    >>> 1 < noise_for(8.0, 1e-5, Use(rate=0.5), rounds=20) < 2
    True
    """
    times = use.times * rounds
    if use.rate >= 1:  # sums of Gaussians are Gaussian
        return math.sqrt(times) * _least_noise(epsilon, delta, 1.0, 1, whole)
    return _least_noise(epsilon, delta, use.rate, times, whole)


def _least_noise(epsilon: float, delta: float, rate: float, times: int, whole: bool) -> float:
    search = _accounting().mechanism_calibration
    high = 1.0
    while epsilon_of(high, rate, times, delta, False, whole) > epsilon:
        high *= 2
    while high > _LEAST and epsilon_of(high / 2, rate, times, delta, False, whole) <= epsilon:
        high /= 2
    if high <= _LEAST:
        return high
    noise = search.calibrate_dp_mechanism(
        lambda: _accountant(_FINE if times > _MANY else _COARSE, whole),
        lambda noise: _event(noise, rate, times, whole),
        epsilon,
        delta,
        search.ExplicitBracketInterval(high / 2, high),
        tol=_TOLERANCE,
    )
    return float(noise)


def _step(noise: float, fine: bool) -> float:
    """The step of the grid of privacy losses of sums with this noise.

    >>> _step(1.0, fine=True), _step(0.02, fine=True)
    (0.0001, 0.01)
    """
    return (_FINE if fine else _COARSE) * max(1.0, round((_LEAST / noise) ** 2, 6))


def _accountant(step: float, renyi: bool) -> Any:
    """By privacy loss distributions on a grid of this step, or by Renyi divergences."""
    accounting = _accounting()
    if renyi:
        return accounting.rdp.RdpAccountant()
    return accounting.pld.PLDAccountant(value_discretization_interval=step)


def _event(noise: float, rate: float, times: int, whole: bool) -> Any:
    events = _accounting().dp_event
    if whole:
        return events.ZCDpEvent(times / (2 * noise**2))
    if rate >= 1:  # sums of Gaussians are Gaussian
        return events.GaussianDpEvent(noise / math.sqrt(times))
    return events.SelfComposedDpEvent(events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise)), times)


def _accounting() -> Any:
    try:
        import dp_accounting
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "counting what privacy costs needs dp-accounting: pip install 'fedquilt[dp]'"
        ) from None
    import dp_accounting.mechanism_calibration
    import dp_accounting.pld
    import dp_accounting.rdp

    return dp_accounting
