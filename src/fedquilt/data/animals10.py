"""Animals-10 (Corrado Alessio): about 26000 colour photographs of ten animals, found by image search.

`animals10` is the whole set, centre-cropped and scaled to 64 x 64. `animals4` is cat, dog, sheep and elephant, 1400
each, 48 x 48, for the score-sharing scenario (its paper used 128 x 128). `parse` makes other sizes and label sets.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fedquilt.data.archives import open_zip, refuse
from fedquilt.data.dataset import Dataset
from fedquilt.data.pictures import opened, pillow
from fedquilt.data.source import Archive, Source

FOLDERS = {
    "dog": "cane",
    "horse": "cavallo",
    "elephant": "elefante",
    "butterfly": "farfalla",
    "chicken": "gallina",
    "cat": "gatto",
    "cow": "mucca",
    "sheep": "pecora",
    "spider": "ragno",
    "squirrel": "scoiattolo",
}


def parse(
    archive: Path,
    size: int = 64,
    labels: Sequence[str] = tuple(FOLDERS),
    per_label: int | None = None,
    name: str = "animals10",
) -> Dataset:
    """The data set from Kaggle's zip; `per_label` takes that many of each label at random, always the same ones."""
    image_module = pillow(name)
    rng = np.random.default_rng(0)
    images, y = [], []
    with open_zip(archive) as files:
        for number, label in enumerate(labels):
            pattern = re.compile(rf"(?:^|/)raw-img/{FOLDERS[label]}/[^/]+\.(?:jpe?g|png)$", re.IGNORECASE)
            members = sorted(n for n in files.namelist() if pattern.search(n) and "__MACOSX" not in n)
            if len(members) < (per_label or 1):
                wanted = f"{per_label or 1} of '{label}' in raw-img/{FOLDERS[label]}"
                raise refuse(archive, f"it has {len(members)} photographs, not {wanted}")
            if per_label is not None:
                members = [members[i] for i in np.sort(rng.choice(len(members), per_label, replace=False))]
            for member in members:
                with opened(archive, member, io.BytesIO(files.read(member))) as picture:
                    side = min(picture.size)
                    left, top = (picture.width - side) // 2, (picture.height - side) // 2
                    middle = picture.convert("RGB").crop((left, top, left + side, top + side))
                    small = middle.resize((size, size), image_module.Resampling.BILINEAR)
                images.append(np.asarray(small, dtype=np.uint8))
                y.append(number)
    return Dataset(name, np.stack(images), np.array(y, dtype=np.int64), tuple(labels))


_ARCHIVE = Archive("https://www.kaggle.com/api/v1/datasets/download/alessiocorrado99/animals10", "animals10.zip")
_HOME = "https://www.kaggle.com/datasets/alessiocorrado99/animals10"
_LICENCE = "GPL 2 as stated there; the photographs were found by image search"

SOURCE = Source("animals10", "Animals-10, 64 x 64", _HOME, _LICENCE, parse, (_ARCHIVE,))

FOUR = Source(
    name="animals4",
    title="Animals-10: cat, dog, sheep, elephant, 48 x 48",
    homepage=_HOME,
    licence=_LICENCE,
    parse=partial(parse, size=48, labels=("cat", "dog", "sheep", "elephant"), per_label=1400, name="animals4"),
    archives=(_ARCHIVE,),
    samples=5600,
)
