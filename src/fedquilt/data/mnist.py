"""MNIST (LeCun, Cortes, Burges): 60000 + 10000 handwritten digits, 28 x 28, four gzipped IDX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedquilt.data.archives import idx, refuse
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source


def parse(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Dataset:
    """The data set from its four files."""
    halves = []
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        x, marks = idx(images, images.read_bytes()), idx(labels, labels.read_bytes())
        if x.ndim != 3 or x.shape[1:] != (28, 28):
            raise refuse(images, f"it holds an array of shape {x.shape}, not images of 28 x 28")
        if marks.shape != (len(x),) or marks.max(initial=0) > 9:
            raise refuse(labels, f"its labels do not go with the {len(x)} images of {images.name}")
        halves.append((x, marks))
    (x_train, y_train), (x_test, y_test) = halves
    y = np.concatenate([y_train, y_test]).astype(np.int64)
    return Dataset(
        "mnist",
        np.concatenate([x_train, x_test]),
        y,
        tuple(str(digit) for digit in range(10)),
        is_test=np.arange(len(y)) >= len(y_train),
    )


_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # PyTorch's mirror: the original server refuses downloads
_SUMS = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}

SOURCE = Source(
    name="mnist",
    title="MNIST handwritten digits",
    homepage="http://yann.lecun.com/exdb/mnist/",
    licence="CC BY-SA 3.0",
    parse=parse,
    archives=tuple(Archive(_MIRROR + file, file, checksum) for file, checksum in _SUMS.items()),
    samples=70000,
)
