"""New rows of a table as samples: made as those were that a client's model was trained on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt._util.suggest import did_you_mean
from fedquilt.data.tables import Columns


def as_samples_were(table: Columns, made: Sequence[Mapping[str, Any]]) -> NDArray[np.float32]:
    """Rows (n, columns) as a client has its samples; `made` is the client's `columns`.

    >>> made = [{"name": "sex=f"}, {"name": "age", "filled_with": 50.0, "mean": 40.0, "deviation": 10.0}]
    >>> as_samples_were({"age": np.array([30.0, np.nan]), "sex": np.array(["f", "f"])}, made).tolist()
    [[1.0, -1.0], [1.0, 1.0]]
    """
    kinds: dict[str, NDArray[np.bool_]] = {}  # rows whose value of a column a model knows
    columns = []
    for column in made:
        name = str(column["name"])
        if name in table:
            values = _filled(name, table[name], column)
        else:
            source, kind = _kind(name, table)
            values = _equal(table[source], kind)
            kinds[source] = kinds.get(source, np.zeros(len(values), dtype=bool)) | values
        scale = np.float32(column.get("mean", 0.0)), np.float32(column.get("deviation", 1.0))
        columns.append((values.astype(np.float32) - scale[0]) / scale[1])
    for source, known in kinds.items():
        if not known.all():
            strange = table[source][int((~known).argmax())]
            warnings.warn(
                f"column '{source}' has '{strange}', which was in no row that the model was trained on; it is taken "
                "for none of the values that were",
                stacklevel=2,
            )
    return np.stack(columns, axis=1)


def _filled(name: str, values: NDArray[Any], column: Mapping[str, Any]) -> NDArray[Any]:
    if values.dtype.kind not in "iufb":
        raise ValueError(f"column '{name}' is no numbers in these rows, such as '{values[0]}'; the model knows numbers")
    values = values.astype(np.float64)
    gaps = np.isnan(values)
    if gaps.any() and "filled_with" not in column:
        raise ValueError(
            f"column '{name}' has gaps, and the model was trained without any; fill or leave out such rows"
        )
    return np.where(gaps, column.get("filled_with", 0.0), values)


def _kind(name: str, table: Columns) -> tuple[str, str]:
    """The column and the value that `column=value` is about; either may have a `=` of its own."""
    parts = name.split("=")
    for at in range(1, len(parts)):
        source = "=".join(parts[:at])
        if source in table:
            return source, "=".join(parts[at:])
    raise ValueError(f"{did_you_mean(parts[0], table, 'column')}, and the model looks at it")


def _equal(values: NDArray[Any], kind: str) -> NDArray[np.bool_]:
    """Which values are of a kind; 1 and 1.0 are the same, since a gap makes a column of whole numbers one of others."""
    if values.dtype.kind not in "iufb":
        return np.asarray([str(value) == kind for value in values], dtype=np.bool_)
    try:
        wanted = float(kind)
    except ValueError:
        return np.zeros(len(values), dtype=np.bool_)
    found: NDArray[np.bool_] = np.isnan(values.astype(np.float64)) if np.isnan(wanted) else values == wanted
    return found
