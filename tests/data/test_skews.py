"""Feature skew: other sensors, same samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedquilt.data.skew import SKEWS, coarser, grey, missing, noisier, rotated

IMAGES = np.random.default_rng(0).random((3, 3, 8, 8), dtype=np.float32)
SIGNALS = np.random.default_rng(1).random((4, 6, 20), dtype=np.float32)


@pytest.mark.parametrize("name", SKEWS)
def test_skews_leave_their_input_alone(name: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "missing": {"channels": [0]},
        "coarser": {"factor": 2},
        "rotated": {"degrees": 30},
        "noisier": {"deviation": 0.1},
    }
    before = IMAGES.copy()
    out = SKEWS[name](IMAGES, **settings.get(name, {}))
    assert np.array_equal(IMAGES, before)
    assert out.dtype == np.float32
    assert len(out) == 3


def test_coarser_keeps_the_mean_and_drops_the_detail() -> None:
    out = coarser(IMAGES, 2)
    assert out.shape == (3, 3, 4, 4)
    np.testing.assert_allclose(out.mean((2, 3)), IMAGES.mean((2, 3)), rtol=1e-5)
    assert coarser(SIGNALS, 3).shape == (4, 6, 6)  # the last two of 20 readings fill no group of three


def test_turning_back_gives_the_same() -> None:
    np.testing.assert_array_equal(rotated(rotated(IMAGES, 90), -90), IMAGES)
    np.testing.assert_allclose(rotated(rotated(SIGNALS, 37), -37), SIGNALS, atol=1e-5)
    lengths = np.linalg.norm(rotated(SIGNALS, 20).reshape(4, 2, 3, 20), axis=2)
    np.testing.assert_allclose(lengths, np.linalg.norm(SIGNALS.reshape(4, 2, 3, 20), axis=2), rtol=1e-5)


def test_a_small_turn_is_close_to_a_quarter_turn_at_ninety() -> None:
    almost = rotated(IMAGES, 90.001)
    assert np.abs(almost - rotated(IMAGES, 90)).mean() < 0.05


def test_a_missing_sensor_is_zero_or_gone() -> None:
    assert missing(SIGNALS, [3, 4, 5])[:, 3:].sum() == 0
    np.testing.assert_array_equal(missing(SIGNALS, [3, 4, 5], keep_shape=False), SIGNALS[:, :3])


def test_noise_is_the_same_for_the_same_seed() -> None:
    np.testing.assert_array_equal(noisier(SIGNALS, 0.1, seed=4), noisier(SIGNALS, 0.1, seed=4))
    assert not np.array_equal(noisier(SIGNALS, 0.1, seed=4), noisier(SIGNALS, 0.1, seed=5))


def test_skews_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not all among the 6"):
        missing(SIGNALS, [6])
    with pytest.raises(ValueError, match="factor=30"):
        coarser(SIGNALS, 30)
    with pytest.raises(ValueError, match="cannot be turned"):
        rotated(SIGNALS[:, :4], 10)
    with pytest.raises(ValueError, match="no colour images"):
        grey(SIGNALS)
    with pytest.raises(ValueError, match="must not be negative"):
        noisier(SIGNALS, -1)
