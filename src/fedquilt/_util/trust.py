"""Whose code a run directory may have run: fedquilt's, what this process has loaded already, and what this user ran.

A run directory says which file its scenario came from and which modules its method and models are of, and going on with
it means running them. A directory may come from anybody. So whoever makes a run leaves a marker in a folder of their
own for each file of code outside of the library that the run names: a checksum of where the file is and what is in it.
A directory that names other code is refused, unless the user says that it is to be trusted.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from fedquilt._util.checksums import digest, digest_of_file


class Untrusted(ValueError):
    """A run directory names code that nobody vouched for; nothing of it was run."""


def state_folder() -> Path:
    """The user's own folder of markers: FEDQUILT_STATE, else where the system keeps what programs remember."""
    if os.environ.get("FEDQUILT_STATE"):
        return Path(os.environ["FEDQUILT_STATE"]).expanduser()
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state")
    return base / "fedquilt"


def remember(files: Iterable[Path], modules: Iterable[str]) -> None:
    """Leave markers for files of code, and for the files of modules, that the user has run just now."""
    loaded = (sys.modules.get(name) for module in modules for name in _and_its_packages(module))
    of_modules = (Path(module.__file__) for module in loaded if module is not None and module.__file__)
    for path in {file.resolve() for file in (*files, *of_modules)}:
        with suppress(OSError):  # without a marker the user is asked later, which is no reason not to run now
            marker = _marker(path)
            marker.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            marker.write_text(f"{path}\n", encoding="utf-8")


def check_file(path: Path, trust: bool) -> None:
    """Refuse to run a file that is neither loaded already, nor known from a run of this user's, nor trusted."""
    path = path.resolve()
    loaded = any(getattr(module, "__file__", None) == str(path) for module in list(sys.modules.values()))
    if not (trust or loaded or not path.is_file() or _marker(path).is_file()):
        raise Untrusted(
            f"the run names code of its own, '{path}', which you have not run here as it is now; none of it was run. "
            "Look at it, and if you trust it say --trust (in Python trust=True)"
        )


def module_of(name: str, trust: bool) -> ModuleType:
    """The module of a name, imported only if it is fedquilt's, known from a run of this user's, or trusted."""
    for part in _and_its_packages(name):  # importing a module runs the packages that it is in, the outermost first
        if part not in sys.modules and part.partition(".")[0] != "fedquilt":
            spec = importlib.util.find_spec(part)
            if spec is not None and spec.origin is not None:
                check_file(Path(spec.origin), trust)
        importlib.import_module(part)
    return sys.modules[name]


def _and_its_packages(module: str) -> list[str]:
    """A module's name after those of the packages that it is in.

    >>> _and_its_packages("a.b.c")
    ['a', 'a.b', 'a.b.c']
    """
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _marker(path: Path) -> Path:
    return state_folder() / "trusted" / digest(f"{path}\0{digest_of_file(path)}".encode())
