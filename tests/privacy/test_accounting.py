"""Epsilon: known values, a second opinion, and the noise for a promise."""

from __future__ import annotations

import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dp_accounting")

import dp_accounting
from privacy_help import learnable, run

import fedquilt as fq
from fedquilt.privacy import Budget, Use, accountant, found, noise_for
from fedquilt.privacy.accountant import epsilon_of

KNOWN = [  # rate, noise, times, delta: epsilon by privacy loss distributions
    (0.01, 1.0, 1000, 1e-5, 1.8282),
    (256 / 60000, 1.1, 14040, 1e-5, 2.3796),
    (0.02, 1.0, 1500, 1e-6, 5.4461),
    (1.0, 10.0, 100, 1e-5, 4.3772),
]


@pytest.mark.parametrize(("rate", "noise", "times", "delta", "epsilon"), KNOWN)
def test_known_values(rate: float, noise: float, times: int, delta: float, epsilon: float) -> None:
    assert round(epsilon_of(noise, rate, times, delta), 4) == epsilon
    coarse = epsilon_of(noise, rate, times, delta, fine=False)
    assert epsilon - 1e-4 < coarse < 1.01 * epsilon  # rounded up, and not by much


@pytest.mark.parametrize(("rate", "noise", "times", "delta", "epsilon"), [KNOWN[0], KNOWN[2]])
def test_a_second_opinion(rate: float, noise: float, times: int, delta: float, epsilon: float) -> None:
    prv = pytest.importorskip("prv_accountant")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mechanism = prv.PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=rate)
        accountant = prv.PRVAccountant(mechanism, max_self_compositions=times, eps_error=0.01, delta_error=delta / 1e5)
        low, _, high = accountant.compute_epsilon(delta, times)
    assert low <= epsilon_of(noise, rate, times, delta) <= high


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_the_noise_keeps_the_promise_and_is_not_more_than_that(rate: float) -> None:
    noise = noise_for(4.0, 1e-5, Use(rate), rounds=12)
    assert epsilon_of(noise, rate, 12, 1e-5) <= 4.0 < epsilon_of(noise - 0.02, rate, 12, 1e-5)


@pytest.mark.parametrize(
    ("level", "use"),
    [("client", Use()), ("client", Use(rate=0.4)), ("local", Use()), ("sample", Use(times=3)), ("distributed", Use())],
)
def test_the_noise_that_is_found_keeps_the_promise_of_every_level(level: Any, use: Use) -> None:
    privacy = found(fq.Privacy(epsilon=5, level=level), use, rounds=4)
    assert 4.9 < Budget(privacy, use).epsilon(4, fine=True) <= 5
    again = found(privacy, use, rounds=4)  # as it is read from a file, for a run of that length
    assert again.found == privacy.found
    with pytest.raises(ValueError, match="in 5 rounds, which is more"):
        found(privacy, use, rounds=5)


def test_a_promise_is_kept_over_all_rounds_and_no_round_costs_nothing() -> None:
    result = run(learnable(), privacy=fq.Privacy(epsilon=6, smallest=2), rounds=3)
    budget = result.federation.budget
    assert budget is not None
    spent = [budget.epsilon(rounds) for rounds in (0, 1, 2, 3)]
    assert spent[0] == 0 < spent[1] < spent[2] < spent[3] <= 6.001
    assert result.summary["epsilon"] == pytest.approx(6, abs=0.01)
    assert result.summary["noise_multiplier"] == pytest.approx(noise_for(6, 1e-5, Use(), 3))


def test_a_noise_that_does_not_keep_the_promise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"comes to epsilon .* more than dp\.epsilon=1"):
        found(fq.Privacy(epsilon=1, noise=1.0), Use(), 10)
    assert found(fq.Privacy(epsilon=1000, noise=1.0), Use(), 10).found == 1.0


