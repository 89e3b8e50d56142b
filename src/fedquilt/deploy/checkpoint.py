"""The server's state on disk, as one file: written whole after each round, read by `--resume`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedquilt.deploy.project import write_atomically
from fedquilt.deploy.wire import pack, unpack
from fedquilt.server import Server, Shelf
from fedquilt.sharing import Plan

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def save_server(path: Path, server: Server, more: Mapping[str, Any]) -> None:
    """Writes the server's plan, values and method state, and whatever else the caller needs to go on."""
    tensors: dict[str, Tensor] = {"refused": server.refused}
    shelves = []
    for i, shelf in enumerate(server.shelves):
        tensors[f"value/{i}"], tensors[f"known/{i}"] = shelf.value, shelf.known
        shelves.append([[unit, signature] for unit, signature in shelf.keys])
    text = {
        "round": server.round,
        "plan": server.plan.to_json(),
        "shelves": shelves,
        "state": to_plain(server.state, tensors),
        "more": dict(more),
    }
    write_atomically(path, pack({name: value.numpy(force=True) for name, value in tensors.items()}, text))


def load_more(path: Path) -> dict[str, Any]:
    """What the caller had added."""
    return dict(unpack(path.read_bytes())[1]["more"])


def load_server(path: Path, server: Server) -> None:
    """Puts a server, made for the same federation, where `save_server` left it."""
    arrays, text = unpack(path.read_bytes())
    tensors = {name: torch.from_numpy(array.copy()).to(server.device) for name, array in arrays.items()}
    server.plan = Plan.from_json(text["plan"])
    server.state = from_plain(text["state"], tensors)
    server.round = text["round"]
    server.refused = tensors["refused"]
    server.shelves = []
    for i, keys in enumerate(text["shelves"]):
        named = tuple((unit, tuple(tuple(shape) for shape in signature)) for unit, signature in keys)
        server.shelves.append(Shelf(server.plan[named[0][0]], named, tensors[f"value/{i}"], tensors[f"known/{i}"]))


def to_plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A method's state as JSON can hold it; tensors are put aside under a name.

    >>> aside: dict[str, Tensor] = {}
    >>> plain = to_plain({"step": 3, "groups": {0: (1, 2)}, "mu": torch.ones(2)}, aside)
    >>> from_plain(plain, aside)
    {'step': 3, 'groups': {0: (1, 2)}, 'mu': tensor([1., 1.])}
    """
    if isinstance(value, Tensor):
        name = f"state/{len(tensors)}"
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(part, tensors) for part in value]}
    if isinstance(value, list):
        return [to_plain(part, tensors) for part in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(part, tensors) for key, part in value.items()}
        return {_PAIRS: [[to_plain(key, tensors), to_plain(part, tensors)] for key, part in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a method's state holds a {type(value).__name__}; keep tensors, numbers, texts, lists and dicts")


def from_plain(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(from_plain(part, tensors) for part in value[_TUPLE])
    if _PAIRS in value:
        return {from_plain(key, tensors): from_plain(part, tensors) for key, part in value[_PAIRS]}
    return {key: from_plain(part, tensors) for key, part in value.items()}
