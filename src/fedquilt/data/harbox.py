"""HARBox (Ouyang et al. 2021, ClusterFL): nine-axis signals of 121 users' own phones, five daily activities.

Windows of 2 s at 50 Hz, as published. One text file a user and activity; 100 rows a window; a row is a time stamp and
the nine axes, in the order of the file. One recording a file.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedquilt.data.archives import open_zip, refuse, table
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

LABELS = ("Call", "Hop", "typing", "Walk", "Wave")
CHANNELS = tuple(f"imu_{n}" for n in range(1, 10))
_LENGTH = 100
_FILE = re.compile(rf"(?:^|/)(\d+)/({'|'.join(LABELS)})_train\.txt$")


def parse(archive: Path) -> Dataset:
    """The data set from `large_scale_HARBox.zip`."""
    xs, labels, subjects = [], [], []
    with open_zip(archive) as files:
        found = [m for m in map(_FILE.search, files.namelist()) if m and "__MACOSX" not in m.string]
        for match in sorted(found, key=lambda m: (int(m[1]), LABELS.index(m[2]))):
            rows = table(archive, match.string, files.read(match.string))
            if rows.shape[1] != 10 or len(rows) % _LENGTH:
                raise refuse(archive, f"'{match.string}' is {rows.shape}, not windows of {_LENGTH} rows of 10 columns")
            xs.append(rows[:, 1:].reshape(-1, _LENGTH, 9).transpose(0, 2, 1).astype(np.float32))  # (n, 9, 100)
            labels.append(LABELS.index(match[2]))
            subjects.append(int(match[1]))
    if not xs:
        raise refuse(archive, "it has no files <user>/<activity>_train.txt")
    lengths = [len(x) for x in xs]
    return Dataset(
        "harbox",
        np.concatenate(xs),
        np.repeat(np.array(labels, dtype=np.int64), lengths),
        LABELS,
        kind="windows",
        subject=np.repeat(np.array(subjects, dtype=np.int64), lengths),
        recording=np.repeat(np.arange(len(xs)), lengths),
        time=np.concatenate([np.arange(n) * _LENGTH for n in lengths]),
        channels=CHANNELS,
        rate=50,
    )


SOURCE = Source(
    name="harbox",
    title="HARBox, large scale",
    homepage="https://github.com/xmouyang/FL-Datasets-for-HAR",
    licence="MIT; cite Ouyang et al., MobiSys 2021",
    parse=parse,
    archives=(
        Archive(
            "https://media.githubusercontent.com/media/xmouyang/FL-Datasets-for-HAR/main/datasets/HARBox/large_scale_HARBox.zip",
            "large_scale_HARBox.zip",
            # the checksum by which the repository itself refers to the file (Git LFS)
            "sha256:4fdf91e26f698e2b5e349be2af08fb41a5ccd86e2254b4bd3b81eaf77959d12f",
        ),
    ),
    kind="windows",
    channels=CHANNELS,
    rate=50,
)
