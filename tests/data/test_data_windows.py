"""Windows, sampling rates, channels, standardising."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedquilt.data import Dataset, Standardiser, choose_channels, cut_windows, resample, resample_signal, sliding


def stream(y: list[int], recording: list[int] | None = None, **more: Any) -> Dataset:
    x = np.arange(len(y), dtype=np.float32)[:, None] * np.array([1, -1], np.float32)
    marks = None if recording is None else np.array(recording)
    return Dataset("toy", x, np.array(y), ("a", "b"), "stream", recording=marks, channels=("acc_x", "gyro_x"), **more)


def test_windows_stay_inside_a_label_and_a_recording() -> None:
    cut = cut_windows(stream([0] * 5 + [-1] * 2 + [0] * 3 + [1] * 4, [8] * 9 + [9] * 5), length=3, step=1)
    assert cut.x[:, 0, 0].tolist() == [0, 1, 2, 10, 11]  # 7..8 is too short, and 9 is another recording
    assert cut.x[:, 1, 2].tolist() == [-2, -3, -4, -12, -13]
    assert cut.y.tolist() == [0, 0, 0, 1, 1]
    assert cut.recording is not None
    assert cut.recording.tolist() == [8, 8, 8, 9, 9]
    assert cut.time is not None
    assert cut.time.tolist() == [0, 1, 2, 1, 2]
    assert cut.kind == "windows"


def test_a_stream_too_short_gives_no_windows() -> None:
    assert cut_windows(stream([0, 0]), length=3, step=1).x.shape == (0, 2, 3)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-1, 1), min_size=1, max_size=60),
    st.integers(1, 7),
    st.integers(1, 7),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
)
def test_every_window_has_one_label_one_recording_and_the_count_is_the_sum_over_runs(
    y: list[int], length: int, step: int, cuts: list[int]
) -> None:
    recording = np.repeat(np.arange(200), np.resize(cuts, 200))[: len(y)]
    source = stream(y, recording.tolist())
    cut = cut_windows(source, length, step)
    labels, expected = np.array(y), 0
    start = 0
    for i in range(1, len(y) + 1):
        if i == len(y) or y[i] != y[start] or recording[i] != recording[start]:
            expected += max(0, (i - start - length) // step + 1) if y[start] >= 0 else 0
            start = i
    assert len(cut) == expected
    for row, label in zip(cut.x[:, 0], cut.y, strict=True):
        inside = row.astype(int)
        assert set(labels[inside]) == {label}
        assert len(set(recording[inside])) == 1


@pytest.mark.parametrize(("length", "step"), [(0, 1), (3, 0), (-1, 2)])
def test_windows_of_no_length_are_refused(length: int, step: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        sliding(np.zeros((4, 1)), length, step)


def tone(hertz: float, rate: float, seconds: float = 20) -> NDArray[np.float64]:
    out: NDArray[np.float64] = np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate + 0.7)[:, None]
    return out


def test_a_tone_below_half_the_new_rate_survives() -> None:
    slow = resample_signal(tone(3, 50), 50, 20)
    assert slow.shape == (400, 1)
    assert slow.dtype == np.float32
    middle = slice(40, 360)
    assert np.abs(slow - tone(3, 20))[middle].max() < 0.01


@pytest.mark.parametrize("hertz", [11, 12, 15, 22])
def test_a_tone_above_half_the_new_rate_does_not_fold_back(hertz: float) -> None:
    slow = resample_signal(tone(hertz, 50), 50, 20)
    naive = tone(hertz, 50)[np.round(np.arange(400) * 2.5).astype(int)]
    assert np.abs(slow[40:360]).max() < 0.01  # 40 dB down
    assert np.abs(naive).max() > 0.5  # what taking the nearest readings would have let through


def test_a_resting_signal_stays_at_rest_up_to_its_ends() -> None:
    assert np.abs(resample_signal(np.full((200, 1), 9.81), 50, 20) - 9.81).max() < 1e-3


def test_recordings_are_resampled_apart_and_keep_their_labels() -> None:
    source = stream(
        [0] * 100 + [1] * 100 + [0] * 50, [0] * 200 + [1] * 50, rate=50, subject=np.repeat([4, 5], [200, 50])
    )
    slow = resample(source, 20)
    assert slow.y.tolist() == [0] * 40 + [1] * 40 + [0] * 20
    assert slow.subject is not None
    assert slow.subject.tolist() == [4] * 80 + [5] * 20
    assert slow.rate == 20
    assert slow.x[80, 0] == pytest.approx(200, abs=1)  # nothing of the first recording leaks into the second


def test_windows_are_resampled_with_their_times() -> None:
    windows = cut_windows(stream([0] * 300, rate=50), length=100, step=50)
    slow = resample(windows, 20)
    assert slow.x.shape == (5, 2, 40)
    assert slow.time is not None
    assert slow.time.tolist() == [0, 20, 40, 60, 80]


def test_channels_are_chosen_by_name_or_sensor() -> None:
    source = stream([0, 0])
    assert choose_channels(source, ["gyro", "acc_x"]).x.tolist() == [[0, 0], [-1, 1]]
    with pytest.raises(ValueError, match="no channel 'mag'; it has acc_x, gyro_x"):
        choose_channels(source, ["mag"])


def test_standardising_uses_training_statistics_only() -> None:
    rng = np.random.default_rng(0)
    train = rng.normal([[[5.0], [-3.0], [2.0]]], [[[2.0], [0.5], [0.0]]], (50, 3, 40))
    fitted = Standardiser.fit(train)
    out = fitted(train)
    assert np.abs(out.mean(axis=(0, 2))).max() < 1e-5
    assert out.std(axis=(0, 2))[:2] == pytest.approx([1, 1], abs=1e-4)
    assert np.abs(out[:, 2]).max() == 0  # a silent channel stays silent and finite
    other = np.full((2, 3, 40), 7.0)
    assert fitted(other)[0, 0, 0] == pytest.approx((7 - train[:, 0].mean()) / train[:, 0].std(), rel=1e-5)
    with pytest.raises(ValueError, match="2 channels, the standardiser was fitted on 3"):
        fitted(other[:, :2])
    with pytest.raises(ValueError, match="no training samples"):
        Standardiser.fit(train[:0])


def test_a_data_set_refuses_rows_that_do_not_agree() -> None:
    with pytest.raises(ValueError, match="subject has 1 rows, y has 2"):
        Dataset("toy", np.zeros((2, 1)), np.array([0, 0]), ("a",), "stream", subject=np.array([1]))
    with pytest.raises(ValueError, match="2 channels, but 1 channel names"):
        Dataset("toy", np.zeros((1, 2)), np.array([0]), ("a",), "stream", channels=("acc_x",))


def test_labels_are_chosen_and_renumbered() -> None:
    chosen = stream([0, 1, -1, 1]).with_labels(["b"])
    assert chosen.y.tolist() == [0, 0]
    assert chosen.x[:, 0].tolist() == [1, 3]
    with pytest.raises(ValueError, match="no label 'c'"):
        stream([0]).with_labels(["c"])


def test_images_and_signals_are_not_confused() -> None:
    with pytest.raises(ValueError, match=r"use \.signals"):
        stream([0]).images()
    picture = Dataset("toy", np.full((1, 2, 2, 3), 255, np.uint8), np.array([0]), ("a",))
    assert picture.inputs().shape == (1, 3, 2, 2)
    assert picture.inputs().max() == 1
    with pytest.raises(ValueError, match=r"use \.images"):
        picture.signals()
