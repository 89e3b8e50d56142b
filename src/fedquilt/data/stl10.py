"""STL-10 (Coates, Lee, Ng 2011): 5000 + 8000 labelled colour images, 96 x 96, ten classes.

The 100000 images without labels, 2.7 of the archive's gigabytes, are not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedquilt.data.archives import reading, refuse, tar_members
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

_FOLDER = "stl10_binary"
_FILES = [f"{_FOLDER}/{name}" for name in ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")]


def parse(archive: Path) -> Dataset:
    """The data set from `stl10_binary.tar.gz`: planes of red, green, blue, each column by column; labels from 1."""
    members = tar_members(archive, _FILES)
    with reading(archive):
        names = tuple(members[_FILES[-1]].decode("ascii").split())
    images, labels = [], []
    for x_name, y_name in (_FILES[:2], _FILES[2:4]):
        raw = np.frombuffer(members.pop(x_name), dtype=np.uint8)
        y = np.frombuffer(members.pop(y_name), dtype=np.uint8)
        if raw.size != len(y) * 3 * 96 * 96:
            raise refuse(archive, f"'{x_name}' has {raw.size} bytes, which does not go with {len(y)} labels")
        if len(y) == 0 or y.min() < 1 or y.max() > len(names):
            raise refuse(archive, f"'{y_name}' holds labels that are not 1 to {len(names)}")
        images.append(raw.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1))  # (n, row, column, colour)
        labels.append(y.astype(np.int64) - 1)
    y_all = np.concatenate(labels)
    x = np.empty((len(y_all), 96, 96, 3), dtype=np.uint8)
    x[: len(labels[0])], x[len(labels[0]) :] = images
    return Dataset("stl10", x, y_all, names, is_test=np.arange(len(y_all)) >= len(labels[0]))


SOURCE = Source(
    name="stl10",
    title="STL-10, labelled part",
    homepage="https://cs.stanford.edu/~acoates/stl10/",
    licence="none stated (images from ImageNet); cite Coates, Lee, Ng 2011",
    parse=parse,
    archives=(
        Archive(
            "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
            "stl10_binary.tar.gz",
            "md5:91f7769df0f17e558f3565bffb0c7dfb",
        ),
    ),
    samples=13000,
)
