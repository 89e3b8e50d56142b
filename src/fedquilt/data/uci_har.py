"""UCI HAR (Anguita et al. 2013): inertial signals of a phone at the waist, 30 subjects, six activities.

Windows of 2.56 s at 50 Hz that overlap by half, as published. `recording` numbers chains of windows in which each
begins where half of the one before it is over; neighbours in a chain must not straddle a split.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedquilt.data.archives import open_zip, refuse, table, zip_member
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

LABELS = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
CHANNELS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")


def chained(dataset: Dataset) -> Dataset:
    """Number the chains: a window whose first half is the second half of the row before it continues its recording."""
    if dataset.recording is not None:
        return dataset
    x = dataset.x
    half = x.shape[2] // 2
    follows = np.zeros(len(dataset), dtype=np.bool_)
    follows[1:] = (x[1:, :, :half] == x[:-1, :, half : 2 * half]).all(axis=(1, 2))
    if dataset.subject is not None:
        follows[1:] &= dataset.subject[1:] == dataset.subject[:-1]
    if dataset.is_test is not None:
        follows[1:] &= dataset.is_test[1:] == dataset.is_test[:-1]
    recording = np.cumsum(~follows) - 1
    rows = np.arange(len(dataset))
    first = np.maximum.accumulate(np.where(follows, 0, rows))
    return replace(dataset, recording=recording.astype(np.int64), time=((rows - first) * half).astype(np.int64))


def parse(archive: Path) -> Dataset:
    """The data set from UCI's zip, which holds the original `UCI HAR Dataset.zip`."""
    with open_zip(archive) as outer:
        inner = [n for n in outer.namelist() if n.endswith("UCI HAR Dataset.zip") and "__MACOSX" not in n]
        content = outer.read(inner[0]) if inner else None
    xs, ys, subjects = [], [], []
    with open_zip(archive, content) as files:

        def column(ending: str) -> NDArray[np.float64]:
            name = zip_member(archive, files, ending)
            return table(archive, name, files.read(name))

        for half in ("train", "test"):
            y, subject = column(f"{half}/y_{half}.txt"), column(f"{half}/subject_{half}.txt")
            signals = [column(f"{half}/Inertial Signals/{channel}_{half}.txt") for channel in CHANNELS]
            for channel, values in zip(CHANNELS, signals, strict=True):
                if values.shape != (len(y), 128):
                    raise refuse(archive, f"{channel}_{half}.txt is {values.shape}, not {len(y)} windows of 128")
            if len(subject) != len(y) or y.min() < 1 or y.max() > len(LABELS):
                raise refuse(archive, f"its {half} labels and subjects do not go together")
            xs.append(np.stack(signals, axis=1).astype(np.float32))  # (windows, channels, 128)
            ys.append(y[:, 0].astype(np.int64) - 1)
            subjects.append(subject[:, 0].astype(np.int64))
    y_all = np.concatenate(ys)
    return chained(
        Dataset(
            "uci_har",
            np.concatenate(xs),
            y_all,
            LABELS,
            kind="windows",
            subject=np.concatenate(subjects),
            is_test=np.arange(len(y_all)) >= len(ys[0]),
            channels=CHANNELS,
            rate=50,
        )
    )


SOURCE = Source(
    name="uci_har",
    title="UCI human activity recognition using smartphones, inertial signals",
    homepage="https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones",
    licence="CC BY 4.0 at UCI; its readme forbids commercial use; cite Anguita et al., ESANN 2013",
    parse=parse,
    archives=(
        Archive(
            "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip",
            "human+activity+recognition+using+smartphones.zip",
        ),
    ),
    kind="windows",
    channels=CHANNELS,
    rate=50,
    samples=10299,
    complete=chained,
)
