"""HAPT (Reyes-Ortiz et al. 2016): raw signals of a phone at the waist, 61 recordings of 30 subjects, with transitions.

Acceleration in g and angular velocity in rad/s at 50 Hz; 6 activities and 6 postural transitions; -1 where the original
has no label. Windows of 128 with step 64 inside labelled segments give the published 10929.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedquilt.data.archives import open_zip, refuse, table, zip_member
from fedquilt.data.dataset import Dataset
from fedquilt.data.source import Archive, Source

LABELS = (
    "WALKING",
    "WALKING_UPSTAIRS",
    "WALKING_DOWNSTAIRS",
    "SITTING",
    "STANDING",
    "LAYING",
    "STAND_TO_SIT",
    "SIT_TO_STAND",
    "SIT_TO_LIE",
    "LIE_TO_SIT",
    "STAND_TO_LIE",
    "LIE_TO_STAND",
)
CHANNELS = tuple(f"{sensor}_{axis}" for sensor in ("acc", "gyro") for axis in "xyz")
_FILE = re.compile(r"(?:^|/)RawData/acc_exp(\d+)_user(\d+)\.txt$")


def parse(archive: Path) -> Dataset:
    """The data set from UCI's zip: one file a sensor and recording, and `labels.txt` with the labelled stretches."""
    signals, subjects, recordings, labels = [], [], [], []
    with open_zip(archive) as files:
        name = zip_member(archive, files, "RawData/labels.txt")
        marks = table(archive, name, files.read(name)).astype(np.int64)
        if marks.shape[1] != 5 or marks[:, 2].min() < 1 or marks[:, 2].max() > len(LABELS):
            raise refuse(archive, f"'{name}' is not rows of experiment, user, activity (1 to 12), start, end")
        found = [match for match in map(_FILE.search, files.namelist()) if match]
        for match in sorted(found, key=lambda m: int(m[1])):
            experiment, user = int(match[1]), int(match[2])
            other = match.string.replace("/acc_exp", "/gyro_exp")
            if other not in files.namelist():
                raise refuse(archive, f"it has no member '{other}'")
            acc, gyro = (table(archive, member, files.read(member)) for member in (match.string, other))
            if acc.shape != gyro.shape or acc.shape[1] != 3:
                raise refuse(archive, f"'{match.string}' {acc.shape} and '{other}' {gyro.shape} do not go together")
            y = np.full(len(acc), -1, dtype=np.int64)
            for _, _, activity, start, end in marks[(marks[:, 0] == experiment) & (marks[:, 1] == user)]:
                if not 1 <= start <= end <= len(y):
                    raise refuse(archive, f"recording {experiment} has a label from {start} to {end} of {len(y)}")
                y[start - 1 : end] = activity - 1  # the original counts readings from 1 and means the end inclusively
            signals.append(np.hstack([acc, gyro]).astype(np.float32))
            labels.append(y)
            subjects.append(np.full(len(y), user, dtype=np.int64))
            recordings.append(np.full(len(y), experiment, dtype=np.int64))
    if not signals:
        raise refuse(archive, "it has no recordings under RawData/")
    return Dataset(
        "hapt",
        np.concatenate(signals),
        np.concatenate(labels),
        LABELS,
        kind="stream",
        subject=np.concatenate(subjects),
        recording=np.concatenate(recordings),
        channels=CHANNELS,
        rate=50,
    )


SOURCE = Source(
    name="hapt",
    title="Smartphone-based recognition of human activities and postural transitions, raw signals",
    homepage="https://archive.ics.uci.edu/dataset/341/smartphone+based+recognition+of+human+activities+and+postural+transitions",
    licence="CC BY 4.0 at UCI; its readme forbids commercial use; cite Reyes-Ortiz et al. 2016",
    parse=parse,
    archives=(
        Archive(
            "https://archive.ics.uci.edu/static/public/341/"
            "smartphone+based+recognition+of+human+activities+and+postural+transitions.zip",
            "smartphone+based+recognition+of+human+activities+and+postural+transitions.zip",
        ),
    ),
    kind="stream",
    channels=CHANNELS,
    rate=50,
    samples=1122772,
)
