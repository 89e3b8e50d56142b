"""Every client's personal model in a run directory, and back."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt._util.addresses import load_file
from fedquilt._util.checksums import check, digest, sealed
from fedquilt._util.files import write_text
from fedquilt._util.trust import check_file
from fedquilt.core.federation import Federation
from fedquilt.families.copies import copy_of
from fedquilt.families.habits import bits_of, frozen_of
from fedquilt.families.parts import model_of
from fedquilt.interface.messages import ClientInfo
from fedquilt.runs.checkpoint import Damaged, read_tensors, write_tensors
from fedquilt.runs.code_digest import READ_BY, ClassCode
from fedquilt.runs.settings import builder_from_text, builder_to_text, method_from, read_settings
from fedquilt.scenarios.own import split_address

MODELS = "models/models.json"


_FILES = 1000  # clients that have a file each; models of more of them lie together, and equal ones once
_TOGETHER = 2**26  # bytes of models in a file


def write_models(folder: Path, federation: Federation) -> None:
    """Write what each client ends with, and how its module is built; what is frozen once for all who have it alike."""
    place = folder / "models"
    place.mkdir(exist_ok=True)
    known: dict[str, dict[str, Any]] = {}
    frozen = FrozenParts(place)
    code = ClassCode()
    builders: dict[int, Any] = {}
    clients = federation.scenario.clients
    files: _Files | _Stacks = _Files(place) if len(clients) <= _FILES else _Stacks(place)
    for number, model, key in _models(federation):
        now = clients[number].at(federation.round)
        rest = frozen_of(model)
        if id(now.model) not in builders:
            builders[id(now.model)] = builder_to_text(now.model)
        known[now.name] = {
            **files.write(number, {n: t for n, t in model.state_dict().items() if n not in rest}, key),
            **({"frozen": frozen.write(rest)} if rest else {}),
            "code": code(now.model, model),
            "builder": builders[id(now.model)],
            "traits": dict(now.traits),
            "labels": list(now.labels),
            "samples": now.samples,
            "input": {"shape": list(now.train.x.shape[1:]), "dtype": str(now.train.x.dtype).removeprefix("torch.")},
            "public": federation.server.roster.members[number].public,
            **({"columns": [dict(column) for column in now.columns]} if now.columns else {}),
        }
    files.close()
    ordered = {client.name: known[client.name] for client in clients}
    told = {"classes": federation.scenario.classes, "read_by": READ_BY, "files": files.checksums, "clients": ordered}
    write_text(folder / MODELS, json.dumps(told))


def _models(federation: Federation) -> Iterator[tuple[int, nn.Module, tuple[int, bytes]]]:
    """Every client's number, its personal model, and what tells it from models with other numbers.

    The module is one for all of a family, with the numbers of the client that is told: it is to be read at once.
    """
    simulation, filled = federation.simulation, dict[int, nn.Module]()
    for ids in simulation.groups_of(lambda number: True):
        index, _ = simulation.home[ids[0]]
        family = simulation.family_states[index].family
        if index not in filled:
            filled[index] = copy_of(family.template).cpu().eval()
        ((received, _),) = simulation.looks({ids: federation.server.instructions(ids)})
        for number, row in zip(ids, received.rows.cpu(), strict=True):
            family.layout.fill(filled[index], row)
            numbers = hashlib.blake2b(bits_of(row[: family.layout.trained])).digest()
            yield number, model_of(filled[index]), (index, numbers)


class _Files:
    """A file a client. They are not synced one by one, which takes long: they can be made again from the checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checksums: dict[str, str] = {}  # of files that are of more than one client

    def write(self, number: int, tensors: Mapping[str, Tensor], key: tuple[int, bytes]) -> dict[str, Any]:
        """Where a client's tensors are."""
        file = f"{number:05d}.safetensors"
        return {"file": file, "sha256": write_tensors(self.folder / file, tensors, sync=False)}

    def close(self) -> None:
        """Nothing is open."""


