"""Reading run directories: `run.toml`, `metrics.jsonl`, `plans.jsonl`, `traffic.jsonl`, `summary.json` and so on.

Only files are read, nothing of what the run names is run, and whatever is missing is left out: a run that is still
going, or was killed in the middle of a line, can be reported too. Of a finished run every file has to be as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt._util.metric import ACCURACY, Metric, metric_of
from fedquilt.report.run_texts import find, json_of, lines_of, name_of, text_of, texts_of, toml_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
COMPARISON = "comparison.json"
_SIGNS = ("run.toml", "summary.json", "metrics.jsonl")
_TABLES = ("summary.json", "confusion.json")
_OF_LINES = ("metrics.jsonl", "traffic.jsonl", "plans.jsonl")
Reading = tuple[str, str]
"""A read-out and a split."""


@dataclass(frozen=True)
class Series:
    """The leading metric over rounds: `score` (rounds, clients), NaN where a client was not evaluated."""

    rounds: tuple[int, ...]
    score: Floats
    f_by_class: Floats | None = None
    loss: Floats | None = None  # like `score`; None where nobody has one

    def filled(self) -> Floats:
        """Scores where a client keeps its last known value until it is evaluated again."""
        known = np.where(np.isnan(self.score), -1, np.arange(len(self.rounds))[:, None])
        last = np.maximum.accumulate(known, axis=0)
        carried = np.take_along_axis(self.score, np.maximum(last, 0), axis=0)
        return np.where(last < 0, np.nan, carried)


@dataclass(frozen=True)
class Traffic:
    """Megabytes per round and client, (rounds, clients)."""

    rounds: tuple[int, ...]
    up: Floats
    down: Floats
    clock: Floats | None = None  # (rounds,) virtual seconds when a round was over, where clients declare their hardware


@dataclass(frozen=True)
class RunFiles:
    """What one run directory says."""

    folder: Path
    scenario: str
    method: str
    seed: int
    reading: Reading
    clients: tuple[str, ...]
    series: Mapping[Reading, Series]
    plans: Sequence[tuple[int, Mapping[str, Ints]]] = ()
    traffic: Traffic | None = None
    confusion: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    metric: Metric = ACCURACY

    @property
    def chosen(self) -> int | None:
        """The round the result is read at where the run chose one on validation data; None: the last."""
        value = self.summary.get("round")
        return value if isinstance(value, int) else None


def run_folders(folder: str | Path) -> list[Path]:
    """The run directories that a directory stands for: itself, or those of the comparison that is kept there."""
    folder = Path(folder)
    if any((folder / name).is_file() for name in _SIGNS):
        return [folder]
    told = json_of(folder / COMPARISON, text_of(folder / COMPARISON)).get("runs")
    if isinstance(told, list):
        inside = [folder / Path(str(name)).name for name in told]
    else:
        inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = [path for path in inside if any((path / name).is_file() for name in _SIGNS)]
    if not found:
        raise FileNotFoundError(f"'{folder}' is no run directory (it has no {', '.join(_SIGNS)}), nor are runs in it")
    return found


def settings_tried(folder: str | Path) -> list[dict[str, Any]]:
    """What a sweep tried, where a directory holds one: method, settings, score on validation data, chosen or not."""
    told = json_of(Path(folder) / COMPARISON, text_of(Path(folder) / COMPARISON)).get("tried")
    return told if isinstance(told, list) else []


def read_run(folder: str | Path) -> RunFiles:
    """Read one run directory.

    >>> read_run("no/such/run")
    Traceback (most recent call last):
    FileNotFoundError: 'no/such/run' is not a run directory: it has no run.toml, summary.json, metrics.jsonl
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _SIGNS):
        raise FileNotFoundError(f"'{folder}' is not a run directory: it has no {', '.join(_SIGNS)}")
    settings = toml_of(folder / "run.toml", text_of(folder / "run.toml"))
    texts = texts_of(folder, settings, ("run.toml", *_TABLES, *_OF_LINES))
    summary, confused = (json_of(folder / name, texts[name]) for name in _TABLES)
    rows, moved, planned = (lines_of(folder / name, texts[name]) for name in _OF_LINES)

    clients = _names(settings, rows, moved, planned)
    metric = metric_of({**settings, **summary})
    series = _series(rows, clients, metric)
    readout, split = (find(summary, settings, key) for key in ("readout", "split"))
    tests = [reading for reading in series if reading[1] == "test"] or list(series)
    # a run keeps that of the same clients by themselves inside its own directory
    alone = folder / "alone"
    (text,) = texts_of(alone, toml_of(alone / "run.toml", text_of(alone / "run.toml")), _OF_LINES[:1]).values()
    by_themselves = _series(lines_of(alone / "metrics.jsonl", text), clients, metric)
    series |= {("alone", split): mine for (readout, split), mine in by_themselves.items() if readout == "received"}
    reading = (str(readout), str(split)) if readout and split else (tests[0] if tests else ("", ""))
    confusion, labels = _confusion(confused, reading[0], clients)
    named = find(settings, "label_names") or find(settings, "labels")
    return RunFiles(
        folder=folder,
        scenario=name_of(find(summary, settings, "scenario"), "scenario"),
        method=name_of(find(summary, settings, "method"), folder.name),
        seed=int(find(summary, settings, "seed") or 0),
        reading=reading,
        clients=clients,
        series=series,
        plans=_plans(planned),
        traffic=_traffic(moved, clients),
        confusion=confusion,
        labels=tuple(str(n) for n in named) if isinstance(named, list) else labels,
        summary=summary,
        settings=settings,
        metric=metric,
    )


