"""WISDM v1.1 (Kwapisz, Weiss, Moore 2010): raw acceleration of a phone in the trouser pocket, 36 subjects, 20 Hz.

About a million readings in m/s2, six activities. The official text file has a few dozen records that are cut off, run
together or lack a value; these are left out, as are readings with time 0, which are fillers. A file in which more than
one record in a thousand is broken is refused. A recording ends where the subject or the activity changes, where time
jumps by more than a second, or where it runs backwards.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedquilt.data.archives import reading, refuse, tar_members
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

LABELS = ("Walking", "Jogging", "Upstairs", "Downstairs", "Sitting", "Standing")
CHANNELS = ("acc_x", "acc_y", "acc_z")
_MEMBER = "WISDM_ar_v1.1/WISDM_ar_v1.1_raw.txt"
_NUMBER = r"(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
_RECORD = re.compile(rf"(\d+),({'|'.join(LABELS)}),(\d+),{_NUMBER},{_NUMBER},{_NUMBER},?")


def parse(archive: Path) -> Dataset:
    """The data set from `WISDM_ar_latest.tar.gz`: records `user,activity,nanoseconds,x,y,z;`."""
    with reading(archive):
        text = tar_members(archive, [_MEMBER])[_MEMBER].decode("ascii")
    subject, label, time, values, broken = [], [], [], [], 0
    number = {name: i for i, name in enumerate(LABELS)}
    for piece in text.replace("\n", ";").replace("\r", "").split(";"):
        if not piece.strip():
            continue
        match = _RECORD.fullmatch(piece.strip())
        if match is None:
            broken += 1
        elif match[3] != "0":
            subject.append(int(match[1]))
            label.append(number[match[2]])
            time.append(int(match[3]))
            values.append((float(match[4]), float(match[5]), float(match[6])))
    if not values or broken * 1000 > len(values):
        raise refuse(archive, f"'{_MEMBER}' has {len(values)} readings and {broken} broken records")
    who, y, when = np.array(subject), np.array(label), np.array(time, dtype=np.int64)
    gap = np.diff(when)
    new = (np.diff(who) != 0) | (np.diff(y) != 0) | (gap < 0) | (gap > 1_000_000_000)
    return Dataset(
        "wisdm",
        np.array(values, dtype=np.float32),
        y.astype(np.int64),
        LABELS,
        kind="stream",
        subject=who.astype(np.int64),
        recording=np.concatenate([[0], np.cumsum(new)]).astype(np.int64),
        channels=CHANNELS,
        rate=20,
    )


SOURCE = Source(
    name="wisdm",
    title="WISDM activity prediction v1.1, raw",
    homepage="https://www.cis.fordham.edu/wisdm/dataset.php",
    licence="free for research; cite Kwapisz, Weiss, Moore 2010",
    parse=parse,
    archives=(
        Archive(
            "https://www.cis.fordham.edu/wisdm/includes/datasets/latest/WISDM_ar_latest.tar.gz",
            "WISDM_ar_latest.tar.gz",
        ),
    ),
    kind="stream",
    channels=CHANNELS,
    rate=20,
)
