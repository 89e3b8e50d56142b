"""Every client's personal model in a run directory, and back."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedquilt._util.addresses import load_file
from fedquilt._util.checksums import check, digest, sealed
from fedquilt._util.files import write_text
from fedquilt._util.trust import check_file
from fedquilt.core.federation import Federation
from fedquilt.families.habits import bits_of, frozen_of
from fedquilt.families.parts import model_of
from fedquilt.interface.messages import ClientInfo
from fedquilt.runs.checkpoint import Damaged, read_tensors, write_tensors
from fedquilt.runs.code_digest import READ_BY, ClassCode
from fedquilt.runs.settings import builder_from_text, builder_to_text, method_from, read_settings
from fedquilt.scenarios.own import split_address

MODELS = "models/models.json"


def write_models(folder: Path, federation: Federation) -> None:
    """Write what each client ends with, and how its module is built; what is frozen once for all who have it alike."""
    place = folder / "models"
    place.mkdir(exist_ok=True)
    known: dict[str, dict[str, Any]] = {}
    frozen = FrozenParts(place)
    code = ClassCode()
    for number, client in enumerate(federation.scenario.clients):
        file, model = f"{number:05d}.safetensors", federation.model(client.name)
        # not synced one by one, which takes long with many clients: they can be made again from the checkpoint
        rest = frozen_of(model)
        checksum = write_tensors(
            place / file, {n: t for n, t in model.state_dict().items() if n not in rest}, sync=False
        )
        now = client.at(federation.round)
        known[client.name] = {
            "file": file,
            "sha256": checksum,
            **({"frozen": frozen.write(rest)} if rest else {}),
            "code": code(now.model, model),
            "builder": builder_to_text(now.model),
            "traits": dict(now.traits),
            "labels": list(now.labels),
            "samples": now.samples,
            "input": {"shape": list(now.train.x.shape[1:]), "dtype": str(now.train.x.dtype).removeprefix("torch.")},
            "public": federation.server.roster.members[number].public,
        }
    told = {"classes": federation.scenario.classes, "read_by": READ_BY, "clients": known}
    write_text(folder / MODELS, json.dumps(told))


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
    place = Path(folder)
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
    read = [read_tensors(path.with_name(Path(each["file"]).name), each.get("sha256")) for each in files]
    tensors = {name: tensor for each in read for name, tensor in each.items()}
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
