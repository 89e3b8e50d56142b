"""Scenarios from a file of the user's own: `path/to/file.py:function`, or a table of samples, `path/to/file.csv`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fedquilt._util.addresses import load_file
from fedquilt._util.plain_values import python, whole
from fedquilt._util.suggest import did_you_mean
from fedquilt.scenario import Scenario
from fedquilt.scenarios.from_data import scenario_from
from fedquilt.scenarios.registry import Builder


def split_address(text: str) -> tuple[Path, str] | None:
    """The file and the function of `path/to/file.py:function` (default: build); None where that is no Python file.

    >>> split_address("clients.py:hospital")
    (PosixPath('clients.py'), 'hospital')
    >>> split_address("digits") is None
    True
    """
    path, colon, function = text.rpartition(":")
    if not colon or "/" in function or "\\" in function:
        path, function = text, "build"
    return (Path(path), function) if path.endswith(".py") else None


def data_at(text: str) -> Path | None:
    """The csv or npz file, or the folder of them, that a text names; None where it names none.

    >>> data_at("visits.csv")
    PosixPath('visits.csv')
    >>> data_at("digits") is None
    True
    """
    from fedquilt.scenarios import SCENARIOS

    path = Path(text)
    return path if path.suffix.lower() in (".csv", ".npz") or (path.is_dir() and text not in SCENARIOS) else None


def from_data(
    path: Path,
    seed: int = 0,
    label: tuple[str, ...] = ("label",),
    client: str | None = None,
    clients: int = 10,
    partition: str = "dirichlet",
    standardise: bool = False,
    leave_out: tuple[str, ...] = (),
    one_hot: tuple[str, ...] = (),
    gaps: Literal["mean"] | None = None,
    task: str | None = None,
) -> Scenario:
    """The scenario of samples in a file or a folder, as `scenario_from` makes it; its `origin` says how it was made."""
    settings: dict[str, Any] = {
        "label": label, "client": client, "clients": clients, "partition": partition, "standardise": standardise,
        "leave_out": leave_out, "one_hot": one_hot, "gaps": gaps, "task": task,
    }  # fmt: skip
    made = scenario_from(
        path, name=path.stem, seed=seed, **{**settings, "label": label[0] if len(label) == 1 else label}
    )  # fmt: skip
    kept = {key: value for key, value in settings.items() if value not in (None, ())}
    return replace(made, origin={"data": str(path.resolve()), "seed": seed, "settings": kept})


def function_of(path: Path, function: str) -> Builder:
    """A function of a file, which is run as a module."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give a scenario's name, or path/to/file.py:function")
    module = load_file(path)
    found = getattr(module, function, None)
    if not inspect.isfunction(found):
        here = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ValueError(f"{path}: {did_you_mean(function, here or ['none'], 'function')}; write {path}:function")
    built: Builder = found
    return built


def from_file(address: str, seed: int, settings: Mapping[str, Any]) -> Scenario:
    """Build the scenario of `path/to/file.py:function`, handing the seed over if the function takes one."""
    place = split_address(address)
    if place is None:
        raise ValueError(f"'{address}' is not path/to/file.py:function")
    builder = function_of(*place)
    seed, settings = whole(seed, "seed"), python(dict(settings))
    given = {**({"seed": seed} if "seed" in inspect.signature(builder).parameters else {}), **settings}
    try:
        made = builder(**given)
    except Exception as error:
        raise ValueError(f"{address} failed with {type(error).__name__}: {error} (--debug shows where)") from error
    if not isinstance(made, Scenario):
        raise ValueError(f"{address} gave a {type(made).__name__}; it must give a fedquilt.Scenario")
    where = f"{place[0].resolve()}:{place[1]}"
    return replace(made, origin={"file": where, "seed": seed, "settings": settings})