def _names(settings: Mapping[str, Any], rows: list[Any], moved: list[Any], planned: list[Any]) -> tuple[str, ...]:
    """The clients in the order of their numbers: as told, else as they first appear."""
    told = find(settings, "clients")
    if isinstance(told, list) and told:
        return tuple(name_of(c, "") for c in told)
    names = dict.fromkeys(str(row["client"]) for row in rows if "client" in row)
    for line in moved:
        names |= dict.fromkeys([*line.get("up", {}), *line.get("down", {})])
    if not names and planned:
        sizes = [len(_circles(unit)) for unit in planned[-1].get("units", {}).values()]
        names = dict.fromkeys(f"client {i}" for i in range(max(sizes, default=0)))
    return tuple(names)


def _series(rows: list[dict[str, Any]], clients: Sequence[str], metric: Metric) -> dict[Reading, Series]:
    number = {name: i for i, name in enumerate(clients)}
    sorted_out: dict[Reading, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("client") in number and row.get(metric.name) is not None and not row.get("liar"):
            sorted_out.setdefault((str(row.get("readout", "")), str(row.get("split", ""))), []).append(row)
    found = {}
    for reading, mine in sorted_out.items():
        rounds = sorted({int(row["round"]) for row in mine})
        place = {at: i for i, at in enumerate(rounds)}
        score, loss = (np.full((len(rounds), len(clients)), np.nan) for _ in range(2))
        classes = max((len(row.get("f_by_class") or ()) for row in mine), default=0)
        f_by_class = np.full((len(clients), classes), np.nan) if classes else None
        for row in mine:
            client = number[row["client"]]
            value = row[metric.name]
            score[place[int(row["round"])], client] = _exact(value, row.get("samples")) if metric == ACCURACY else value
            if row.get("loss") is not None:
                loss[place[int(row["round"])], client] = row["loss"]
            if f_by_class is not None and row.get("f_by_class"):  # rows come in the order of rounds: the last one stays
                f_by_class[client] = [np.nan if f is None else f for f in row["f_by_class"]]
        found[reading] = Series(tuple(rounds), score, f_by_class, None if np.isnan(loss).all() else loss)
    return found


def _exact(accuracy: float, samples: Any) -> float:
    """An accuracy as the quotient of whole numbers that it is: older runs wrote it in single precision.

    >>> _exact(0.30000001192092896, 10)
    0.3
    """
    if not isinstance(samples, int) or samples < 1 or not math.isfinite(accuracy):
        return accuracy
    right = round(accuracy * samples)
    return right / samples if abs(right - accuracy * samples) <= 1e-6 * samples else accuracy


def _plans(lines: list[dict[str, Any]]) -> list[tuple[int, dict[str, Ints]]]:
    return [
        (int(line.get("round", i)), {str(name): _circles(unit) for name, unit in line.get("units", {}).items()})
        for i, line in enumerate(lines)
    ]


def _circles(unit: Mapping[str, Any]) -> Ints:
    """The circle of each client in a unit; in the dense form, the clients joined by any mixing are one circle."""
    if "circle" in unit:
        return np.asarray(unit["circle"], dtype=np.int64)
    from scipy.sparse.csgraph import connected_components

    matrix = np.asarray(unit.get("matrix", np.zeros((0, 0))), dtype=np.float64)
    if not matrix.size:
        return np.zeros(0, dtype=np.int64)
    mixed = matrix * (1 - np.eye(len(matrix))) > 0
    _, found = connected_components(mixed, directed=False)
    alone = ~(mixed.any(axis=0) | mixed.any(axis=1))
    return np.where(alone, -1, found).astype(np.int64)


def _traffic(lines: list[dict[str, Any]], clients: Sequence[str]) -> Traffic | None:
    if not lines:
        return None
    number = {name: i for i, name in enumerate(clients)}
    up, down = np.zeros((len(lines), len(clients))), np.zeros((len(lines), len(clients)))
    for i, line in enumerate(lines):
        for key, table in (("up", up), ("down", down)):
            for name, moved in line.get(key, {}).items():
                if name in number:
                    table[i, number[name]] = moved / 1e6
    times = [line.get("clock") for line in lines]
    clock = None if None in times else np.array(times, dtype=np.float64)
    return Traffic(tuple(int(line.get("round", i + 1)) for i, line in enumerate(lines)), up, down, clock)


def _confusion(
    found: dict[str, Any], readout: str, clients: Sequence[str]
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Matrices by client, by read-out and client, or by client and read-out, maybe under `clients`; and label names.

    A matrix is a list of rows, or its number of classes with its cells that are not empty.
    """
    labels = found.get("labels") or found.get("label_names") or []
    by_client = found.get("clients", found)
    if isinstance(by_client, dict) and not set(clients) & set(by_client):
        by_client = _of(by_client, readout)
    matrices = {}
    for name, value in by_client.items() if isinstance(by_client, dict) else ():
        value = _of(value, readout) if isinstance(value, dict) and "cells" not in value else value
        matrix = (
            _filled(value) if isinstance(value, dict) else np.asarray(value) if isinstance(value, list) else np.zeros(0)
        )
        if matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]:
            matrices[str(name)] = matrix.astype(np.int64)
    return matrices, tuple(str(label) for label in labels)


def _filled(counts: dict[str, Any]) -> NDArray[np.int64]:
    """A matrix from its cells: class, predicted class, number of samples."""
    matrix = np.zeros((counts["classes"], counts["classes"]), dtype=np.int64)
    for truth, predicted, number in counts["cells"]:
        matrix[truth, predicted] = number
    return matrix


def _of(by_readout: dict[str, Any], readout: str) -> Any:
    """What belongs to a read-out; where it is not there, to the first one."""
    return by_readout.get(readout, next(iter(by_readout.values()), None))
