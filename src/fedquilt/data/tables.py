"""A table as samples: the columns of a csv file or a data frame, which of them a model sees, and what is in the way.

Whatever is in the way is said at once, of all columns that it is true of, with the settings that mend it.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt._util.plain_values import python
from fedquilt._util.suggest import did_you_mean

_MISSING = ("", "na", "nan", "null", "none", "?")
_MANY = 100  # values of a column, above which they are hardly kinds of something
_KINDS = 20  # values of a column of texts, up to which a column for each is worth proposing
_LIKE_NUMBER = re.compile(r"[+-]?\d[\d.,' ]*")  # 1,234.5 or 1.234,5
_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.IGNORECASE)  # 0,5: how many write a half

Columns = Mapping[str, NDArray[Any]]
Read = tuple[Any, Any, Any, tuple[str, ...]]  # samples, labels, whose they are, names of what a sample is made of


@dataclass(frozen=True)
class Table:
    """How columns of a table are read: `label` or several are targets, those of `leave_out` are not looked at, of
    `one_hot` each value is a column of its own with 0 or 1, and `gaps` says whether numbers may be missing."""

    label: str | Sequence[str] = "label"
    leave_out: Sequence[str] = ()
    one_hot: Sequence[str] = ()
    gaps: bool = False


def columns_of(path: Path) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """The columns of a csv file with a line of headings, those of numbers alone as numbers; and the line of each row.

    A column without a heading is `column-1`, `column-2`, ... by its place. Where entries are not apart by commas,
    numbers may have one.
    """
    apart, rows = rows_of(path)
    head = [name.strip() or f"column-{at}" for at, name in enumerate(rows[0][1], 1)]
    twice = next((name for at, name in enumerate(head) if name in head[:at]), None)
    if twice is not None:
        raise ValueError(f"'{path}' has two columns '{twice}'; give each a heading of its own")
    columns = {name: _numbers([row[at].strip() for _, row in rows[1:]], apart) for at, name in enumerate(head)}
    return columns, [line for line, _ in rows[1:]]


def rows_of(path: Path) -> tuple[str, list[tuple[int, list[str]]]]:
    """What entries of a csv file are apart by, as its headings are: commas, semicolons or tabs; and the entries of each
    row with the line that it ends in, the headings first."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            apart = max(",;\t", key=first.count)
            reader = csv.reader(file, delimiter=apart)
            rows = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"'{path}' is not in UTF-8 (there is a byte {byte:#04x}); save it so, in a spreadsheet as 'CSV UTF-8'"
        ) from None
    except csv.Error as error:
        raise ValueError(f"'{path}' cannot be read as csv: {error}") from None
    if len(rows) < 2:
        raise ValueError(f"'{path}' needs a line of headings and at least one sample")
    wide = len(rows[0][1])
    for line, row in rows[1:]:
        if len(row) != wide:
            raise ValueError(f"'{path}', line {line} has {len(row)} entries, the headings are {wide}")
    return apart, rows


