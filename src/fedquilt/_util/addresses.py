"""Where functions and classes are, as text, and back: files of the user's own, modules, and builders with arguments."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fedquilt._util.plain_values import python
from fedquilt._util.toml import values_of

_LOADING: ContextVar[Path | None] = ContextVar("the file of a user's own that is being loaded", default=None)


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


def inside(module: ModuleType, name: str) -> Any:
    """What has a dotted name in a module; None where there is nothing.

    >>> inside(sys, "version_info.major")
    3
    """
    found: Any = module
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    return found


def home_of(thing: Any) -> tuple[str, Path | None] | None:
    """The module that a function or class is in and, where that is a file of the user's own, the file.

    None where it is not found again by its name: a lambda, or what was made inside of a function.

    >>> home_of(inside), home_of(lambda: 0)
    (('fedquilt._util.addresses', None), None)
    """
    module, name = sys.modules.get(getattr(thing, "__module__", "")), getattr(thing, "__qualname__", "")
    if module is None or inside(module, name) is not thing:
        return None
    started = module.__spec__ if module.__name__ == "__main__" else None  # by python -m
    return module.__name__ if started is None else started.name, _own_file(module)


def _own_file(module: ModuleType) -> Path | None:
    """The file of a module that is just that, no part of a package and not installed."""
    started = module.__spec__ if module.__name__ == "__main__" else None
    file = Path(getattr(module, "__file__", None) or "nowhere").resolve()
    places = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
    installed = any(file.is_relative_to(place) for place in places)
    alone = "." not in module.__name__ and not hasattr(module, "__path__") and started is None
    return file if alone and not installed and file.suffix == ".py" and file.is_file() else None


def taken_apart(builder: Callable[..., Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function or class that partials are of, and the arguments that they give it.

    >>> taken_apart(partial(partial(int, "12"), base=8))
    (<class 'int'>, ('12',), {'base': 8})
    """
    inner: Any = builder
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while isinstance(inner, partial):
        arguments, keywords = (*python(inner.args), *arguments), {**python(inner.keywords), **keywords}
        inner = inner.func
    return inner, arguments, keywords


def put_together(
    found: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Callable[..., Any]:
    """The builder that was taken apart, of arguments that were text in between.

    >>> put_together(int, ["12"], {"base": 8})()
    10
    """
    if not arguments and not keywords:
        return found
    return partial(found, *values_of(arguments), **values_of(keywords))
