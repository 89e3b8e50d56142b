"""EMNIST (Cohen et al. 2017), the "by class" split: 814255 digits and letters, 28 x 28, 62 classes.

By class, not balanced: FedEM and FedMN train on all 62 classes. Images lie transposed in the official files and are
turned upright here.
"""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np

from fedquilt.data.archives import idx, open_zip, refuse, zip_member
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

LABELS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


def parse(archive: Path) -> Dataset:
    """The data set from `gzip.zip`, which holds gzipped IDX files."""
    images, labels = [], []
    with open_zip(archive) as files:
        for half in ("train", "test"):
            stem = f"emnist-byclass-{half}"
            names = [
                zip_member(archive, files, f"{stem}-{end}") for end in ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
            ]
            x, y = (idx(archive, files.read(name), name) for name in names)
            if x.ndim != 3 or x.shape[1:] != (28, 28) or y.shape != (len(x),):
                raise refuse(archive, f"its {half} images {x.shape} and labels {y.shape} do not go together")
            if len(y) and y.max() >= len(LABELS):
                raise refuse(archive, f"it holds label {y.max()}, the split by class has labels 0 to 61")
            images.append(x.transpose(0, 2, 1))
            labels.append(y)
    y_all = np.concatenate(labels).astype(np.int64)
    return Dataset("emnist", np.concatenate(images), y_all, LABELS, is_test=np.arange(len(y_all)) >= len(labels[0]))


SOURCE = Source(
    name="emnist",
    title="EMNIST by class",
    homepage="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    licence="public domain (work of the US government); cite Cohen et al. 2017",
    parse=parse,
    archives=(
        Archive(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "gzip.zip",
            "md5:58c8d27c78d21e728a6bc7b3cc06412e",
        ),
    ),
    samples=814255,
)
