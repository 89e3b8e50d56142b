"""The library's own cache: one `<name>.npz` a data set, plain arrays, written atomically."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt._util.files import written_whole
from fedquilt.data.dataset import PER_SAMPLE, Dataset
from fedquilt.data.errors import DataDamaged, DataError
from fedquilt.data.npz import read_arrays
from fedquilt.data.source import Source

_NAMES = ("label_names", "coarse_names")
_RANKS = {"images": (3, 4), "windows": (3,), "stream": (2,)}


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the caches: the argument, else FEDQUILT_DATA, else the user's cache folder.

    >>> data_folder("here").name
    'here'
    """
    if data_dir is not None:
        return Path(data_dir).expanduser()
    if os.environ.get("FEDQUILT_DATA"):
        return Path(os.environ["FEDQUILT_DATA"]).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "fedquilt"


def read(path: Path, source: Source) -> Dataset:
    """A data set from its cache; halves called `x_train`, `x_test` are joined and told apart by `is_test`."""
    try:
        stored = read_arrays(path)
        arrays = _joined(stored)
    except PermissionError as error:
        raise DataError(f"the cache {path} cannot be read: {error}") from error
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    except KeyError as error:
        raise _damaged(path, f"it lacks {error}") from error
    odd = [key for key in _NAMES if key in stored and stored[key].ndim != 1]
    if odd:
        raise _damaged(path, f"{odd[0]} is not a list of names")
    names = {key: tuple(str(n) for n in stored[key]) for key in _NAMES if key in stored}
    if not {"x", "y"} <= set(arrays) or "label_names" not in names:
        raise _damaged(path, "it lacks x, y or label_names")
    x = arrays.pop("x")
    if x.ndim not in _RANKS[source.kind] or x.dtype.kind not in ("ui" if source.kind == "images" else "f"):
        raise _damaged(path, f"x is {x.ndim}-dimensional {x.dtype}, which is not what '{source.name}' holds")
    if source.kind != "images":
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise _damaged(path, "x holds values that are not finite")
    if not len(x):
        raise _damaged(path, "it holds no samples")
    for key, values in arrays.items():
        if values.dtype.kind not in "iub" and not (values.dtype.kind == "f" and (values == np.rint(values)).all()):
            raise _damaged(path, f"{key} holds {values.dtype} where whole numbers belong")
        arrays[key] = values.astype(np.bool_ if key == "is_test" else np.int64)
    try:
        more: dict[str, Any] = {**arrays, **names}
        dataset = Dataset(source.name, x, kind=source.kind, channels=source.channels, rate=source.rate, **more)
    except (ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    return source.complete(dataset) if source.complete else dataset


def _joined(stored: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    if "x_train" not in stored:
        return {key: stored[key] for key in PER_SAMPLE if key in stored}
    out: dict[str, NDArray[Any]] = {}
    for key in PER_SAMPLE:
        if f"{key}_train" in stored:
            out[key] = np.concatenate([stored[f"{key}_train"], stored[f"{key}_test"]])
    out["is_test"] = np.arange(len(out["y"])) >= len(stored["y_train"])
    return out


def _damaged(path: Path, why: str) -> DataDamaged:
    return DataDamaged(f"the cache {path} is not usable: {why}; delete it, and it will be made again")


def write(path: Path, dataset: Dataset) -> None:
    """Write a cache in one step: a reader sees the old file or the new one, never half of it."""
    arrays: dict[str, Any] = {"label_names": np.array(dataset.label_names)}
    if dataset.coarse_names:
        arrays["coarse_names"] = np.array(dataset.coarse_names)
    test = np.zeros(len(dataset), dtype=np.bool_) if dataset.is_test is None else dataset.is_test
    halves = dataset.is_test is not None and bool((test[1:] >= test[:-1]).all())  # all of train before all of test
    for key in PER_SAMPLE:
        values = getattr(dataset, key)
        if values is None or (key == "is_test" and halves):
            continue
        values = values if key == "x" else _narrow(values)
        if halves:
            arrays[f"{key}_train"], arrays[f"{key}_test"] = values[~test], values[test]
        else:
            arrays[key] = values
    with written_whole(path, by_many=True) as new, new.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """The smallest integer type that holds these values: labels of a million readings need not be eight bytes each."""
    if values.dtype.kind == "b" or not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    for kind in (np.uint8, np.int8, np.uint16, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return values.astype(kind)
    return values
