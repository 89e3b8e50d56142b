"""Samples of a user's own as arrays: from arrays, a data frame, a csv or npz file, a folder of them, a torch Dataset.

Labels may be any texts or numbers. They are numbered in their sorted order, and keep their names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.data.npz import NotArrays, read_arrays
from fedquilt.data.tables import Read, Table, columns_of, samples_of, stacked

_MOST = 2**53  # from here on floats are no whole numbers one by one
_PEAK = 255  # of an image of bytes

_PLAIN = Table()


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples x (n, ...), their labels (n,) as numbers with names, or other targets (n, ...), and whose each is (n,),
    where that is known."""

    x: NDArray[Any]
    y: NDArray[Any]
    label_names: tuple[str, ...]
    client: NDArray[np.str_] | None = None
    columns: tuple[str, ...] = ()  # what the numbers of a sample are, where it was a row of a table

    def __len__(self) -> int:
        return len(self.y)


def read_samples(source: Any, table: Table = _PLAIN, client: Any = None, classes: bool | None = None) -> Samples:
    """Samples of any kind of source; `classes` says whether targets are labels, None: unless some are not whole.

    `table` says how a table is read, `client` names its column that says whose a sample is; beside arrays it is an
    array of that itself. In a folder every csv or npz file is a client of the file's name.

    >>> s = read_samples(([[0.5], [1.5], [2.5]], ["cat", "dog", "cat"]), client=[7, 7, 9])
    >>> s.y.tolist(), s.label_names, s.client.tolist()
    ([0, 1, 0], ('cat', 'dog'), ['7', '7', '9'])
    """
    x, labels, whose, columns = _read(source, table, client)
    x, labels = np.asarray(x), np.asarray(labels)
    if classes is None:
        classes = not (labels.dtype.kind == "f" and bool((labels != labels.round()).any()))
    if (labels.ndim != 1 and classes) or labels.ndim == 0 or x.ndim == 0 or len(x) != len(labels) or not len(labels):
        raise ValueError(
            f"samples of shape {x.shape} do not go with labels of shape {labels.shape}; give (n, ...) samples and (n,) "
            "labels, at least one, or say task='regression' or 'multilabel' where a sample has several targets"
        )
    if whose is not None and np.shape(whose) != labels.shape[:1]:
        raise ValueError(f"there are {len(labels)} samples, but clients of shape {np.shape(whose)}; give one a sample")
    y, names = numbered(labels) if classes else (_targets(labels), ())
    told = None if whose is None else np.array([str(_plain(who)) for who in whose])
    _tell_lookalikes(names, "labels")
    _tell_lookalikes(() if told is None else np.unique(told).tolist(), "clients")
    return Samples(_inputs(x), y, names, told, columns)


def _tell_lookalikes(names: Iterable[str], what: str) -> None:
    """Warn of names that people would take for one: 'North' and 'north'."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            warnings.warn(
                f"the {what} '{other}' and '{name}' differ by capitals or spaces alone, and are taken for two; if they "
                "are one, write them alike",
                stacklevel=4,
            )


def _targets(values: NDArray[Any]) -> NDArray[Any]:
    """Targets that are no classes: finite numbers."""
    if values.dtype.kind not in "iufb" or not np.isfinite(values).all():
        raise ValueError("targets that are no classes are finite numbers; leave samples without a target out")
    return values


def numbered(labels: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels as numbers from 0 up and their names; whole numbers from 0 up stay as they are.

    >>> numbered(np.array([10, 30, 30]))[0].tolist(), numbered(np.array([0, 2]))
    ([10, 30, 30], (array([0, 2]), ()))
    """
    if labels.dtype.kind == "f":
        if not np.isfinite(labels).all():
            raise ValueError("labels hold NaN or infinite values; leave samples without a label out")
        if not (labels == labels.round()).all():
            raise ValueError(
                f"labels are classes, but one is {float(labels[labels != labels.round()][0]):g}; say "
                "task='regression' if numbers are to be predicted"
            )
        if float(np.abs(labels).max(initial=0)) >= _MOST:
            raise ValueError(f"labels are classes, but one is {float(np.abs(labels).max()):g}; number them from 0 up")
        labels = labels.astype(np.int64)
    if labels.dtype.kind in "iu" and int(labels.min()) >= 0:
        return labels.astype(np.int64), ()
    told = np.array([str(_plain(label)) for label in labels])
    names, y = np.unique(told, return_inverse=True)
    if names[0] == "" or "nan" in names:
        raise ValueError("some samples have no label; leave such samples out")
    return y.astype(np.int64), tuple(str(name) for name in names)


