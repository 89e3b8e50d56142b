"""CIFAR-10 (Krizhevsky 2009): 50000 + 10000 colour images, 32 x 32, ten classes.

The binary version is read, since the "python version" is a pickle and would run whatever it contains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.data.archives import refuse, tar_members
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FOLDER = "cifar-10-batches-bin"
_FILES = [f"{_FOLDER}/data_batch_{n}.bin" for n in range(1, 6)] + [f"{_FOLDER}/test_batch.bin"]


def records(path: Path, member: str, raw: bytes, label_bytes: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Labels (n, label_bytes) and images (n, 32, 32, 3) of a binary file: label bytes, then red, green, blue planes."""
    size = label_bytes + 3072
    if not raw or len(raw) % size:
        raise refuse(path, f"its member '{member}' has {len(raw)} bytes, which is not a whole number of images")
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, size)
    images = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return rows[:, :label_bytes], images


def parse(archive: Path) -> Dataset:
    """The data set from `cifar-10-binary.tar.gz`."""
    members = tar_members(archive, _FILES)
    parts = [records(archive, name, members.pop(name), label_bytes=1) for name in _FILES]
    y = np.concatenate([labels[:, 0] for labels, _ in parts]).astype(np.int64)
    if y.max() >= len(LABELS):
        raise refuse(archive, f"it holds label {y.max()}, CIFAR-10 has labels 0 to 9")
    return Dataset(
        "cifar10",
        np.concatenate([images for _, images in parts]),
        y,
        LABELS,
        is_test=np.arange(len(y)) >= len(y) - len(parts[-1][0]),
    )


SOURCE = Source(
    name="cifar10",
    title="CIFAR-10",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    licence="none stated; cite Krizhevsky 2009",
    parse=parse,
    archives=(
        Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    samples=60000,
)
