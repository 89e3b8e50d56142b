"""A scenario by name, or a function of the user's own: `path/to/file.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedquilt.cli.speak import Refused, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedquilt.scenario import Scenario


@dataclass(frozen=True)
class Source:
    """Where a scenario comes from: what the user wrote, and the function that builds it."""

    name: str
    builder: Callable[..., Scenario]
    file: str = ""  # with the function after a colon; empty for the library's own

    def build(self, seed: int, settings: Mapping[str, Any]) -> Scenario:
        """Build it, handing the seed over if the function takes one."""
        from fedquilt.scenario import Scenario
        from fedquilt.scenarios import build

        if not self.file:
            return build(self.name, seed, **settings)
        takes_seed = "seed" in inspect.signature(self.builder).parameters
        given = {**({"seed": seed} if takes_seed else {}), **settings}
        try:
            made = self.builder(**given)
        except Exception as error:
            raise Refused(f"{self.name} failed with {type(error).__name__}: {error} (--debug shows where)") from error
        if not isinstance(made, Scenario):
            raise Refused(f"{self.name} gave a {type(made).__name__}; it must give a fedquilt.Scenario")
        return replace(made, origin={"file": self.file, "seed": seed, "settings": dict(settings)})


def find(name: str) -> Source:
    """The scenario of a name or of a file; what is wrong with either is said with the nearest that is right.

    >>> find("digits").name
    'digits'
    >>> find("digitz")
    Traceback (most recent call last):
    ...
    fedquilt.cli.speak.Refused: there is no scenario 'digitz'; did you mean 'digits'?
    """
    path, colon, function = name.rpartition(":")
    if not colon or "/" in function or "\\" in function:
        path, function = name, "build"
    if path.endswith(".py"):
        return Source(name, _function(Path(path), function), f"{Path(path).resolve()}:{function}")
    from fedquilt.scenarios import SCENARIOS

    if name not in SCENARIOS:
        raise Refused(did_you_mean(name, SCENARIOS, "scenario"))
    return Source(name, SCENARIOS[name])


def _function(path: Path, function: str) -> Callable[..., Scenario]:
    if not path.is_file():
        raise Refused(f"there is no file {path}; give a scenario's name, or path/to/file.py:function")
    module = _load(path)
    found = getattr(module, function, None)
    if not inspect.isfunction(found):
        here = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise Refused(f"{path}: " + did_you_mean(function, here, "function") + f"; write {path}:function")
    built: Callable[..., Scenario] = found
    return built


def _load(path: Path) -> ModuleType:
    """Run a file of the user's as a module that can import its neighbours."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # under its own name where that is free, so that `fedquilt.load_model` finds the functions of its models again
    name = path.stem if path.stem not in sys.modules else f"fedquilt_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refused(f"{path} cannot be read as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise Refused(f"{path} failed with {type(error).__name__}: {error} (--debug shows where)") from error
    return module
