"""The real caches, where FEDQUILT_DATA points at them: published counts."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fedquilt import data


def real(name: str) -> data.Dataset:
    if not os.environ.get("FEDQUILT_DATA") or not (data.data_folder() / f"{name}.npz").is_file():
        pytest.skip(f"no cache of {name} in FEDQUILT_DATA")
    return data.load(name, fetch=False)


def test_mnist_counts() -> None:
    mnist = real("mnist")
    assert mnist.is_test is not None
    assert np.bincount(mnist.is_test).tolist() == [60000, 10000]
    train = mnist.take(~mnist.is_test)
    assert list(train.counts().values()) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    pixels = train.images()
    assert (pixels.mean(dtype=np.float64), pixels.std(dtype=np.float64)) == pytest.approx((0.1307, 0.3081), abs=1e-4)


def test_cifar10_counts_and_channel_means() -> None:
    cifar = real("cifar10")
    assert cifar.x.dtype == np.uint8
    assert cifar.is_test is not None
    train = cifar.take(~cifar.is_test)
    assert set(train.counts().values()) == {5000}
    assert set(cifar.take(cifar.is_test).counts().values()) == {1000}
    means = train.x.reshape(-1, 3).mean(axis=0) / 255
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


def test_uci_har_counts_subjects_and_chains() -> None:
    har = real("uci_har")
    assert har.x.shape == (10299, 9, 128)
    assert har.x.dtype == np.float32
    assert har.is_test is not None
    assert har.subject is not None
    assert np.bincount(har.is_test).tolist() == [7352, 2947]
    assert len(np.unique(har.subject)) == 30
    assert len(np.unique(har.subject[har.is_test])) == 9
    assert list(har.counts().values()) == [1722, 1544, 1406, 1777, 1906, 1944]
    assert har.recording is not None
    assert har.time is not None
    for values in (har.subject, har.y, har.is_test):  # a chain is of one subject, one label and one half
        assert len(np.unique(np.stack([har.recording, values.astype(np.int64)]), axis=1).T) == har.recording.max() + 1
    assert 0.85 < (har.time > 0).mean() < 0.95  # most windows share half their readings with another


def test_hapt_windows_are_the_published_ones() -> None:
    hapt = real("hapt")
    assert hapt.subject is not None
    assert hapt.recording is not None
    assert (len(np.unique(hapt.subject)), len(np.unique(hapt.recording))) == (30, 61)
    windows = data.cut_windows(hapt, length=128, step=64)
    assert len(windows) == 10929
    assert list(windows.counts().values()) == [1722, 1544, 1407, 1801, 1979, 1958, 70, 33, 107, 85, 139, 84]
    slow = data.cut_windows(data.resample(data.choose_channels(hapt, ["acc"]), 20), length=51, step=26)
    assert slow.x.shape[1:] == (3, 51)
    assert abs(np.linalg.norm(slow.x.mean(axis=2), axis=1).mean() - 1) < 0.05  # gravity is 1 g at any rate


def test_animals4_counts() -> None:
    animals = real("animals4")
    assert animals.label_names == ("cat", "dog", "sheep", "elephant")
    assert set(animals.counts().values()) == {1400}
    assert animals.images(slice(0, 3)).shape == (3, 3, 48, 48)
