"""Train, validation and test inside one client, without leaks between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Parts(NamedTuple):
    """Indices of a client's train, validation and test samples."""

    train: Ints
    validation: Ints
    test: Ints


def _shares(shares: tuple[float, float, float]) -> tuple[float, float]:
    """Where to cut: the ends of train and of validation as shares of the whole."""
    if len(shares) != 3 or min(shares) < 0 or shares[0] <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"shares of train, validation and test are {shares}; give three that add up to 1, train above 0"
        )
    return shares[0], shares[0] + shares[1]


def _cuts(n: int, ends: tuple[float, float]) -> tuple[int, int]:
    """The two cuts in n samples: rounded, with at least one training sample."""
    first = min(n, max(1, round(n * ends[0])))
    return first, min(n, max(first, round(n * ends[1])))


def random_split(labels: npt.ArrayLike, shares: tuple[float, float, float] = (0.6, 0.1, 0.3), seed: int = 0) -> Parts:
    """Split samples at random, label by label, for data whose samples are independent (images).

    Every sample is in exactly one part; a label with a single sample has it in train.

    >>> parts = random_split([0] * 10 + [1] * 10, shares=(0.5, 0.1, 0.4))
    >>> [len(p) for p in parts]
    [10, 2, 8]
    """
    ends = _shares(shares)
    y = np.asarray(labels)
    rng = np.random.default_rng(seed)
    parts: list[list[Ints]] = [[], [], []]
    seen, given = 0, [0, 0]  # what rounding takes from one label it gives to the next, so that totals keep the shares
    for label in rng.permutation(np.unique(y)):
        mine = rng.permutation(np.flatnonzero(y == label))
        seen += len(mine)
        first = min(len(mine), max(1, round(seen * ends[0]) - given[0]))
        second = min(len(mine), max(first, round(seen * ends[1]) - given[1]))
        given = [given[0] + first, given[1] + second]
        for part, piece in zip(parts, np.split(mine, (first, second)), strict=True):
            part.append(piece)
    return _sorted(parts)


def time_split(
    labels: npt.ArrayLike,
    recording: npt.ArrayLike,
    time: npt.ArrayLike,
    length: int,
    shares: tuple[float, float, float] = (0.6, 0.1, 0.3),
) -> Parts:
    """Split windows by time, label by label: train first, then validation, then test, and gaps between them.

    `recording` and `time` are as in `Dataset`: two windows overlap when they are of one recording and their times
    differ by less than `length`. A window that overlaps one of another part is dropped (from the longer of the two
    parts at a cut), so no reading is ever in two parts. A cut that falls between two recordings costs nothing.

    >>> starts = [0, 64, 128, 192, 256, 320]                      # windows of 128 readings, half overlapping
    >>> parts = time_split([0] * 6, [7] * 6, starts, length=128, shares=(0.5, 0.0, 0.5))
    >>> parts.train.tolist(), parts.test.tolist()
    ([0, 1], [3, 4, 5])
    """
    ends = _shares(shares)
    y, rec, when = np.asarray(labels), np.asarray(recording), np.asarray(time)
    if not len(y) == len(rec) == len(when):
        raise ValueError(
            f"{len(y)} labels, {len(rec)} recordings and {len(when)} times; give one of each for every window"
        )
    line = _timeline(rec, when, length)
    parts: list[list[Ints]] = [[], [], []]
    for label in np.unique(y):
        mine = np.flatnonzero(y == label)
        mine = mine[np.argsort(line[mine], kind="stable")]
        pieces = [np.asarray(p) for p in np.split(mine, _cuts(len(mine), ends))]
        for a, b in ((0, 1), (1, 2), (0, 2)):
            if len(pieces[a]) >= len(pieces[b]):
                pieces[a] = pieces[a][~_overlaps(pieces[a], pieces[b], line, length)]
            else:
                pieces[b] = pieces[b][~_overlaps(pieces[b], pieces[a], line, length)]
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    whole = [np.concatenate(part) for part in parts]
    for a, b in ((0, 1), (1, 2), (0, 2)):  # neighbours in time may carry two labels: a last look over all of them
        whole[a] = whole[a][~_overlaps(whole[a], whole[b], line, length)]
    if not len(whole[0]):
        raise ValueError(f"{len(y)} windows of length {length} leave no training window that overlaps no other part")
    return _sorted([[part] for part in whole])


def leaks(parts: Parts, recording: npt.ArrayLike, time: npt.ArrayLike, length: int) -> int:
    """How many validation and test windows share readings with a training window (see `time_split`).

    >>> leaks(Parts(np.array([0, 2]), np.array([], dtype=int), np.array([1, 4])), [0] * 5, [0, 64, 128, 192, 256], 128)
    1
    """
    line = _timeline(np.asarray(recording), np.asarray(time), length)
    return sum(int(_overlaps(part, parts.train, line, length).sum()) for part in parts[1:])


def _timeline(recording: npt.NDArray[np.generic], time: npt.NDArray[np.generic], length: int) -> Ints:
    """All recordings one after another on one axis, so far apart that windows of two never overlap."""
    if length < 1:
        raise ValueError(f"windows of length {length}: give how many readings a window spans")
    _, number = np.unique(recording, return_inverse=True)
    start = np.asarray(time, dtype=np.int64)
    start = start - (start.min() if len(start) else 0)
    span = int(start.max(initial=0)) + 2 * length
    return np.asarray(number.reshape(-1) * span + start, dtype=np.int64)


def _overlaps(a: Ints, b: Ints, line: Ints, length: int) -> npt.NDArray[np.bool_]:
    """Which windows of a share readings with a window of b."""
    if not len(a) or not len(b):
        return np.zeros(len(a), dtype=bool)
    other = np.sort(line[b])
    first = np.searchsorted(other, line[a] - length, side="right")  # the first of b that ends after a begins
    found = other[np.minimum(first, len(other) - 1)]
    return np.asarray((first < len(other)) & (found < line[a] + length))


def _sorted(parts: list[list[Ints]]) -> Parts:
    pieces = [np.sort(np.concatenate(p)).astype(np.int64) if p else np.zeros(0, np.int64) for p in parts]
    return Parts(*pieces)
