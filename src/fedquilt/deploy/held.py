"""The samples that everybody holds, as a file: the server has all their forms, a device its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.families.common import ByTrait, Common, as_common

_TRAIT, _FORM = "trait", "x/"


def write_common(path: Path, samples: Common) -> None:
    """Arrays x and y; in several forms, the name of the trait and an x for each of its values."""
    arrays: dict[str, Any] = {"y": samples.y.numpy()}
    if isinstance(samples, ByTrait):
        arrays |= {_TRAIT: samples.trait} | {_FORM + value: form.x.numpy() for value, form in samples.forms.items()}
    else:
        arrays["x"] = samples.x.numpy()
    with path.open("wb") as file:
        np.savez(file, **arrays)


def read_common(path: Path) -> Common:
    """The samples that `write_common` wrote."""
    whose = f"the samples in {path.name}"
    with np.load(path, allow_pickle=False) as arrays:
        if _TRAIT not in arrays:
            return as_common((arrays["x"], arrays["y"]), whose)
        forms = {name.removeprefix(_FORM): (arrays[name], arrays["y"]) for name in arrays if name.startswith(_FORM)}
        return as_common({str(arrays[_TRAIT]): forms}, whose)
