"""RealWorld HAR (Sztyler, Stuckenschmidt 2016): the device at the waist, 15 subjects, eight activities, 50 Hz.

Acceleration in m/s2 and angular velocity in rad/s come in separate files with their own clocks; both are brought to one
grid of 20 ms by linear interpolation where both exist. A gap of more than 0.2 s in either ends a recording. Some
activities were recorded in parts, some of them as zips within zips; a part that lacks one of the sensors is left out.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedquilt.data.archives import open_zip, refuse, table
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

LABELS = ("climbingdown", "climbingup", "jumping", "lying", "running", "sitting", "standing", "walking")
CHANNELS = tuple(f"{sensor}_{axis}" for sensor in ("acc", "gyro") for axis in "xyz")
_OUTER = re.compile(rf"(?:^|/)proband(\d+)/data/(?:acc|gyr)_({'|'.join(LABELS)})_csv\.zip$")
_INNER = re.compile(rf"(?:^|/)(acc|Gyroscope)_({'|'.join(LABELS)})(?:_(\d+))?_waist\.csv$")
_HEADER = b"id,attr_time,attr_x,attr_y,attr_z"
_STEP, _GAP = 20.0, 200.0  # milliseconds


def _csvs(path: Path, archive: zipfile.ZipFile, depth: int = 0) -> Iterator[tuple[re.Match[str], bytes]]:
    """The waist's files of one activity; three activities of three subjects are zips within the zip."""
    for name in sorted(archive.namelist()):
        if "__MACOSX" in name:
            continue
        match = _INNER.search(name)
        if match:
            yield match, archive.read(name)
        elif name.endswith(".zip") and depth < 2:
            with open_zip(path, archive.read(name)) as inner:
                yield from _csvs(path, inner, depth + 1)


def _readings(path: Path, name: str, content: bytes) -> NDArray[np.float64]:
    """Time in milliseconds, strictly rising, and three axes: (readings, 4)."""
    if not content.startswith(_HEADER):
        raise refuse(path, f"'{name}' does not begin with {_HEADER.decode()}")
    rows = table(path, name, content, delimiter=",", skiprows=1)
    if rows.shape[1] != 5:
        raise refuse(path, f"'{name}' has {rows.shape[1]} columns, not 5")
    rows = rows[np.argsort(rows[:, 1], kind="stable"), 1:]
    rising: NDArray[np.float64] = rows[np.concatenate([[True], np.diff(rows[:, 0]) > 0])]
    return rising


def aligned(acc: NDArray[np.float64], gyro: NDArray[np.float64]) -> Iterator[NDArray[np.float32]]:
    """Two sensors on one clock: pieces (readings, 6) at 50 Hz, broken at gaps.

    >>> import numpy as np
    >>> clock = np.arange(0, 100, 20.0)[:, None] * [1, 0, 0, 1]
    >>> [piece.shape for piece in aligned(clock, clock)]
    [(5, 6)]
    """
    begin, end = max(acc[0, 0], gyro[0, 0]), min(acc[-1, 0], gyro[-1, 0])
    holes = [(s[at, 0], s[at + 1, 0]) for s in (acc, gyro) for at in np.flatnonzero(np.diff(s[:, 0]) > _GAP)]
    marks = sorted({begin, end, *(edge for hole in holes for edge in hole if begin < edge < end)})
    for a, b in pairwise(marks):
        if a >= end or any(left < (a + b) / 2 < right for left, right in holes):
            continue
        grid = np.arange(a, b + 1e-9, _STEP)
        columns = [np.interp(grid, s[:, 0], s[:, axis]) for s in (acc, gyro) for axis in (1, 2, 3)]
        yield np.stack(columns, axis=1).astype(np.float32)


def parse(archive: Path) -> Dataset:
    """The data set from `realworld2016_dataset.zip`: a zip of zips, one a subject, activity and sensor."""
    parts: dict[tuple[int, int, int], dict[str, NDArray[np.float64]]] = {}
    with open_zip(archive) as files:
        for name in sorted(files.namelist()):
            match = _OUTER.search(name)
            if not match:
                continue
            with open_zip(archive, files.read(name)) as inner:
                for csv, content in _csvs(archive, inner):
                    key = (int(match[1]), LABELS.index(csv[2]), int(csv[3] or 1))
                    parts.setdefault(key, {})[csv[1]] = _readings(archive, f"{name}/{csv.string}", content)
    signals, labels, subjects = [], [], []
    for (subject, label, _), sensors in sorted(parts.items()):
        if len(sensors) == 2:
            for piece in aligned(sensors["acc"], sensors["Gyroscope"]):
                signals.append(piece)
                labels.append(label)
                subjects.append(subject)
    if not signals:
        raise refuse(archive, "it has no acceleration and gyroscope files of the waist under proband<n>/data/")
    lengths = [len(s) for s in signals]
    return Dataset(
        "realworld",
        np.concatenate(signals),
        np.repeat(np.array(labels, dtype=np.int64), lengths),
        LABELS,
        kind="stream",
        subject=np.repeat(np.array(subjects, dtype=np.int64), lengths),
        recording=np.repeat(np.arange(len(signals)), lengths),
        channels=CHANNELS,
        rate=50,
    )


SOURCE = Source(
    name="realworld",
    title="RealWorld human activity recognition, waist",
    homepage="https://www.uni-mannheim.de/dws/research/projects/activity-recognition/dataset/dataset-realworld/",
    licence="free for research; cite Sztyler, Stuckenschmidt 2016",
    parse=parse,
    archives=(
        Archive(
            "http://wifo5-14.informatik.uni-mannheim.de/sensor/dataset/realworld2016/realworld2016_dataset.zip",
            "realworld2016_dataset.zip",
        ),
    ),
    kind="stream",
    channels=CHANNELS,
    rate=50,
)
