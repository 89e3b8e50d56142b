"""Handwritten digits, 8 x 8, bundled with scikit-learn: the data set that needs no download."""

from __future__ import annotations

import numpy as np

from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Source


def parse() -> Dataset:
    """The 1797 digits; grey values run from 0 to 16."""
    from sklearn.datasets import load_digits

    bundled = load_digits()
    names = tuple(str(digit) for digit in range(10))
    x = bundled.images.astype(np.uint8)
    return Dataset("digits", x, bundled.target.astype(np.int64), names, peak=16)


SOURCE = Source(
    name="digits",
    title="Optical recognition of handwritten digits (test part)",
    homepage="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
    licence="CC BY 4.0; bundled with scikit-learn",
    parse=parse,
    samples=1797,
)