class _Stacks:
    """Files of many clients of one family, each tensor stacked, (k, ...); models with the same numbers once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checksums: dict[str, str] = {}
        self._known: dict[tuple[int, bytes], dict[str, Any]] = {}
        self._open: list[dict[str, Tensor]] = []
        self._family, self._bytes = -1, 0

    def write(self, number: int, tensors: Mapping[str, Tensor], key: tuple[int, bytes]) -> dict[str, Any]:
        """Where a client's tensors are; `key` is the number of its family and what its numbers hash to."""
        if key not in self._known:
            if key[0] != self._family or self._bytes > _TOGETHER:
                self.close()
            self._family = key[0]
            self._known[key] = {"file": f"stack-{len(self.checksums):05d}.safetensors", "row": len(self._open)}
            self._open.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
            self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        return self._known[key]

    def close(self) -> None:
        """Write the models that wait for others of their file."""
        if self._open:
            stacked = {name: torch.stack([each[name] for each in self._open]) for name in self._open[0]}
            file = f"stack-{len(self.checksums):05d}.safetensors"
            self.checksums[file] = write_tensors(self.folder / file, stacked, sync=False)
        self._open, self._bytes = [], 0


class FrozenParts:
    """Files of what is frozen in clients' models, one for all that have the same numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[bytes, dict[str, str]] = {}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The file that holds these, and its checksum."""
        numbers = hashlib.blake2b()
        for name, tensor in tensors.items():
            numbers.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            numbers.update(bits_of(tensor))
        key = numbers.digest()
        if key not in self._known:
            file = f"frozen-{len(self._known):05d}.safetensors"
            self._known[key] = {"file": file, "sha256": write_tensors(self.folder / file, tensors, sync=False)}
        return self._known[key]


def load_model(folder: str | Path, client: str, *, trust: bool = False) -> nn.Module:
    """A client's personal model from a finished run: an ordinary module in eval mode, ready to use.

    The code of the model is imported, and with it a scenario's own file. From a run directory that you did not make on
    this machine that is refused unless you say `trust=True`.
    """
    place, client = Path(folder), str(client)
    settings, path = read_settings(place), place / MODELS
    try:
        text = path.read_bytes()
        known = json.loads(text)
    except (OSError, ValueError) as error:
        raise Damaged(f"'{folder}' holds no models ({error}); finish the run first: fedquilt resume {folder}") from None
    if (place / "summary.json").is_file():  # the run is finished
        check(path, digest(text), sealed(place, settings["format"]).get(MODELS))
    if client not in known["clients"]:
        some = ", ".join(list(known["clients"])[:8])
        raise KeyError(f"'{folder}' has no client '{client}'; it has {some}")
    entry = known["clients"][client]
    files = [entry, *([entry["frozen"]] if "frozen" in entry else [])]
    tensors: dict[str, Tensor] = {}
    for each in files:
        checksum = known["files"][each["file"]] if "row" in each else each.get("sha256")
        read = read_tensors(path.with_name(Path(each["file"]).name), checksum)
        tensors |= {n: t[each["row"]].clone() for n, t in read.items()} if "row" in each else read
    own = split_address(settings["scenario"].get("file", ""))
    if own is not None and own[0].is_file():
        check_file(own[0], trust)
        load_file(own[0])  # its models may be of classes in there
    method = method_from(settings["method"], trust)
    member = ClientInfo(client, entry["samples"], entry["traits"], tuple(entry["labels"]), {}, entry.get("public", 0))
    builder = builder_from_text(entry["builder"], trust)
    held = method.parts(builder(), member, known["classes"]).module()
    if known.get("read_by") == READ_BY and entry["code"] != ClassCode()(builder, model_of(held)):
        warnings.warn(
            f"the code of the model of client '{client}' was changed since '{folder}' was written: it may not compute "
            "what it did",
            stacklevel=2,
        )
    model = model_of(held)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise Damaged(
            f"the model of client '{client}' in '{folder}' does not fit the code that builds it now ({error}); put the "
            "code back that the run was made with"
        ) from None
    return model.eval()
