"""Feature skew: the same samples through another sensor.

Pure functions on images (n, channels, height, width) and signals (n, channels, time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def missing(x: Array, channels: Sequence[int], keep_shape: bool = True) -> Array:
    """Without some channels: set to zero, or with `keep_shape=False` taken away, so that the input has another shape.

    >>> missing(np.ones((1, 3, 2), np.float32), channels=[1])[0].tolist()
    [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    >>> missing(np.ones((1, 3, 2), np.float32), channels=[1], keep_shape=False).shape
    (1, 2, 2)
    """
    gone = sorted(set(channels))
    if gone and not 0 <= gone[0] <= gone[-1] < x.shape[1]:
        raise ValueError(f"channels {gone} are not all among the {x.shape[1]} there are, counted from 0")
    if not keep_shape:
        return np.delete(x, gone, axis=1)
    out = x.copy()
    out[:, gone] = 0
    return out


def coarser(x: Array, factor: int) -> Array:
    """At a lower resolution in space or time: means over `factor` neighbours along every axis after the channels.

    >>> coarser(np.arange(4, dtype=np.float32).reshape(1, 1, 4), 2).tolist()
    [[[0.5, 2.5]]]
    """
    if factor < 1 or any(n < factor for n in x.shape[2:]):
        raise ValueError(
            f"factor={factor} does not go with samples of shape {x.shape[1:]}; give 1 to {min(x.shape[2:])}"
        )
    for axis in range(2, x.ndim):
        whole = x.shape[axis] // factor
        x = np.moveaxis(x, axis, -1)[..., : whole * factor]
        x = np.moveaxis(x.reshape(*x.shape[:-1], whole, factor).mean(axis=-1), -1, axis)
    return np.ascontiguousarray(x, dtype=np.float32)


def rotated(x: Array, degrees: float) -> Array:
    """Turned: images about their centre, signals about the third axis.

    Quarter turns of images are exact, others go by the nearest pixel. Signals need their channels in threes (x, y,
    z of each sensor): a device worn at another angle.

    >>> rotated(np.array([[[[1., 2.], [3., 4.]]]], np.float32), 90)[0, 0].tolist()
    [[2.0, 4.0], [1.0, 3.0]]
    >>> rotated(np.array([[[1.], [0.], [5.]]], np.float32), 90).round(3)[0, :, 0].tolist()
    [0.0, 1.0, 5.0]
    """
    angle = np.deg2rad(degrees)
    if x.ndim == 3:
        if x.shape[1] % 3:
            raise ValueError(f"signals of {x.shape[1]} channels cannot be turned; give x, y and z of each sensor")
        turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
        axes = x.reshape(len(x), -1, 3, x.shape[2])  # (n, sensors, 3, time)
        return np.asarray(np.einsum("ij,nsjt->nsit", turn, axes).reshape(x.shape), dtype=np.float32)
    if degrees % 90 == 0:
        return np.ascontiguousarray(np.rot90(x, int(degrees // 90), axes=(2, 3)))
    height, width = x.shape[2:]
    row, column = np.mgrid[:height, :width].astype(np.float64)
    row, column = row - (height - 1) / 2, column - (width - 1) / 2
    from_row = np.rint(np.cos(angle) * row + np.sin(angle) * column + (height - 1) / 2).astype(int)
    from_column = np.rint(-np.sin(angle) * row + np.cos(angle) * column + (width - 1) / 2).astype(int)
    inside = (from_row >= 0) & (from_row < height) & (from_column >= 0) & (from_column < width)
    out = np.zeros_like(x)
    out[:, :, inside] = x[:, :, from_row[inside], from_column[inside]]
    return out


def noisier(x: Array, deviation: float, seed: int = 0) -> Array:
    """With white noise of a standard deviation, the same for the same seed.

    >>> bool(noisier(np.zeros((1, 1, 1000), np.float32), 0.5).std().round(1) == 0.5)
    True
    """
    if deviation < 0:
        raise ValueError(f"deviation={deviation} must not be negative")
    return (x + np.random.default_rng(seed).normal(0, deviation, x.shape)).astype(np.float32)


def grey(x: Array) -> Array:
    """Colour images as one channel of luminance.

    >>> float(grey(np.ones((1, 3, 1, 1), np.float32))[0, 0, 0, 0].round(3))
    1.0
    """
    if x.ndim != 4 or x.shape[1] != 3:
        raise ValueError(f"samples of shape {x.shape[1:]} are no colour images (3, height, width)")
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    return np.asarray(np.einsum("c,nchw->nhw", weights, x)[:, None], dtype=np.float32)


SKEWS: dict[str, Callable[..., Any]] = {
    "missing": missing,
    "coarser": coarser,
    "rotated": rotated,
    "noisier": noisier,
    "grey": grey,
}
