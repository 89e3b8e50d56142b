"""A device's client: its folder and its data file, as the `Client` that every method works with.

Beside the library's methods a device runs those that its owner allowed in `client.toml`, each by its address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from fedquilt._util.addresses import inside, load_file, put_together
from fedquilt.client import Change, Client
from fedquilt.data.npz import NotArrays, read_arrays
from fedquilt.deploy.project import CLIENT, Node
from fedquilt.methods import Method
from fedquilt.methods.find import class_at, source_of

Allowed = Mapping[str, Sequence[tuple[type[Method], str]]]  # by a class's name: such classes, checksums of their source


def load_client(node: Node, data: Path) -> Client:
    """The client of a folder with the data of an npz file: x_train, y_train, and the same of validation and test."""
    if not data.is_file():
        raise FileNotFoundError(f"client '{node.name}': the data file {data} does not exist")
    try:
        parts = read_arrays(data)
    except NotArrays as error:
        raise ValueError(
            f"client '{node.name}': {data} is not a file of plain arrays: {error}; write one with numpy.savez"
        ) from error

    def split(name: str) -> tuple[Any, Any] | None:
        if f"x_{name}" not in parts:
            return None
        if f"y_{name}" not in parts:
            raise KeyError(f"client '{node.name}': {data} holds x_{name} but no y_{name}")
        return parts[f"x_{name}"], parts[f"y_{name}"]

    train = split("train")
    if train is None:
        raise KeyError(f"client '{node.name}': {data} holds no x_train; it has {', '.join(sorted(parts)) or 'nothing'}")
    starts = {int(start) for start in node.changes} | {
        int(key.removeprefix("x_train_")) for key in parts if key.startswith("x_train_")
    }
    changes = {start: _change(node, start, split(f"train_{start}")) for start in starts}
    return Client(
        node.name,
        builder(node.folder, node.model, node.name),
        train=train,
        validation=split("validation"),
        test=split("test"),
        traits=node.traits,
        labels=node.labels,
        changes=changes,
    )


def _change(node: Node, start: int, train: tuple[Any, Any] | None) -> Change:
    told = node.changes.get(str(start), {})
    labels = told.get("labels")
    return Change(
        model=builder(node.folder, told["model"], node.name) if "model" in told else None,
        labels=None if labels is None else tuple(labels),
        train=train,
    )


def allowed_methods(node: Node) -> Allowed:
    """The methods beside the library's that a device may run; files are looked for in its folder."""
    found: dict[str, list[tuple[type[Method], str]]] = {}
    for address in node.allow:
        try:
            kind = class_at(str(node.folder / address) if ".py:" in f"{address}:" else address)
            found.setdefault(kind.__qualname__, []).append((kind, source_of(kind)))
        except (ValueError, OSError) as error:
            raise ValueError(f"client '{node.name}': {CLIENT} allows the method '{address}', but {error}") from error
    return found


def builder(folder: Path, reference: Mapping[str, Any], client: str) -> Callable[[], nn.Module]:
    """The model builder that a reference in a TOML file names; lists of arguments arrive as tuples."""
    source, _, name = str(reference["builder"]).rpartition(":")
    if source.endswith(".py") and not (folder / source).is_file():
        raise FileNotFoundError(f"the model file {folder / source} does not exist; copy it beside client.toml")
    module = load_file(folder / source) if source.endswith(".py") else import_module(source)
    found = inside(module, name)
    if not callable(found):
        raise ValueError(f"client '{client}': {source} has no function '{name}' to build the model with")
    return put_together(found, reference.get("arguments", ()), reference.get("keywords", {}))
