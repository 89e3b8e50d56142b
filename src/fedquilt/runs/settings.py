"""A run's settings as text: `run.toml` holds everything needed to repeat it, as plain values."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedquilt._util.addresses import inside, put_together, taken_apart
from fedquilt._util.toml import values_of
from fedquilt._util.trust import Untrusted, module_of
from fedquilt.client import ModelBuilder, Split
from fedquilt.core.federation import Federation
from fedquilt.core.ranked_clients import RankedSimulation
from fedquilt.engines.settings import Training
from fedquilt.families.common import ByTrait
from fedquilt.methods import METHODS, Method
from fedquilt.methods.composed import PLUS, composed, core_of
from fedquilt.methods.find import address_of, class_at, registered
from fedquilt.readouts import named
from fedquilt.runs.checkpoint import Damaged
from fedquilt.runs.rule_texts import attack_to, plain
from fedquilt.scenario import Scenario
from fedquilt.scenarios.own import split_address

FORMAT = 2
READABLE = (1, 2)  # in format 1 nothing but the checkpoint has checksums
# what settings are, and the least they can be
_KINDS: dict[str, tuple[type, int]] = {
    "seed": (int, 0), "threads": (int, 1), "evaluate_every": (int, 1), "checkpoint_every": (int, 1),
    "clients_at_once": (int, 1), "alone": (bool, 0), "everyone": (bool, 0), "unseen": (int, 0),
    "device": (str, 0), "engine": (str, 0), "readouts": (list, 0),
    "scenario": (dict, 0), "method": (dict, 0), "training": (dict, 0), "merge": (dict, 0), "attack": (dict, 0),
    "compress": (dict, 0),
}  # fmt: skip
# what the results of a run follow from
_DECIDES = ("scenario", "method", "seed", "training", "merge", "readouts", "evaluate_every", "fingerprint")
_DECIDES_WHERE_ASKED_FOR = ("attack", "dp", "secure", "compress", "task", "everyone")


def describe(
    federation: Federation, options: Mapping[str, Any], checksum: str, code: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything needed to repeat a run, as plain values; `checksum` is the `fingerprint` of its scenario, `code` the
    `model_code` that it began with."""
    from fedquilt import __version__

    scenario, origin = federation.scenario, dict(federation.scenario.origin)
    if "settings" in origin:
        origin["settings"] = plain(origin["settings"])
    return {
        "format": FORMAT,
        "scenario": {"title": scenario.name, **origin},
        "method": method_to(federation.method),
        **({} if federation.attack is None else {"attack": attack_to(federation.attack)}),
        "seed": federation.seed,
        "training": asdict(federation.training),
        "readouts": [readout.name for readout in federation.readouts],
        **({} if federation.terms.secure is None else {"secure": federation.terms.secure.text}),
        **({"compress": text} if (text := federation.terms.compress.text) else {}),
        **({"everyone": True} if federation.terms.everyone else {}),
        "device": str(federation.device),
        **({} if federation.terms.privacy is None else {"dp": plain(federation.terms.privacy.text)}),
        **options,
        "engines": federation.backend.engines,
        "threads": torch.get_num_threads(),
        **({"shards": federation.backend.ranks.shards} if isinstance(federation.backend, RankedSimulation) else {}),
        "clients": [client.name for client in scenario.clients],
        "label_names": list(scenario.label_names),
        **scenario.task.stated,
        "fingerprint": checksum,
        "model_code": code,
        "versions": {
            "fedquilt": __version__,
            "commit": _commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def identity(settings: Mapping[str, Any]) -> str:
    """A checksum of those settings that the results of a run follow from; a checkpoint carries it."""
    decisive = {key: settings.get(key) for key in _DECIDES}
    decisive |= {key: settings[key] for key in _DECIDES_WHERE_ASKED_FOR if key in settings}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def read_settings(folder: Path) -> dict[str, Any]:
    """`run.toml`; what is not a run directory is refused."""
    path = folder / "run.toml"
    if not path.is_file():
        raise Damaged(f"'{folder}' is not a run directory: it has no run.toml; it was left as it is")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"'{path}' is not TOML ({error}); it was left as it is") from None
    if found.get("format") not in READABLE or "scenario" not in found or "method" not in found:
        raise Damaged(f"'{path}' was not written by this version of fedquilt; it was left as it is")
    for key, (kind, least) in _KINDS.items():
        value = found.get(key)
        right = isinstance(value, kind) and isinstance(value, bool) is (kind is bool)
        if key in found and (not right or (isinstance(value, int) and value < least)):
            raise Damaged(f"'{path}': {key} = {value!r} cannot be; it was left as it is")
    return found


def check_can_be_kept(federation: Federation) -> None:
    """Refuse, before any work is done, what could not be built again from text."""
    method_to(federation.method)
    for readout in federation.readouts:
        if named(readout.name) != readout:
            raise ValueError(
                f"a run on disk can only use read-outs that have a name, not {readout}; register it in READOUTS, or "
                "run without `out`"
            )


# --- methods, training ------------------------------------------------------------------------------------------------


def method_to(method: Method) -> dict[str, Any]:
    """A method as its name and settings; unless it is the library's, with its package or with where its class is."""
    settings = {f.name: getattr(method, f.name) for f in fields(method) if f.init}
    usual = {f.name for f in fields(method) if f.default is None and f.default is not MISSING}
    kept = {name: plain(value) for name, value in settings.items() if value is not None or name not in usual}
    text: dict[str, Any] = {"name": method.name, "settings": kept}
    core = core_of(type(method))
    if METHODS.get(core.name) is core:
        return text
    brought = registered().get(core.name)
    if brought is not None and brought.load() is core:
        return text | {"package": brought.package}
    return text | {"class": address_of(core)}


def method_from(text: Mapping[str, Any], trust: bool = False) -> Method:
    """The method that `method_to` described; one of the user's own only if `_util.trust` allows it.

    >>> from fedquilt.methods import FedPer
    >>> method_from(method_to(FedPer(personal=2)))
    FedPer(personal=2)
    """
    kind = composed(_method_class(text, trust), *text["name"].split(PLUS)[1:])
    settings = values_of(text.get("settings", {}))
    gone = sorted(settings.keys() - {f.name for f in fields(kind) if f.init})
    if gone:
        raise Damaged(f"the run's method '{text['name']}' had a setting '{gone[0]}', which it has no more; put it back")
    return kind(**settings)


def _method_class(text: Mapping[str, Any], trust: bool) -> type[Method]:
    """The class of the method that a text describes, without what was added to it."""
    name = text["name"].partition(PLUS)[0]
    if "class" in text:
        try:
            return class_at(str(text["class"]), trust)
        except Untrusted:
            raise
        except (ValueError, OSError) as error:
            raise Damaged(f"the run's method '{name}' is not to be had here: {error}") from error
    if "package" in text:
        brought = registered().get(name)
        if brought is None or brought.package != text["package"]:
            raise Damaged(
                f"the run's method '{name}' is of the package '{text['package']}', which does not bring it along here; "
                "install the package, in the version that the run was made with"
            )
        return brought.load()
    if name not in METHODS:
        raise Damaged(f"the run's method '{name}' is not known to this version of fedquilt")
    return METHODS[name]


def training_from(text: Mapping[str, Any]) -> Training:
    """The training settings of a `run.toml`."""
    return Training(**values_of(text))


# --- models -----------------------------------------------------------------------------------------------------------


def builder_to_text(builder: ModelBuilder) -> dict[str, Any]:
    """Where a model's builder is: a function or class of a module, and its arguments; empty where it has no address."""
    inner, args, kwargs = taken_apart(builder)
    name, module = getattr(inner, "__qualname__", "<"), getattr(inner, "__module__", "__main__")
    plain = json.loads(json.dumps({"args": args, "kwargs": kwargs}, default=lambda _: "<")) if "<" not in name else None
    if plain is None or "<" in json.dumps(plain) or module == "__main__":
        return {}
    return {"address": f"{module}:{name}", **plain}


def builder_from_text(text: Mapping[str, Any], trust: bool = False) -> ModelBuilder:
    """The builder that `builder_to_text` described: a class of modules, or a function that is declared to give one.

    Nothing else is called, and no module imported but as `_util.trust` allows, so that a directory from elsewhere
    cannot name a function that does something else.

    >>> builder_from_text({"address": "os:system", "args": ["true"], "kwargs": {}})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedquilt._util.checksums.Damaged: 'os:system' builds no model: it is no nn.Module, nor a function declared...
    """
    if not text:
        raise Damaged(
            "this client's model was built by a function that cannot be found again (a lambda, or one of a script); "
            "build it yourself and load models/*.safetensors into it, or put the function into a module"
        )
    found = _find(text["address"], trust)
    if not _gives_module(found):
        raise Damaged(
            f"'{text['address']}' builds no model: it is no nn.Module, nor a function declared '-> nn.Module'"
        )
    return put_together(found, text["args"], text["kwargs"])


def _gives_module(found: Any) -> bool:
    if not isinstance(found, type):
        try:
            found = typing.get_type_hints(found).get("return")
        except (NameError, TypeError, AttributeError):
            return False
    return isinstance(found, type) and issubclass(found, nn.Module)


def _find(address: str, trust: bool) -> Any:
    """What is at `module:name`; None where there is nothing."""
    module, _, name = address.partition(":")
    if not all(module.split(".")):
        return None
    try:
        return inside(module_of(module, trust), name)
    except ModuleNotFoundError as error:
        raise Damaged(
            f"the model is built by '{address}', and the module '{error.name}' cannot be imported here; install it, or "
            "put its folder on PYTHONPATH"
        ) from error
    except ImportError:
        return None


def named_code(federation: Federation) -> tuple[list[Path], list[str]]:
    """The files and the modules that a run of this federation names as places of its code."""
    place = split_address(federation.scenario.origin.get("file", ""))
    clients = federation.scenario.clients
    changed = (change.model for client in clients for change in client.changes.values() if change.model is not None)
    builders = {id(builder): builder for builder in (*(client.model for client in clients), *changed)}
    addresses = [builder_to_text(builder).get("address", "") for builder in builders.values()]
    own = method_to(federation.method).get("class", "")
    source = own.rpartition(":")[0]
    modules = {address.partition(":")[0] for address in addresses} | ({source} if not source.endswith(".py") else set())
    files = [*([] if place is None else [place[0]]), *([Path(source)] if source.endswith(".py") else [])]
    return files, sorted(modules - {"", "__main__"})


# --- data -------------------------------------------------------------------------------------------------------------


def fingerprint(scenario: Scenario) -> str:
    """A checksum of who the clients are, what they declare, and every sample there is."""
    digest = hashlib.sha256()

    def add(what: object, *splits: Split | None) -> None:
        digest.update(repr(what).encode())
        for split in splits:
            for part in () if split is None else (split.x, split.y):
                digest.update(repr((tuple(part.shape), part.dtype)).encode())
                digest.update(part.contiguous().numpy().data if part.numel() else b"")

    for client in scenario.clients:
        add((client.name, sorted(client.traits.items()), client.labels), client.train, client.validation, client.test)
        for start, change in client.changes.items():
            add((start, change.labels), change.train if isinstance(change.train, Split) else None)
    held = (scenario.common, scenario.public_test)
    said = "".join(("server", *map(str, scenario.task.stated.items())))
    add(said, *(samples for samples in held if not isinstance(samples, ByTrait)))
    for samples in held:
        if isinstance(samples, ByTrait):
            add((samples.trait, list(samples.forms)), *samples.forms.values())
    return digest.hexdigest()


def _commit() -> str:
    try:
        here = Path(__file__).parent
        found = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()
