"""Tiny data sets in the form of the real ones, for building every scenario without a download."""

from __future__ import annotations

import string

import numpy as np

from fedquilt.data import Dataset
from fedquilt.data import load as real_load

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STL = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
WALKS = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")


def images(name: str, shape: tuple[int, ...], names: tuple[str, ...], per_label: int) -> Dataset:
    """Images whose brightness tells the label a little; every fifth one is a test image."""
    rng = np.random.default_rng(len(name))
    y = rng.permutation(np.repeat(np.arange(len(names)), per_label))
    x = rng.integers(0, 100, (len(y), *shape)) + (y * 150 // len(names)).reshape(-1, *[1] * len(shape))
    test = np.zeros(len(y), dtype=bool)
    for label in range(len(names)):
        test[np.flatnonzero(y == label)[::5]] = True
    coarse = y // 5 if name == "cifar100" else None
    return Dataset(name, x.astype(np.uint8), y, names, is_test=test, coarse=coarse)


def stream(name: str, channels: tuple[str, ...], names: tuple[str, ...], rate: float, subjects: int) -> Dataset:
    """Every subject does every activity for a while, in one recording."""
    rng = np.random.default_rng(len(name))
    long = int(rate * 40)
    y = np.tile(np.repeat(np.arange(len(names)), long), subjects)
    who = np.repeat(np.arange(subjects), long * len(names))
    x = rng.normal(size=(len(y), len(channels))) + y[:, None]
    return Dataset(
        name, x.astype(np.float32), y, names, "stream", subject=who, recording=who, channels=channels, rate=rate
    )


def windows(name: str, channels: tuple[str, ...], names: tuple[str, ...], length: int, step: int) -> Dataset:
    """Six people, 20 windows of each activity, each activity a recording."""
    rng = np.random.default_rng(len(name))
    recording = np.repeat(np.arange(6 * len(names)), 20)
    y = recording % len(names)
    x = rng.normal(size=(len(y), len(channels), length)) + y[:, None, None]
    time = np.tile(np.arange(20) * step, 6 * len(names))
    return Dataset(
        name, x.astype(np.float32), y, names, "windows", subject=recording // len(names) + 1, recording=recording,
        time=time, channels=channels, rate=50,
    )  # fmt: skip


def tiny_load(name: str, data_dir: str | None = None) -> Dataset:
    """Stands in for `fedquilt.data.load`."""
    six = tuple(f"{sensor}_{axis}" for sensor in ("acc", "gyro") for axis in "xyz")
    characters = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    match name:
        case "cifar10":
            return images(name, (32, 32, 3), CIFAR, 60)
        case "stl10":
            return images(name, (96, 96, 3), STL, 20)
        case "cifar100":
            return images(name, (32, 32, 3), tuple(f"c{i}" for i in range(100)), 8)
        case "mnist":
            return images(name, (28, 28), tuple(string.digits), 100)
        case "animals4":
            return images(name, (48, 48, 3), ("cat", "dog", "sheep", "elephant"), 60)
        case "emnist":
            return images(name, (28, 28), characters, 100)
        case "femnist":
            data = images(name, (28, 28), characters, 10)
            return Dataset(name, data.x, data.y, characters, subject=np.arange(len(data)) % 8)
        case "hapt":
            return stream(name, six, WALKS, 50, 8)
        case "realworld":
            labels = ("climbingdown", "climbingup", "jumping", "lying", "running", "sitting", "standing", "walking")
            return stream(name, six, labels, 50, 6)
        case "wisdm":
            six_labels = ("Walking", "Jogging", "Upstairs", "Downstairs", "Sitting", "Standing")
            return stream(name, six[:3], six_labels, 20, 6)
        case "uci_har":
            nine = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
            return windows(name, nine, WALKS, 128, 64)
        case "harbox":
            return windows(
                name, tuple(f"imu_{i}" for i in range(1, 10)), ("Call", "Hop", "typing", "Walk", "Wave"), 100, 100
            )
    return real_load(name, data_dir)
