"""Signals: cutting recordings into windows, changing the sampling rate, choosing channels, standardising."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.data.dataset import Dataset


def segments(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Start and end of each run in which none of the columns changes: (runs, 2), ends exclusive.

    >>> import numpy as np
    >>> segments(np.array([1, 1, 2, 2]), np.array([0, 0, 0, 5])).tolist()
    [[0, 2], [2, 3], [3, 4]]
    """
    n = len(columns[0])
    if n == 0:
        return np.empty((0, 2), dtype=np.int64)
    change = np.zeros(n - 1, dtype=np.bool_)
    for column in columns:
        change |= column[1:] != column[:-1]
    edges = np.concatenate([[0], np.flatnonzero(change) + 1, [n]])
    return np.stack([edges[:-1], edges[1:]], axis=1)


def sliding(signal: NDArray[Any], length: int, step: int) -> NDArray[Any]:
    """Windows of a signal (readings, channels) as (windows, channels, length); what does not fill a window is left out.

    >>> import numpy as np
    >>> sliding(np.arange(5.0)[:, None], length=3, step=2)[:, 0].tolist()
    [[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]]
    """
    _check(length, step)
    if len(signal) < length:
        return np.empty((0, signal.shape[1], length), dtype=signal.dtype)
    view = np.lib.stride_tricks.sliding_window_view(signal, length, axis=0)[::step]  # (windows, channels, length)
    return np.ascontiguousarray(view)


def _check(length: int, step: int) -> None:
    if length < 1 or step < 1:
        raise ValueError(f"windows of length {length} with step {step}: both must be at least 1")


def cut_windows(dataset: Dataset, length: int, step: int) -> Dataset:
    """Cut a stream into windows that lie inside one recording and one label; unlabelled readings are left out.

    The result keeps `recording`, and `time` is the position of a window's first reading in its recording: windows of
    one recording whose times differ by less than `length` share readings and belong on the same side of a split.

    >>> import numpy as np
    >>> d = Dataset("toy", np.zeros((10, 1), np.float32), np.array([0] * 6 + [1] * 4), ("sit", "walk"), "stream")
    >>> cut = cut_windows(d, length=4, step=2)
    >>> cut.y.tolist(), cut.time.tolist()
    ([0, 0, 1], [0, 2, 6])
    """
    _check(length, step)
    if dataset.kind != "stream":
        raise ValueError(
            f"data set '{dataset.name}' holds {dataset.kind}; only a stream of readings is cut into windows"
        )
    recording = _recordings(dataset)
    columns = [dataset.y, recording] if dataset.subject is None else [dataset.y, recording, dataset.subject]
    runs = segments(*columns)
    starts = [np.arange(a, b - length + 1, step) for a, b in runs if dataset.y[a] >= 0]
    first = np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)
    begin = np.zeros(len(dataset), dtype=np.int64)  # where the recording of each reading begins
    for a, b in segments(recording):
        begin[a:b] = a
    x = np.empty((len(first), dataset.x.shape[1], length), dtype=np.float32)
    for row, start in enumerate(first):
        x[row] = dataset.x[start : start + length].T
    return replace(
        dataset.take(first),
        x=x,
        kind="windows",
        recording=recording[first],
        time=first - begin[first],
    )


def _recordings(dataset: Dataset) -> NDArray[np.int64]:
    return np.zeros(len(dataset), dtype=np.int64) if dataset.recording is None else dataset.recording


def resample_signal(x: NDArray[Any], rate: float, to: float, axis: int = 0) -> NDArray[np.float32]:
    """A signal at another rate, low-pass filtered first so that nothing above half the new rate folds back.

    The ends are continued along a line, since padding with zeros would bend a signal that rests at 1 g.

    >>> import numpy as np
    >>> resample_signal(np.ones((100, 3)), rate=50, to=20).shape
    (40, 3)
    """
    from scipy.signal import firwin, resample_poly  # imported late: most uses of the library never need it

    if rate <= 0 or to <= 0:
        raise ValueError(f"a sampling rate is above 0 Hz; got {rate} and {to}")
    ratio = (Fraction(to).limit_denominator(1000) / Fraction(rate).limit_denominator(1000)).limit_denominator(1000)
    x = np.asarray(x, dtype=np.float32)
    if ratio == 1 or x.shape[axis] == 0:
        return x
    # A sharper filter than scipy's own, which lets half of what lies at the new half rate pass.
    up, down = ratio.numerator, ratio.denominator
    taps = firwin(40 * max(up, down) + 1, 0.95 / max(up, down), window=("kaiser", 6.0))
    return np.asarray(resample_poly(x, up, down, axis=axis, window=taps, padtype="line"), dtype=np.float32)


