"""CIFAR-100 (Krizhevsky 2009): 50000 + 10000 colour images, 32 x 32, a hundred classes in twenty super-classes.

`coarse` holds the super-class of each image, which the Pachinko partition needs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedquilt.data.archives import reading, refuse, tar_members
from fedquilt.data.cifar10 import records
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

_FILES = [
    f"cifar-100-binary/{name}" for name in ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt")
]


def parse(archive: Path) -> Dataset:
    """The data set from `cifar-100-binary.tar.gz`: each record is a coarse label, a fine label and the image."""
    members = tar_members(archive, _FILES)
    with reading(archive):
        fine, coarse = (tuple(members[name].decode("ascii").split()) for name in _FILES[2:])
    parts = [records(archive, name, members.pop(name), label_bytes=2) for name in _FILES[:2]]
    labels = np.concatenate([rows for rows, _ in parts]).astype(np.int64)
    if labels[:, 0].max() >= len(coarse) or labels[:, 1].max() >= len(fine):
        raise refuse(archive, f"it holds labels beyond its {len(coarse)} coarse and {len(fine)} fine names")
    return Dataset(
        "cifar100",
        np.concatenate([images for _, images in parts]),
        labels[:, 1],
        fine,
        coarse=labels[:, 0],
        coarse_names=coarse,
        is_test=np.arange(len(labels)) >= len(parts[0][0]),
    )


SOURCE = Source(
    name="cifar100",
    title="CIFAR-100",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    licence="none stated; cite Krizhevsky 2009",
    parse=parse,
    archives=(
        Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "cifar-100-binary.tar.gz",
            "md5:03b5dce01913d631647c71ecec9e9cb8",
        ),
    ),
    samples=60000,
)
