"""What everyone agrees on before a run, and what a client declares of itself, as text and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedquilt._util.toml import values_of
from fedquilt.core.terms import Terms
from fedquilt.deploy.device.client_folder import Allowed
from fedquilt.deploy.transport.wire import Refused
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import ClientInfo
from fedquilt.methods import Method
from fedquilt.methods.find import address_of, in_library, source_of
from fedquilt.privacy import Privacy
from fedquilt.runs.settings import method_to
from fedquilt.sharing import Compression
from fedquilt.tasks import task_from

Text = dict[str, Any]


def write_terms(terms: Terms) -> Text:
    """What everyone agrees on, as text; the samples that the server holds are files on every device.

    A method that is not the library's is named by its address (a file without its folder, which is nobody's business)
    and a checksum of its source.
    """
    kind, method = type(terms.method), method_to(terms.method)
    if in_library(terms.method.name) is not kind:
        source, _, name = address_of(kind).rpartition(":")
        where = Path(source).name if source.endswith(".py") else source
        told = {"name": method["name"], "settings": method["settings"]}
        method = told | {"class": f"{where}:{name}", "source": source_of(kind)}
    return {
        "method": method,
        "training": asdict(terms.training),
        "classes": terms.classes,
        "seed": terms.seed,
        **({} if terms.privacy is None else {"dp": terms.privacy.text}),
        **({"compress": text} if (text := terms.compress.text) else {}),
        **terms.task.stated,
    }


def read_terms(text: Mapping[str, Any], common: Any, public_test: Any, allowed: Allowed) -> Terms:
    """The terms that `write_terms` wrote, with the public samples that the device holds."""
    training = Training(**values_of(text["training"]))
    method = read_method(text["method"], allowed)
    task, privacy = task_from(text.get("task", {})), Privacy.of(text.get("dp"))
    compress, held = Compression.of(text.get("compress")), (common, public_test)
    return Terms(method, training, text["classes"], text["seed"], *held, privacy, task, compress=compress)


def read_method(text: Mapping[str, Any], allowed: Allowed) -> Method:
    """The method that a letter names: of the device's own library, or one that its owner allowed.

    Code that a server names is not looked for. An allowed method must be the very code that the server has.
    """
    shown = ascii(str(text.get("class", text["name"])))[:100]
    if "class" in text:
        found = allowed.get(str(text["class"]).rpartition(":")[2], ())
        kinds = [kind for kind, source in found if source == text.get("source")]
        if found and not kinds:
            raise Refused("other-code", shown)
    else:
        known = in_library(str(text["name"]))
        kinds = [] if known is None else [known]
    if not kinds:
        raise Refused("unknown-method", shown)
    return kinds[0](**values_of(text["settings"]))


def write_member(member: ClientInfo) -> Text:
    """What a client declares, as text."""
    return {
        "name": member.name,
        "samples": member.samples,
        "traits": dict(member.traits),
        "labels": list(member.labels),
        "public": list(member.public),
        "constant": list(member.constant),
        "units": {unit: [list(shape) for shape in signature] for unit, signature in member.units.items()},
        "statistics": dict(member.statistics),
        "kinds": {unit: list(kinds) for unit, kinds in member.kinds.items()},
    }


def read_member(text: Mapping[str, Any]) -> ClientInfo:
    """The declaration that `write_member` wrote."""
    units = {str(u): tuple(tuple(int(n) for n in shape) for shape in s) for u, s in text["units"].items()}
    traits = {str(k): str(v) for k, v in text["traits"].items()}
    labels = tuple(int(n) for n in text["labels"])
    public, constant = tuple(int(n) for n in text["public"]), tuple(str(name) for name in text["constant"])
    kinds = {str(unit): tuple(str(kind) for kind in found) for unit, found in text["kinds"].items()}
    statistics = {str(unit): int(n) for unit, n in text["statistics"].items()}
    name, samples = str(text["name"]), int(text["samples"])
    return ClientInfo(name, samples, traits, labels, units, public, kinds, statistics, constant)