def _read(source: Any, table: Table, client: Any) -> Read:
    """Samples, labels and clients of a source."""
    if isinstance(source, str | Path):
        return _from_path(Path(source), table, client)
    if isinstance(source, tuple | list) and len(source) == 2:
        return _array(source[0]), _array(source[1]), client, ()
    if _is_table(source):
        return samples_of(columns_from(source), table, client, "the table")
    if hasattr(source, "features") and hasattr(source, "column_names"):  # of Hugging Face
        columns = {str(name): np.asarray(source[name]) for name in source.column_names}
        label = table.label if isinstance(table.label, str) else ""
        names = getattr(source.features.get(label), "names", None)
        if names is not None and label in columns:
            columns[label] = np.asarray(names)[columns[label]]
        return samples_of(columns, table, client, "the data set")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):  # a torch Dataset
        try:
            pairs = [source[at] for at in range(len(source))]
            return np.stack([_array(x) for x, _ in pairs]), np.array([_target(y) for _, y in pairs]), client, ()
        except (TypeError, ValueError) as error:
            raise TypeError(f"a data set gives a pair (sample, label) for every number, all alike ({error})") from None
    raise TypeError(
        f"a {type(source).__name__} is no source of samples; give a pair (samples, labels), a data frame, a csv or npz "
        "file, a folder of them, or a torch Dataset"
    )


def columns_from(source: Any) -> dict[str, NDArray[Any]]:
    """The columns of a csv file, a data frame or a dict of columns.

    >>> columns_from({"age": [41, 57]})
    {'age': array([41, 57])}
    """
    if isinstance(source, str | Path):
        if not Path(source).is_file():
            raise FileNotFoundError(f"there is no file '{source}'")
        return columns_of(Path(source))[0]
    if not _is_table(source):
        raise TypeError(f"a {type(source).__name__} is no table; give a csv file, a data frame or a dict of columns")
    names = source if isinstance(source, Mapping) else source.columns
    columns = {str(name): _array(source[name]) for name in names}
    if len({values.shape[:1] for values in columns.values()}) != 1:
        told = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
        raise ValueError(f"columns have unlike lengths: {told or 'there are none'}")
    return columns


def _is_table(source: Any) -> bool:
    """Whether a source is columns by their names: a dict, or a data frame of pandas or of others."""
    return isinstance(source, Mapping) or (hasattr(source, "columns") and hasattr(source, "to_numpy"))


def _from_path(path: Path, table: Table, client: Any) -> Read:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in (".csv", ".npz"))
        if not files:
            raise FileNotFoundError(f"there is no csv or npz file in '{path}'; each would be a client")
        if client is not None:
            raise ValueError(f"in the folder '{path}' every file is a client; leave client={client!r} out")
        if all(file.suffix.lower() == ".csv" for file in files):  # one table: a value has one column for all clients
            columns, lengths = stacked([columns_of(file)[0] for file in files], path)
            x, y, _, names = samples_of(columns, table, None, f"'{path}'")
            return x, y, np.repeat([file.stem for file in files], lengths), names
        parts = [_from_path(file, table, None) for file in files]
        shapes = {np.shape(x)[1:] for x, *_ in parts}
        if len(shapes) > 1:
            raise ValueError(f"the files of '{path}' have samples of shapes {sorted(shapes)}; they must be alike")
        whose = np.repeat([file.stem for file in files], [len(y) for _, y, *_ in parts])
        return np.concatenate([x for x, *_ in parts]), np.concatenate([y for _, y, *_ in parts]), whose, ()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file or folder '{path}'")
    if path.suffix.lower() == ".npz":
        return _from_npz(path, client)
    if path.suffix.lower() == ".csv":
        columns, lines = columns_of(path)
        return samples_of(columns, table, client, f"'{path}'", lines)
    raise ValueError(f"'{path}' is neither a csv nor an npz file, nor a folder of them")


def _from_npz(path: Path, client: Any) -> Read:
    try:
        arrays = read_arrays(path)
    except NotArrays as error:
        raise ValueError(f"'{path}' cannot be read: {error}") from error
    key = "client" if client is None else str(client)
    for name in ("x", "y", *([] if client is None else [key])):
        if name not in arrays:
            raise ValueError(f"'{path}' has no array '{name}'; it has {', '.join(arrays) or 'none'}")
    return arrays["x"], arrays["y"], arrays.get(key), ()


def _inputs(x: NDArray[Any]) -> NDArray[Any]:
    """What a model is fed: images of bytes as float32 in [0, 1], channel first; other numbers as they are."""
    if x.dtype.kind not in "iufb":
        raise TypeError(f"samples must be numbers, not {x.dtype}; give arrays of one shape")
    if x.dtype != np.uint8 or x.ndim < 3:
        return x
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = np.moveaxis(x, 3, 1)
    return (x / np.float32(_PEAK)).astype(np.float32)


def _array(values: Any) -> NDArray[Any]:
    return np.asarray(values.numpy(force=True) if hasattr(values, "numpy") else values)


def _target(value: Any) -> Any:
    """A target as numpy can stack it."""
    return _array(value) if hasattr(value, "ndim") and value.ndim else _plain(value)


def _plain(value: Any) -> Any:
    """A number or text as Python's own."""
    return value.item() if hasattr(value, "item") else value
