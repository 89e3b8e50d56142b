"""FEMNIST (Caldas et al. 2018, LEAF): digits and letters of NIST Special Database 19, 28 x 28, with their writers.

LEAF's recipe: `by_write.zip` says who wrote an image, `by_class.zip` what it shows; the two are matched by the checksum
of the image file. Images are scaled from 128 x 128 with a Lanczos filter; ink is dark on white, as in LEAF. `subject`
numbers the writers in the order of their folder names.
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path

import numpy as np

from fedquilt.data.archives import open_zip, refuse
from fedquilt.data.dataset import Dataset
from fedquilt.data.emnist import LABELS
from fedquilt.data.pictures import opened, pillow
from fedquilt.data.source import Archive, Source

_CLASS = re.compile(r"(?:^|/)by_class/([0-9a-f]{2})/hsf_[0-9]/[^/]+\.png$")
_WRITE = re.compile(r"(?:^|/)by_write/[^/]+/([^/]+)/[^/]+/[^/]+\.png$")


def label_of(folder: str) -> int:
    """Label of a class folder, which is named by the character's code in hexadecimal.

    >>> label_of("39"), label_of("41"), label_of("7a")
    (9, 10, 61)
    """
    return LABELS.index(chr(int(folder, 16)))


def parse(by_class: Path, by_write: Path) -> Dataset:
    """The data set from the two archives of NIST Special Database 19."""
    image_module = pillow("femnist")
    shown: dict[bytes, int] = {}
    with open_zip(by_class) as files:
        for name in sorted(files.namelist()):
            match = _CLASS.search(name)
            if match and chr(int(match[1], 16)) in LABELS:
                shown.setdefault(hashlib.md5(files.read(name), usedforsecurity=False).digest(), label_of(match[1]))
    if not shown:
        raise refuse(by_class, "it has no images under by_class/<code>/hsf_<n>/")
    images, labels, writers = [], [], []
    with open_zip(by_write) as files:
        for name in sorted(files.namelist()):
            match = _WRITE.search(name)
            if not match:
                continue
            content = files.read(name)
            label = shown.get(hashlib.md5(content, usedforsecurity=False).digest())
            if label is None:
                raise refuse(by_write, f"its image '{name}' is not in {by_class.name}")
            with opened(by_write, name, io.BytesIO(content)) as picture:
                grey = picture.convert("L").resize((28, 28), image_module.Resampling.LANCZOS)
            images.append(np.asarray(grey, dtype=np.uint8))
            labels.append(label)
            writers.append(match[1])
    if not images:
        raise refuse(by_write, "it has no images under by_write/<part>/<writer>/")
    subject = np.unique(np.array(writers), return_inverse=True)[1].astype(np.int64)
    return Dataset("femnist", np.stack(images), np.array(labels, dtype=np.int64), LABELS, subject=subject)


_NIST = "https://s3.amazonaws.com/nist-srd/SD19/"

SOURCE = Source(
    name="femnist",
    title="FEMNIST (LEAF), from NIST Special Database 19",
    homepage="https://www.nist.gov/srd/nist-special-database-19",
    licence="public domain (work of the US government); LEAF's recipe is BSD-2-Clause",
    parse=parse,
    archives=(
        Archive(_NIST + "by_class.zip", "by_class.zip", "md5:79572b1694a8506f2b722c7be54130c4"),
        Archive(_NIST + "by_write.zip", "by_write.zip", "md5:a29f21babf83db0bb28a2f77b2b456cb"),
    ),
)
