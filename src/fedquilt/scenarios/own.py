"""Scenarios from a file of the user's own: `path/to/file.py:function`; and such a file as a module."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fedquilt.names import unknown
from fedquilt.scenario import Scenario
from fedquilt.scenarios.registry import Builder
from fedquilt.values import python, whole

_LOADING: ContextVar[Path | None] = ContextVar("the file of a user's own that is being loaded", default=None)


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


def function_of(path: Path, function: str) -> Builder:
    """A function of a file, which is run as a module."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give a scenario's name, or path/to/file.py:function")
    module = load_file(path)
    found = getattr(module, function, None)
    if not inspect.isfunction(found):
        here = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ValueError(f"{path}: {unknown(function, here or ['none'], 'function')}; write {path}:function")
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


def load_file(path: Path) -> ModuleType:
    """Run a file as a module that can import its neighbours; once, however often it is asked for."""
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # Under its own name where that is free, so that the functions of its models are found again by it.
    further = (f"fedquilt_own_{path.stem}_{number}" for number in itertools.count(2))
    for name in itertools.chain(["__main__", path.stem, f"fedquilt_own_{path.stem}"], further):
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known  # a script that is running is not run again
        if known is None and name != "__main__":
            break
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be read as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    before = _LOADING.set(path)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} failed with {type(error).__name__}: {error} (--debug shows where)") from error
    finally:
        _LOADING.reset(before)
    return module


def check_no_file_is_loading() -> None:
    """Refuse to start a run while a file is loaded for its functions and classes: a script would do its work again."""
    path = _LOADING.get()
    if path is not None:
        raise RuntimeError(
            f"{path.name} starts a run while it is loaded for what it defines; put that under: if __name__ == "
            '"__main__"'
        )
