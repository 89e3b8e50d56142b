"""The state of a federation as named tensors and plain values, and as files that a kill cannot leave half-written.

Everything random follows from the seed and the round, so what has to be kept is little: the server's plan, values and
method state, the clients' rows, what read-outs remember, and how each family is trained.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedquilt.federation import Federation
from fedquilt.files import NEW, write_text, written_whole
from fedquilt.seals import Damaged as Damaged
from fedquilt.seals import digest, digest_of_file
from fedquilt.server import Server
from fedquilt.sharing import Plan
from fedquilt.shelf import Shelf
from fedquilt.training.choose import ENGINES
from fedquilt.values import python

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"
_STATE = "state.json"

Tensors = dict[str, Tensor]


def to_plain(value: Any, tensors: Tensors) -> Any:
    """A method's state as JSON can hold it; tensors are put aside under a name.

    >>> import torch
    >>> aside: dict[str, Tensor] = {}
    >>> plain = to_plain({"step": 3, "groups": {0: (1, 2)}, "mu": torch.ones(2)}, aside)
    >>> from_plain(plain, aside)
    {'step': 3, 'groups': {0: (1, 2)}, 'mu': tensor([1., 1.])}
    """
    if isinstance(value, Tensor):
        name = f"state/{len(tensors)}"
        tensors[name] = value
        return {_TENSOR: name, "on": value.device.type}
    if isinstance(value, np.generic):
        return python(value)
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
        return tensors[value[_TENSOR]].to(value["on"])
    if _TUPLE in value:
        return tuple(from_plain(part, tensors) for part in value[_TUPLE])
    if _PAIRS in value:
        return {from_plain(key, tensors): from_plain(part, tensors) for key, part in value[_PAIRS]}
    return {key: from_plain(part, tensors) for key, part in value.items()}


def server_state(server: Server, tensors: Tensors) -> dict[str, Any]:
    """The server's plan, values and method state; tensors are put aside under names."""
    tensors["refused"] = server.refused
    shelves = []
    for i, shelf in enumerate(server.shelves):
        tensors[f"value/{i}"], tensors[f"known/{i}"] = shelf.value, shelf.known
        tensors |= {f"memory/{i}/{name}": tensor for name, tensor in shelf.memory.items()}
        shelves.append([[unit, signature] for unit, signature in shelf.keys])
    return {
        "round": server.round,
        "plan": server.plan.to_json(),
        "shelves": shelves,
        "state": to_plain(server.state, tensors),
    }


def restore_server(server: Server, tensors: Mapping[str, Tensor], text: Mapping[str, Any]) -> None:
    """Put a server, made for the same federation, where `server_state` left it."""
    here = {name: tensor.to(server.device) for name, tensor in tensors.items()}
    server.plan = Plan.from_json(text["plan"])
    server.state = from_plain(text["state"], tensors)
    server.round = text["round"]
    server.refused = here["refused"]
    server.shelves = []
    for i, keys in enumerate(text["shelves"]):
        named = tuple((unit, tuple(tuple(shape) for shape in signature)) for unit, signature in keys)
        start = f"memory/{i}/"
        memory = {name.removeprefix(start): tensor for name, tensor in here.items() if name.startswith(start)}
        plan, value, known = server.plan[named[0][0]], here[f"value/{i}"], here[f"known/{i}"]
        server.shelves.append(Shelf(plan, named, value, known, memory=memory))


def federation_state(federation: Federation, tensors: Tensors) -> dict[str, Any]:
    """Everything a federation has to remember between two rounds."""
    fleet = federation.fleet
    text: dict[str, Any] = {"server": server_state(federation.server, tensors), "memory": [], "families": []}
    for i, crew in enumerate(fleet.crews):
        seen = [at for at in range(len(crew.clients)) if at not in crew.rest.fresh]
        tensors[f"seen/{i}"], tensors[f"rows/{i}"] = torch.tensor(seen, dtype=torch.int64), crew.rest.take(seen)
        known = fleet._known.get(id(crew.family.template))
        text["families"].append({"known": known, "at_once": crew.at_once, "engines": sorted(crew.engines)})
    for ids, memory in federation.memory.items():
        text["memory"].append([list(ids), to_plain(memory, tensors)])
    return text


