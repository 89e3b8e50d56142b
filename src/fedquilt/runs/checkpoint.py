"""The state of a federation as named tensors and plain values, and as files that a kill cannot leave half-written.

Everything random follows from the seed and the round, so what has to be kept is little: the server's plan, values and
method state, the clients' rows, what read-outs remember, and how each family is trained.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedquilt._util.checksums import Damaged as Damaged
from fedquilt._util.checksums import digest, digest_of_file
from fedquilt._util.files import NEW, write_text, written_whole
from fedquilt._util.plain_values import python
from fedquilt.core.federation import Federation
from fedquilt.core.server import Server
from fedquilt.core.values import CircleValues
from fedquilt.sharing import Plan

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"
_STATE = "state.json"
_EARLIER = "earlier/"
_AT_ONCE = 10_000  # rows

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
    all_values = []
    for i, circle_values in enumerate(server.all_values):
        tensors[f"value/{i}"], tensors[f"known/{i}"] = circle_values.value, circle_values.known
        tensors |= {f"memory/{i}/{name}": tensor for name, tensor in circle_values.memory.items()}
        all_values.append([[unit, signature] for unit, signature in circle_values.keys])
    return {
        "round": server.round,
        "plan": server.plan.to_json(),
        "shelves": all_values,
        "state": to_plain(server.state, tensors),
        **({} if server.guard is None else {"clip": server.guard.clip}),
    }


def restore_server(server: Server, tensors: Mapping[str, Tensor], text: Mapping[str, Any]) -> None:
    """Put a server, made for the same federation, where `server_state` left it."""
    here = {name: tensor.to(server.device) for name, tensor in tensors.items()}
    state = from_plain(text["state"], tensors)
    if missing := [name for name in server.state if name not in state]:
        raise Damaged(
            f"this run was begun by another version of the method '{server.method.name}', which remembered no "
            f"'{missing[0]}'; it was left as it is, begin it anew"
        )
    server.plan = Plan.from_json(text["plan"])
    server.state = state
    server.round = text["round"]
    server.refused = here["refused"]
    if server.guard is not None:
        server.guard.clip, server.guard.round = text["clip"], server.round + 1
    server.all_values = []
    for i, keys in enumerate(text["shelves"]):
        named = tuple((unit, tuple(tuple(shape) for shape in signature)) for unit, signature in keys)
        start = f"memory/{i}/"
        memory = {name.removeprefix(start): tensor for name, tensor in here.items() if name.startswith(start)}
        plan, value, known = server.plan[named[0][0]], here[f"value/{i}"], here[f"known/{i}"]
        server.all_values.append(CircleValues(plan, named, value, known, memory=memory))


def federation_state(federation: Federation, tensors: Tensors, since: bool = False) -> dict[str, Any]:
    """Everything a federation has to remember between two rounds.

    With `since` only the rows that were put back since the last checkpoint are in it.
    """
    simulation = federation.simulation
    text: dict[str, Any] = {"server": server_state(federation.server, tensors), "memory": [], "families": []}
    for i, family_state in enumerate(simulation.family_states):
        store = family_state.store
        seen = sorted(store.changed or ()) if since else [at for at in range(len(store.which)) if at not in store.fresh]
        tensors[f"seen/{i}"], tensors[f"rows/{i}"] = torch.tensor(seen, dtype=torch.int64), store.take(seen)
        text["families"].append(simulation.training.kept(family_state))
    for ids, memory in simulation.memory.items():
        text["memory"].append([list(ids), to_plain(memory, tensors)])
    if federation.clock is not None:
        text["clock"] = to_plain(federation.clock.kept(), tensors)
    return text


def restore_federation(federation: Federation, tensors: Mapping[str, Tensor], text: Mapping[str, Any]) -> None:
    """Put a federation, made from the same scenario, method and seed, where `federation_state` left it."""
    simulation = federation.simulation
    simulation.turn(federation.server, text["server"]["round"])
    restore_server(federation.server, tensors, text["server"])
    if len(text["families"]) != len(simulation.family_states):
        raise Damaged("the checkpoint is of other models than the scenario now has; it was left as it is")
    for i, (family_state, how) in enumerate(zip(simulation.family_states, text["families"], strict=True)):
        for before in (*(f"{_EARLIER}{at}/" for at in range(len(text.get("earlier", ())))), ""):
            rows, seen = tensors.get(f"{before}rows/{i}"), tensors.get(f"{before}seen/{i}")
            if (
                rows is None
                or seen is None
                or rows.shape[1] != family_state.family.layout.width
                or len(seen) > len(family_state.clients)
            ):
                raise Damaged("the checkpoint is of other models than the scenario now has; it was left as it is")
            for at in range(0, len(seen), _AT_ONCE):  # what was read is mapped from its file: it need not all be there
                family_state.store.put(seen[at : at + _AT_ONCE].tolist(), rows[at : at + _AT_ONCE])
        simulation.training.restore(family_state, how)
    for ids, memory in text["memory"]:
        simulation.memory[tuple(ids)] = from_plain(memory, tensors)
    if federation.clock is not None and "clock" in text:
        federation.clock.restore(from_plain(text["clock"], tensors))


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


def save(
    folder: Path, tensors: Mapping[str, Tensor], text: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Write a checkpoint: first the tensors under a new name, then `state.json`, which names them; then tidy up.

    `earlier` are checkpoints whose rows hold where later ones do not have them; what is given back is this one's entry.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"round-{text['server']['round']:06d}.safetensors"
    checksum = write_tensors(folder / name, tensors)
    inside = json.dumps({**text, "tensors": name, "sha256": checksum, "earlier": list(earlier)})
    write_text(folder / _STATE, json.dumps({"check": digest(inside.encode()), "state": inside}))
    tidy(folder, [name, *(entry["tensors"] for entry in earlier)])
    return {"tensors": name, "sha256": checksum, "rows": rows_in(tensors)}


def rows_in(tensors: Mapping[str, Tensor]) -> int:
    """How many clients' rows are in a checkpoint."""
    return sum(len(seen) for name, seen in tensors.items() if name.startswith("seen/"))


def tidy(folder: Path, names: Collection[str]) -> None:
    """Remove the tensors of checkpoints that are not named, and what a kill left half-written."""
    for old in [*folder.glob("round-*.safetensors*"), *folder.glob(_STATE + NEW)]:
        if old.name not in names:
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
        tensors = read_tensors(folder / Path(text["tensors"]).name, text["sha256"])
        for at, entry in enumerate(text.get("earlier", ())):
            before = read_tensors(folder / Path(entry["tensors"]).name, entry["sha256"])
            tensors |= {f"{_EARLIER}{at}/{n}": t for n, t in before.items() if n.startswith(("rows/", "seen/"))}
        return tensors, text
    except Damaged:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{folder} holds no checkpoint that can be read ({error}); it was left as it is") from error
