"""What the numbers of a client's samples are, where they are columns of a table: `columns.json` in its folder.

Of a table that was standardised each client's samples have mean 0 and deviation 1, by its own training samples, and
that is what the models of all clients learn on. A device's owner who brings another file brings the same scale, or is
told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt._util.files import write_text
from fedquilt.client import Client

COLUMNS = "columns.json"
_FAR, _WIDE = 3.0, 5.0  # from mean 0 and deviation 1; new samples differ from old ones, but not that much

Columns = Sequence[Mapping[str, Any]]


def write_columns(folder: Path, columns: Columns) -> None:
    """Writes down what a client's numbers are, where that is known; means of its data are for nobody else to read."""
    if columns:
        write_text(folder / COLUMNS, json.dumps(list(columns), indent=1) + "\n")
        (folder / COLUMNS).chmod(0o600)


def without_numbers(columns: Columns) -> Columns:
    """The same for somebody else: which columns there are and what is done to them, but by numbers of one's own.

    >>> without_numbers([{"name": "age", "mean": 50.0, "deviation": 9.5}])
    [{'name': 'age', 'mean': None, 'deviation': None}]
    """
    return [{key: value if key == "name" else None for key, value in column.items()} for column in columns]


def check_scales(folder: Path, client: Client) -> None:
    """Refuses training samples on another scale than the federation's, of which a model would make something else."""
    path = folder / COLUMNS
    if not path.is_file():
        return
    columns: Columns = json.loads(path.read_text(encoding="utf-8"))
    x = client.train.x.double()
    if x.ndim != 2 or x.shape[1] != len(columns):
        names = ", ".join(str(column["name"]) for column in columns)
        raise ValueError(
            f"client '{client.name}': a sample of this federation has {len(columns)} numbers, {names}; here it has the "
            f"shape {tuple(x.shape[1:])}"
        )
    means, deviations = x.mean(0).tolist(), x.std(0, unbiased=False).tolist()
    for column, mean, deviation in zip(columns, means, deviations, strict=True):
        near = abs(mean) <= _FAR and (deviation == 0 or 1 / _WIDE <= deviation <= _WIDE)
        if "mean" in column and not near:
            raise ValueError(
                f"client '{client.name}': its training samples have mean {mean:.3g} and deviation {deviation:.3g} in "
                f"the column '{column['name']}', and this federation's models learn on samples that were brought to "
                "mean 0 and deviation 1; give (value - mean) / deviation, by your own training samples, in all splits, "
                f"or take {path} away if the samples are right as they are"
            )
