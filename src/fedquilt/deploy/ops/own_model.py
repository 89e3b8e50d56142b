"""A model that the operator names for clients of the user's own: tried before anything is made, and taken along."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedquilt._util.addresses import inside, load_file
from fedquilt.engines.check_models import check_parts


def check_model(model: str) -> None:
    """Refuses `file.py:function` or `package.module:function` that builds no model, in a sentence.

    >>> check_model("torch.nn:Identity")
    >>> check_model("torch.nn:Identty")
    Traceback (most recent call last):
    ...
    ValueError: torch.nn has no function 'Identty' to build the model with
    >>> check_model("collections:OrderedDict")
    Traceback (most recent call last):
    ...
    ValueError: 'OrderedDict' of collections builds no model: it gives an OrderedDict, not a torch.nn.Module
    """
    source, name = _parts(model)
    found = inside(_module(source), name)
    if not callable(found):
        raise ValueError(f"{source} has no function '{name}' to build the model with")
    needed = _needed(found)
    if needed and not source.endswith(".py"):
        return  # a layer of a package: its arguments are written beside it afterwards, client by client
    if needed:
        raise ValueError(f"'{name}' of {source} builds no model by itself: give {', '.join(needed)} a default value")
    try:
        made = found()
    except Exception as error:
        raise ValueError(
            f"'{name}' of {source} builds no model: it fails with {type(error).__name__}: {error} (--debug shows where)"
        ) from error
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        raise ValueError(f"'{name}' of {source} builds no model: it gives {article} {kind}, not a torch.nn.Module")
    check_parts("each", made)


def carry(model: str, folder: Path) -> str:
    """The reference as the client's folder will know it; a model file is copied there."""
    source, name = _parts(model)
    if not source.endswith(".py"):
        return model
    folder.mkdir(exist_ok=True)
    shutil.copy(source, folder)
    return f"{Path(source).name}:{name}"


def _parts(model: str) -> tuple[str, str]:
    source, _, name = model.rpartition(":")
    if not source or not name.isidentifier():
        raise ValueError(f"'{model}' names no model; write file.py:function or package.module:function")
    if source.endswith(".py") and not Path(source).is_file():
        raise FileNotFoundError(f"the model file {source} does not exist")
    return source, name


def _module(source: str) -> ModuleType:
    if source.endswith(".py"):
        return load_file(Path(source))
    try:
        return import_module(source)
    except Exception as error:
        raise ValueError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error


def _needed(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function cannot do without; none where it does not tell."""
    try:
        told = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [f"'{each.name}'" for each in told if each.default is each.empty and each.kind not in free]