def stacked(tables: Sequence[Columns], path: Path) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Tables with the same headings as one, and how long each is."""
    heads = {tuple(sorted(columns)) for columns in tables}
    if len(heads) > 1:
        odd = sorted(set.symmetric_difference(*map(set, list(heads)[:2])))
        raise ValueError(f"the files of '{path}' have unlike columns, such as '{odd[0]}'; they must be alike")
    lengths = [len(next(iter(columns.values()))) for columns in tables]
    return {name: np.concatenate([columns[name] for columns in tables]) for name in tables[0]}, lengths


def samples_of(columns: Columns, table: Table, client: Any, whose: str, lines: Sequence[int] = ()) -> Read:
    """Samples of a table; `whose` names it in sentences, `lines` are those of its rows, where it is one file."""
    label, targets = table.label, [table.label] if isinstance(table.label, str) else list(table.label)
    named = [*targets, *([client] if isinstance(client, str) else [])]
    _check_names(columns, table, targets, named, whose)
    features: dict[str, NDArray[Any]] = {}
    for name in columns:
        if name in table.one_hot:
            features |= _one_hot(name, columns[name], whose)
        elif name not in named and name not in table.leave_out:
            features[name] = columns[name]
    wrong = [*_not_numbers(features, table), *([] if table.gaps else _gaps(features))]
    if wrong:
        raise ValueError(
            f"{whose}: {'. '.join(told[0].upper() + told[1:] if at else told for at, told in enumerate(wrong))}"
        )
    if not features:
        raise ValueError(f"{whose} has no columns beside {' and '.join(named)}; what should a model look at?")
    for name in named:
        if (missing := _missing(columns[name])).any():
            what = "label" if name in targets else "client"
            rows = f"{int(missing.sum())} rows have" if missing.sum() > 1 else "a row has"
            raise ValueError(
                f"{whose}: {rows} no {what} in column '{name}'{_where(int(missing.argmax()), lines, ', the first')}; "
                "leave such rows out of the table"
            )
    for name, values in features.items():
        if values.dtype.kind in "iu" and len(values) > _MANY and len(np.unique(values)) == len(values):
            warnings.warn(
                f"{whose}: column '{name}' has another whole number in every row, as numbers of people or orders have, "
                f"and a model looks at it; if that is what they are, leave it out by leave_out={name}",
                stacklevel=2,
            )
    words = [name for name in targets if len(targets) > 1 and columns[name].dtype.kind not in "iufb"]
    if words or not targets:
        told = (
            f"column '{words[0]}' is none of numbers, as several targets have to be" if words else "no label is named"
        )
        raise ValueError(f"{whose}: {told}; name one column of labels, or several of numbers")
    y = columns[targets[0]] if isinstance(label, str) else np.stack([columns[name] for name in targets], axis=1)
    return (
        _as_float32(features, whose, lines),
        y,
        columns[client] if isinstance(client, str) else client,
        tuple(features),
    )


def _numbers(texts: Sequence[str], apart: str = ",") -> NDArray[Any]:
    """Entries of a column as numbers, where they all are; else as the texts that they are."""
    for kind in (np.int64, np.float64):
        try:
            return np.array([float("nan") if t.lower() in _MISSING else kind(t) for t in texts], dtype=kind)
        except (ValueError, OverflowError):
            continue
    if apart != "," and any(_COMMA.fullmatch(t) for t in texts):
        return _numbers([t.replace(",", ".") if _COMMA.fullmatch(t) else t for t in texts])
    return np.array(texts)


def _check_names(columns: Columns, table: Table, targets: Sequence[str], named: Sequence[str], whose: str) -> None:
    """That all columns that are named are there."""
    keys = dict.fromkeys(table.one_hot, "one_hot") | dict.fromkeys(table.leave_out, "leave_out")
    for name in (*named, *keys):
        if name not in columns:
            key = keys.get(name) or ("label" if name in targets else "client")
            raise ValueError(f"{whose}: {did_you_mean(name, columns, 'column')}; name it by {key}=...")


def _not_numbers(features: Columns, table: Table) -> list[str]:
    """Sentences on columns that are no numbers: kinds of something, numbers with a slip, and what else is text."""
    texts = {name: values.astype(str) for name, values in features.items() if values.dtype.kind not in "iufb"}
    slips = {name: slip for name, values in texts.items() if (slip := _slip(values)) is not None}
    kinds = [name for name, values in texts.items() if name not in slips and len(np.unique(values)) <= _KINDS]
    rest = [name for name in texts if name not in slips and name not in kinds]
    told = [f"column '{name}' has numbers, but for entries such as '{text}'; write a number such as 1234.5 there, or "
            "nothing" for name, text in slips.items()]  # fmt: skip
    if kinds:
        told.append(
            f"{_listed(kinds)} no numbers; make a column of each of {'its' if len(kinds) == 1 else 'their'} values by "
            f"one_hot={','.join([*table.one_hot, *kinds])}, or leave {_it(kinds)} out"
        )
    if rest:
        told.append(
            f"{_listed(rest)} texts that differ a lot, such as '{texts[rest[0]][0]}'; leave {_it(rest)} out by "
            f"leave_out={','.join([*table.leave_out, *rest])}, or make numbers of {_it(rest)} first (of a date, days)"
        )
    return told


def _slip(values: NDArray[np.str_]) -> str | None:
    """The first entry that is no number, in a column of which the most are numbers or look so; None in any other."""
    known = [value for value in map(str, values) if value.lower() not in _MISSING]
    odd = [value for value in known if not _is_number(value)]
    foreign = [value for value in odd if not _LIKE_NUMBER.fullmatch(value)]
    return odd[0] if odd and 2 * len(foreign) < len(known) else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _gaps(features: Columns) -> list[str]:
    """A sentence on the columns of numbers in which some are missing."""
    found = [name for name, values in features.items() if values.dtype.kind == "f" and np.isnan(values).any()]
    if not found:
        return []
    told = (
        f"{_listed(found, 'has', 'have')} gaps; fill them by gaps=mean, with the mean of each client's training samples"
    )
    return [f"{told}, or leave {_it(found)} out"]


def _listed(names: Sequence[str], one: str = "is", more: str = "are") -> str:
    """Columns as the subject of a sentence.

    >>> _listed(["sex", "ward"]), _listed(["age"], "has", "have")
    ("columns 'sex', 'ward' are", "column 'age' has")
    """
    told = ", ".join(f"'{name}'" for name in names)
    return f"column {told} {one}" if len(names) == 1 else f"columns {told} {more}"


def _it(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """In which rows a column says nothing."""
    if values.dtype.kind == "f":
        missing: NDArray[np.bool_] = np.isnan(values)
        return missing
    return np.fromiter((value is None or str(value) in ("", "nan") for value in values), dtype=np.bool_)


def _where(row: int, lines: Sequence[int], before: str = "") -> str:
    return f"{before} in line {lines[row]}" if len(lines) else ""


def _as_float32(features: Columns, whose: str, lines: Sequence[int]) -> NDArray[np.float32]:
    """Columns beside one another, (n, columns); gaps stay NaN."""
    with np.errstate(over="ignore"):
        x = np.stack([values.astype(np.float32) for values in features.values()], axis=1)
    huge = np.isinf(x)
    if huge.any():
        row, column = (int(at) for at in np.argwhere(huge)[0])
        name = list(features)[column]
        raise ValueError(
            f"{whose}: column '{name}' has {float(features[name][row]):g}{_where(row, lines)}, which is no number that "
            "float32 can hold; mend it, or leave it empty"
        )
    return x


def _one_hot(name: str, values: NDArray[Any], whose: str) -> dict[str, NDArray[Any]]:
    """A column of 0 and 1 for each value of a column."""
    told = np.array([str(python(value)) for value in values])
    found = np.unique(told)
    if len(found) > _MANY:
        raise ValueError(f"{whose}: column '{name}' has {len(found)} values, too many for a column each; leave it out")
    return {f"{name}={value}": (told == value).astype(np.int64) for value in found}