def restore_federation(federation: Federation, tensors: Mapping[str, Tensor], text: Mapping[str, Any]) -> None:
    """Put a federation, made from the same scenario, method and seed, where `federation_state` left it."""
    fleet = federation.fleet
    changed = fleet.changes(text["server"]["round"])
    if changed:
        federation.server.declare(changed)
    restore_server(federation.server, tensors, text["server"])
    if len(text["families"]) != len(fleet.crews):
        raise Damaged("the checkpoint is of other models than the scenario now has; it was left as it is")
    for i, (crew, how) in enumerate(zip(fleet.crews, text["families"], strict=True)):
        rows, seen = tensors.get(f"rows/{i}"), tensors.get(f"seen/{i}")
        if rows is None or seen is None or rows.shape[1] != crew.family.layout.width or len(seen) > len(crew.clients):
            raise Damaged("the checkpoint is of other models than the scenario now has; it was left as it is")
        crew.rest.put(seen.tolist(), rows)
        crew.at_once = how["at_once"]
        if how["known"] is not None:
            fleet._known[id(crew.family.template)] = (how["known"][0], how["known"][1])
        for number in how["engines"]:  # at once: whether what a step computes is stacked depends on them
            crew.engines[number] = ENGINES[how["known"][0]](fleet._recipe(crew, number))
    for ids, memory in text["memory"]:
        federation.memory[tuple(ids)] = from_plain(memory, tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], sync: bool = True) -> str:
    """Write a file of tensors whole or not at all; gives its checksum. Without `sync` a power cut may still take it."""
    with written_whole(path, sync=sync) as new:
        try:
            save_file(_apart(tensors), new)
        except SafetensorError as error:  # what it says of a full disk is only in its text
            raise OSError(errno.ENOSPC if "No space left" in str(error) else errno.EIO, f"{new}: {error}") from error
        return digest_of_file(new)


def read_tensors(path: Path, wanted: str | None) -> Tensors:
    """The tensors of a file with the checksum wanted (None: an older run, which kept none); else it is refused."""
    try:
        if wanted is not None and digest_of_file(path) != wanted:
            raise Damaged(f"{path} was changed since it was written (its checksum differs); it was left as it is")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read ({error}); it was left as it is") from error


def _apart(tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors on the CPU, none sharing memory with another, which safetensors refuses."""
    apart: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        apart[name] = here.clone() if here.untyped_storage().data_ptr() in seen else here
        seen.add(here.untyped_storage().data_ptr())
    return apart


def save(folder: Path, tensors: Mapping[str, Tensor], text: Mapping[str, Any]) -> None:
    """Write a checkpoint: first the tensors under a new name, then `state.json`, which names them; then tidy up."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"round-{text['server']['round']:06d}.safetensors"
    checksum = write_tensors(folder / name, tensors)
    inside = json.dumps({**text, "tensors": name, "sha256": checksum})
    write_text(folder / _STATE, json.dumps({"check": digest(inside.encode()), "state": inside}))
    tidy(folder, name)


def tidy(folder: Path, name: str) -> None:
    """Remove the tensors of older checkpoints, and what a kill left half-written."""
    for old in [*folder.glob("round-*.safetensors*"), *folder.glob(_STATE + NEW)]:
        if old.name != name:
            old.unlink()


def load(folder: Path) -> tuple[Tensors, dict[str, Any]] | None:
    """Read the checkpoint of a folder; None where there is none yet; a damaged one is refused."""
    if not (folder / _STATE).is_file():
        return None
    try:
        outer = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if outer["check"] != digest(outer["state"].encode()):
            raise Damaged(f"{folder / _STATE} was changed after it was written (its checksum differs); left as it is")
        text: dict[str, Any] = json.loads(outer["state"])
        return read_tensors(folder / Path(text["tensors"]).name, text["sha256"]), text
    except Damaged:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder} holds no checkpoint that can be read ({error}); it was left as it is") from error
