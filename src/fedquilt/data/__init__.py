"""Data sets as plain arrays, with labels, subjects and time order; see `load`, `available` and `get`.

>>> from fedquilt import data
>>> digits = data.load("digits")
>>> digits.images(slice(0, 2)).shape
(2, 1, 8, 8)
"""

from fedquilt.data.cache import data_folder
from fedquilt.data.dataset import Dataset
from fedquilt.data.dirichlet import dirichlet, pachinko
from fedquilt.data.errors import DataDamaged, DataError, DataMissing
from fedquilt.data.partition import Partition, by_label_sets, by_subject, iid, quantity_skew, specialists
from fedquilt.data.registry import SOURCES, Listing, available, get, load
from fedquilt.data.source import Archive, Source
from fedquilt.data.splits import random_split, time_split
from fedquilt.data.windows import (
    Standardiser,
    choose_channels,
    cut_windows,
    resample,
    resample_signal,
    segments,
    sliding,
)

__all__ = [
    "SOURCES",
    "Archive",
    "DataDamaged",
    "DataError",
    "DataMissing",
    "Dataset",
    "Listing",
    "Partition",
    "Source",
    "Standardiser",
    "available",
    "by_label_sets",
    "by_subject",
    "choose_channels",
    "cut_windows",
    "data_folder",
    "dirichlet",
    "get",
    "iid",
    "load",
    "pachinko",
    "quantity_skew",
    "random_split",
    "resample",
    "resample_signal",
    "segments",
    "sliding",
    "specialists",
    "time_split",
]