def test_a_run_is_not_extended_beyond_its_promise(tmp_path: Path) -> None:
    """Its noise was found for the rounds that it had; one with a noise and no promise says what all rounds come to."""
    for name, privacy in {
        "promised": fq.Privacy(epsilon=6, smallest=2),
        "open": fq.Privacy(noise=2.0, smallest=2),
    }.items():
        run(learnable(rounds=2), privacy=privacy, out=tmp_path / name)
    with pytest.raises(ValueError, match=r"in 3 rounds, which is more than dp\.epsilon=6; take fewer rounds"):
        fq.extend(tmp_path / "promised", 3, learnable(rounds=2))
    assert json.loads((tmp_path / "promised" / "summary.json").read_text())["epsilon"] <= 6.001
    longer = fq.extend(tmp_path / "open", 3, learnable(rounds=2))
    assert longer.summary["epsilon"] == epsilon_of(2.0, 1.0, 3, 1e-5)


@pytest.mark.parametrize(("noise", "rate", "times"), [(0.05, 1.0, 2), (0.05, 0.5, 3), (1.0, 1.0, 1000)])
def test_of_little_noise_nobody_waits_for_digits_after_the_point(noise: float, rate: float, times: int) -> None:
    """On the fine grid these took 3 to 20 s. Whoever needs several hundred as epsilon needs four digits at most."""
    start = time.process_time()
    quick = epsilon_of(noise, rate, times, 1e-5)
    assert time.process_time() - start < 5
    renyi = dp_accounting.rdp.RdpAccountant().compose(accountant._event(noise, rate, times, False)).get_epsilon(1e-5)
    assert 0.8 * renyi < quick < renyi  # another bound from above, which is close to it there
    assert quick == pytest.approx(EXACT[noise, rate, times], rel=1e-4)
    assert quick >= EXACT[noise, rate, times]


EXACT = {  # by the same accountant, as fine as for more noise
    (0.05, 1.0, 2): 519.69819,
    (0.05, 0.5, 3): 728.69080,
    (1.0, 1.0, 1000): 633.92985,
}


@pytest.mark.parametrize("noise", [1e-3, 1e-7, 1e-200])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_next_to_no_noise_promises_next_to_nothing_and_says_so_at_once(noise: float, rate: float) -> None:
    start = time.process_time()
    assert epsilon_of(noise, rate, 3, 1e-5) > 1e5
    assert time.process_time() - start < 5
    assert "Nothing is promised" in Budget(fq.Privacy(noise=1e-200), Use(rate)).told(3)


def test_without_noise_nothing_is_promised() -> None:
    budget = Budget(fq.Privacy(noise=0.0), Use())
    assert math.isinf(budget.epsilon(1))
    assert budget.told(1).startswith("Nothing is promised")


def test_local_privacy_is_of_any_data_against_any_other() -> None:
    """Two clipped changes are up to twice the clip apart, so the same noise promises as much as half of it does."""
    here, there = (Budget(fq.Privacy(noise=z, level=level), Use()) for z, level in ((4.0, "local"), (2.0, "client")))  # type: ignore[arg-type]
    assert here.epsilon(5) == there.epsilon(5)


def test_a_sample_is_used_once_an_epoch() -> None:
    """Three rounds of two epochs are six Gaussian events, however many batches there are."""
    result = run(learnable(epochs=2, batch=3), privacy=fq.Privacy(noise=4.0, level="sample"), rounds=3)
    assert result.summary["epsilon"] == epsilon_of(4.0, 1.0, 6, 1e-5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "needs a promise or a noise"),
        ({"epsilon": 0}, "endless noise"),
        ({"epsilon": 8, "delta": 1.0}, "between 0 and 1"),
        ({"epsilon": 8, "clip": 0}, "leaves nothing"),
        ({"epsilon": 8, "level": "clients"}, "did you mean 'client'"),
        ({"epsilon": 8, "smallest": 1}, "one client is no sum"),
        ({"epsilon": 8, "adaptive": True, "level": "local"}, "belongs to dp.level=client"),
        ({"noise": -1.0}, "must not be negative"),
        ({"epsilon": float("nan")}, "finite"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fq.Privacy(**settings)  # type: ignore[arg-type]