def resample(dataset: Dataset, to: float) -> Dataset:
    """A data set at another sampling rate, each recording (or window) by itself; labels go by the nearest reading.

    >>> import numpy as np
    >>> d = Dataset("toy", np.ones((100, 1), np.float32), np.repeat([0, 1], 50), ("a", "b"), "stream", rate=50)
    >>> resample(d, 20).y.tolist().count(1)
    20
    """
    if dataset.kind == "images" or dataset.rate is None:
        raise ValueError(f"data set '{dataset.name}' has no sampling rate")
    if to == dataset.rate:
        return dataset
    if dataset.kind == "windows":
        x = resample_signal(dataset.x, dataset.rate, to, axis=2)
        scale = x.shape[2] / dataset.x.shape[2]
        time = None if dataset.time is None else np.round(dataset.time * scale).astype(np.int64)
        return replace(dataset, x=x, time=time, rate=to)
    pieces, rows = [], []
    for a, b in segments(_recordings(dataset)):
        piece = resample_signal(dataset.x[a:b], dataset.rate, to)
        nearest = np.round(np.arange(len(piece)) * (dataset.rate / to)).astype(np.int64)
        pieces.append(piece)
        rows.append(a + np.minimum(nearest, b - a - 1))
    return replace(dataset.take(np.concatenate(rows)), x=np.concatenate(pieces), rate=to)


def choose_channels(dataset: Dataset, channels: Sequence[str]) -> Dataset:
    """Only the named channels, in the order given; "acc" stands for acc_x, acc_y, acc_z.

    >>> import numpy as np
    >>> names = ("acc_x", "acc_y", "acc_z", "gyro_x")
    >>> d = Dataset("toy", np.zeros((2, 4), np.float32), np.array([0, 0]), ("a",), "stream", channels=names)
    >>> choose_channels(d, ["acc"]).channels
    ('acc_x', 'acc_y', 'acc_z')
    """
    wanted: list[str] = []
    for name in channels:
        hits = [name] if name in dataset.channels else [c for c in dataset.channels if c[:-2] == name]
        if not hits:
            known = ", ".join(dataset.channels) or "no named channels"
            raise ValueError(f"data set '{dataset.name}' has no channel '{name}'; it has {known}")
        wanted += hits
    index = [dataset.channels.index(name) for name in wanted]
    return replace(dataset, x=np.ascontiguousarray(dataset.x[:, index]), channels=tuple(wanted))


@dataclass(frozen=True, eq=False)
class Standardiser:
    """Subtracts a mean and divides by a deviation per channel, both taken from training data alone.

    >>> import numpy as np
    >>> train = np.array([[[1.0, 3.0]], [[5.0, 7.0]]])  # (samples, channels, time)
    >>> s = Standardiser.fit(train)
    >>> round(float(s(train).mean()), 6), round(float(s(train).std()), 6)
    (0.0, 1.0)
    """

    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]

    @classmethod
    def fit(cls, train: NDArray[Any]) -> Standardiser:
        """Measure training samples (n, channels, ...); a channel that never changes keeps its scale."""
        if len(train) == 0:
            raise ValueError("there are no training samples to standardise by")
        axes = tuple(axis for axis in range(train.ndim) if axis != 1)
        mean = train.mean(axis=axes, dtype=np.float64)
        deviation = train.std(axis=axes, dtype=np.float64)
        deviation[deviation < 1e-8] = 1.0
        return cls(mean.astype(np.float32), deviation.astype(np.float32))

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """The samples on the scale of the training data."""
        if x.shape[1] != len(self.mean):
            raise ValueError(f"the samples have {x.shape[1]} channels, the standardiser was fitted on {len(self.mean)}")
        shape = (1, -1) + (1,) * (x.ndim - 2)
        out = np.asarray(x, dtype=np.float32) - self.mean.reshape(shape)
        out /= self.deviation.reshape(shape)
        return out
