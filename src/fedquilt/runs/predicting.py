"""What the personal models of a finished run say of new rows of a table."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt._util.suggest import did_you_mean
from fedquilt.data.own import columns_from
from fedquilt.data.rows import as_samples_were
from fedquilt.runs.checkpoint import Damaged
from fedquilt.runs.saved_models import MODELS, load_model
from fedquilt.runs.settings import method_from, read_settings
from fedquilt.tasks import TASKS, Classification, Task


def predict_rows(
    folder: str | Path, rows: Any, client: str | None = None, *, column: str | None = None, trust: bool = False
) -> list[dict[str, Any]]:
    """What the personal models of a finished run say of new rows of a table: for each a dict, in the rows' order.

    `rows` is a csv file, a data frame or a dict of columns, with the columns that the run's table had; labels need not
    be there. Each row is answered by the model of the client that `column` names, which is the run's `client` column
    unless said otherwise, or all of them by the model of one `client`. Values are filled and scaled as that client's
    training samples were. A dict has `client`, `predicted` and, of classes, `probability`, which the model gives that
    class; of several targets `predicted` is a list. `trust` is as in `load_model`.
    """
    place, table = Path(folder), columns_from(rows)
    settings = read_settings(place)
    try:
        entries = json.loads((place / MODELS).read_text(encoding="utf-8"))["clients"]
    except (OSError, ValueError) as error:
        raise Damaged(f"'{folder}' holds no models ({error}); finish the run first: fedquilt resume {folder}") from None
    whose = _whose(table, client, column, settings, str(folder))
    task = TASKS[settings["task"]["kind"]]() if "task" in settings else Classification()
    method = method_from(settings["method"], trust)
    if method.predicts is not None or method.readout != "received":
        warnings.warn(
            f"the method '{method.name}' was measured with more than the model that each client received, which "
            "answers here by itself",
            stacklevel=2,
        )
    said: list[dict[str, Any]] = [{}] * len(whose)
    for name in dict.fromkeys(whose.tolist()):
        if name not in entries:
            raise ValueError(f"{did_you_mean(name, entries, f'client in {folder!s}')}; name one whose model answers")
        if "columns" not in entries[name]:
            raise ValueError(f"'{folder}' was not run on a table, so it is not known how rows become its samples")
        mine = np.flatnonzero(whose == name)
        x = as_samples_were({key: values[mine] for key, values in table.items()}, entries[name]["columns"])
        with torch.no_grad():
            outputs = load_model(folder, name, trust=trust)(torch.as_tensor(x))
        for row, answer in zip(mine.tolist(), _answers(task, outputs, settings.get("label_names") or ()), strict=True):
            said[row] = {"client": name, **answer}
    return said


def _whose(
    table: Mapping[str, NDArray[Any]], client: str | None, column: str | None, settings: Mapping[str, Any], folder: str
) -> NDArray[np.str_]:
    """The client that answers for each row."""
    rows = len(next(iter(table.values())))
    if client is not None:
        return np.full(rows, str(client))
    told = column or settings["scenario"].get("settings", {}).get("client")
    if told is None:
        raise ValueError(
            f"'{folder}' does not say which column names clients; say it by column=... (--client-column), or name one "
            "client for all rows"
        )
    if told not in table:
        raise ValueError(f"{did_you_mean(told, table, 'column')}, which names clients; or name one client for all rows")
    return np.array([str(value) for value in table[told].tolist()])


def _answers(task: Task, outputs: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """What outputs (n, ...) say, a dict a row."""
    predicted = task.predictions(outputs)
    if task.kind != "classification":
        flat = predicted.flatten(1).tolist() if predicted.ndim > 1 else predicted[:, None].tolist()
        return [{"predicted": values[0] if len(values) == 1 else values} for values in flat]
    sure = outputs.softmax(1).gather(1, predicted[:, None])[:, 0].tolist()
    labels = [names[label] if label < len(names) else label for label in predicted.tolist()]
    return [{"predicted": label, "probability": p} for label, p in zip(labels, sure, strict=True)]
