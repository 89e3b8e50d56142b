"""A run on disk: settings, rows as they come, plans, traffic, checkpoints, and each client's model. No pickles.

A run directory holds `run.toml` (everything needed to repeat it), `metrics.jsonl`, `plans.jsonl`, `traffic.jsonl`,
`summary.json`, `confusion.json`, `checkpoint/` and `models/`. Lines are appended as rounds finish; a checkpoint notes how
long the files were, so that what a kill left behind it is cut off before the run goes on.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import platform
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedquilt.checkpoint import Damaged, federation_state, load, restore_federation, save, write_text
from fedquilt.client import ModelBuilder
from fedquilt.federation import Federation, RoundReport
from fedquilt.messages import Member
from fedquilt.methods import METHODS, Method
from fedquilt.results import Evaluation, Row
from fedquilt.scenario import Scenario
from fedquilt.sharing import MERGES, Plan, Rule

METRICS, PLANS, TRAFFIC = "metrics.jsonl", "plans.jsonl", "traffic.jsonl"
FORMAT = 1


class RunFolder:
    """The directory of one run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._plan: Plan | None = None
        self._checkpointed = -1
        self._started = datetime.now(UTC).isoformat(timespec="seconds")

    # --- writing -----------------------------------------------------------------------------------------------------

    def start(self, federation: Federation, options: Mapping[str, Any]) -> None:
        """Make the directory and write `run.toml`; a directory that holds anything else is refused."""
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise FileExistsError(
                f"'{self.folder}' is not empty; give another --out, or go on with it: fedquilt resume {self.folder}"
            )
        with self._room():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.settings(federation, options)

    def settings(self, federation: Federation, options: Mapping[str, Any]) -> None:
        """Write `run.toml`."""
        write_text(self.folder / "run.toml", to_toml({**describe(federation, options), "started": self._started}))

    def round(self, federation: Federation, report: RoundReport) -> None:
        """Append a finished round."""
        names = [client.name for client in federation.scenario.clients]
        up, down = report.traffic.bytes_up.tolist(), report.traffic.bytes_down.tolist()
        moved = {
            "round": report.round,
            "up": {names[i]: up[i] for i in report.participants},
            "down": {names[i]: down[i] for i in report.participants},
        }
        with self._room():
            for evaluation in report.evaluations:
                self._append(METRICS, *evaluation.rows())
            if self._plan is None or self._plan != report.plan:
                self._plan = report.plan
                self._append(PLANS, {"round": report.round, **report.plan.to_json()})
            self._append(TRAFFIC, moved)

    def checkpoint(self, federation: Federation, more: Mapping[str, Any]) -> None:
        """Keep all that is needed to go on from here to the same bits."""
        if self._checkpointed == federation.round:
            return
        tensors: dict[str, torch.Tensor] = {}
        text = federation_state(federation, tensors)
        lengths = {name: self._length(name) for name in (METRICS, PLANS, TRAFFIC)}
        with self._room():
            save(self.folder / "checkpoint", tensors, {**text, "lengths": lengths, "more": dict(more)})
        self._checkpointed = federation.round

    def finish(self, federation: Federation, summary: Mapping[str, Any], last: list[Evaluation]) -> None:
        """Write what a finished run is read for: confusion counts, every client's model, and the summary."""
        tables: dict[str, dict[str, Any]] = {client.name: {} for client in federation.scenario.clients}
        for evaluation in last:
            if evaluation.split == "test":
                for name, counts in zip(evaluation.clients, evaluation.counts.tolist(), strict=True):
                    tables[name][evaluation.readout] = counts
        found = {"labels": list(federation.scenario.label_names), "clients": tables}
        with self._room():
            write_text(self.folder / "confusion.json", json.dumps(found))
            self._models(federation)
            write_text(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")

    def _models(self, federation: Federation) -> None:
        folder = self.folder / "models"
        folder.mkdir(exist_ok=True)
        known = {}
        for number, client in enumerate(federation.scenario.clients):
            file = f"{number:05d}.safetensors"
            state = federation.model(client.name).state_dict()
            save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}, folder / file)
            now = client.at(federation.round)
            known[client.name] = {
                "file": file,
                "builder": builder_to_text(now.model),
                "traits": dict(now.traits),
                "labels": list(now.labels),
                "samples": now.samples,
            }
        write_text(folder / "models.json", json.dumps({"classes": federation.scenario.classes, "clients": known}))

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _length(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.is_file() else 0

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Turn a full disk into a sentence."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOSPC and "No space left" not in str(error):
                raise
            kept = f"the last checkpoint, of round {self._checkpointed}, is whole" if self._checkpointed > 0 else ""
            raise OSError(
                errno.ENOSPC,
                f"the disk is full, so '{self.folder}' could not be written; {kept or 'no round was kept yet'}; free some "
                f"space and go on with: fedquilt resume {self.folder}",
            ) from error

    # --- reading -----------------------------------------------------------------------------------------------------

    def read_settings(self) -> dict[str, Any]:
        """`run.toml`; what is not a run directory is refused."""
        path = self.folder / "run.toml"
        if not path.is_file():
            raise Damaged(f"'{self.folder}' is not a run directory: it has no run.toml; it was left as it is")
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise Damaged(f"'{path}' is not TOML ({error}); it was left as it is") from None
        if found.get("format") != FORMAT or "scenario" not in found or "method" not in found:
            raise Damaged(f"'{path}' was not written by this version of fedquilt; it was left as it is")
        return found

    @property
    def finished(self) -> bool:
        """Whether the run went to its end."""
        return (self.folder / "summary.json").is_file()

    def restore(self, federation: Federation) -> dict[str, Any]:
        """Put a federation where the last checkpoint was, and cut off what came after it; what the caller had added."""
        settings = self.read_settings()
        if settings["fingerprint"] != fingerprint(federation.scenario):
            raise Damaged(
                f"the data of scenario '{federation.scenario.name}' are not those that '{self.folder}' was run on; "
                "it was left as it is"
            )
        found = load(self.folder / "checkpoint")
        lengths = {} if found is None else found[1]["lengths"]
        for name in (METRICS, PLANS, TRAFFIC):
            if self._length(name) < lengths.get(name, 0):
                raise Damaged(f"'{self.folder / name}' is shorter than it was at the checkpoint; it was left as it is")
        if found is not None:
            restore_federation(federation, *found)
        for name in (METRICS, PLANS, TRAFFIC):
            if (self.folder / name).is_file():
                with (self.folder / name).open("r+b") as file:
                    file.truncate(lengths.get(name, 0))
        plans = self.lines(PLANS)
        self._plan = Plan.from_json(plans[-1]) if plans else None
        self._checkpointed = federation.round
        return {} if found is None else dict(found[1]["more"])

    def lines(self, name: str) -> list[Row]:
        """The lines of a file; one that a kill cut short is left out."""
        path = self.folder / name
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines()]


def load_model(folder: str | Path, client: str) -> nn.Module:
    """A client's personal model from a finished run: an ordinary module in eval mode, ready to use."""
    place = Path(folder)
    try:
        known = json.loads((place / "models" / "models.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(f"'{folder}' holds no models ({error}); finish the run first: fedquilt resume {folder}") from None
    if client not in known["clients"]:
        some = ", ".join(list(known["clients"])[:8])
        raise KeyError(f"'{folder}' has no client '{client}'; it has {some}")
    entry = known["clients"][client]
    settings = RunFolder(place).read_settings()
    method = method_from(settings["method"])
    member = Member(client, entry["samples"], entry["traits"], tuple(entry["labels"]), {})
    model = method.wrap(builder_from_text(entry["builder"])(), member, known["classes"])
    model.load_state_dict(load_file(place / "models" / entry["file"]))
    return model.eval()


# --- a run's settings as text ------------------------------------------------------------------------------------------


def describe(federation: Federation, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything needed to repeat a run, as plain values."""
    from fedquilt import __version__

    scenario = federation.scenario
    return {
        "format": FORMAT,
        "scenario": {"title": scenario.name, **scenario.origin},
        "method": method_to(federation.method),
        "seed": federation.seed,
        "training": asdict(federation.training),
        "readouts": [readout.name for readout in federation.readouts],
        "device": str(federation.device),
        **options,
        "engine": ",".join(federation.fleet.engines) or options.get("engine", "auto"),
        "clients": [client.name for client in scenario.clients],
        "label_names": list(scenario.label_names),
        "fingerprint": fingerprint(scenario),
        "versions": {
            "fedquilt": __version__,
            "commit": _commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def method_to(method: Method) -> dict[str, Any]:
    """A method as its name and settings, and where its code is unless it is one of the library's."""
    text: dict[str, Any] = {"name": method.name, "settings": {f.name: _plain(getattr(method, f.name)) for f in fields(method)}}
    if METHODS.get(method.name) is not type(method):
        text["class"] = f"{type(method).__module__}:{type(method).__qualname__}"
    return text


def method_from(text: Mapping[str, Any]) -> Method:
    """The method that `method_to` described."""
    kind = _find(text["class"]) if "class" in text else METHODS.get(text["name"])
    if kind is None:
        raise Damaged(f"the run's method '{text['name']}' is not known to this version of fedquilt")
    method: Method = kind(**{key: _tuples(value) for key, value in text.get("settings", {}).items()})
    return method


def rule_to(rule: Rule) -> dict[str, Any]:
    """A merge as its name and settings."""
    name = next((name for name, kind in MERGES.items() if type(rule) is kind), None)
    if name is None:
        raise ValueError(f"a run on disk can only use the merges {', '.join(MERGES)}, not {rule}")
    return {"name": name, **asdict(rule)}  # type: ignore[call-overload]


def builder_to_text(builder: ModelBuilder) -> dict[str, Any]:
    """Where a model's builder is: a function or class of a module, and its arguments; empty where it has no address."""
    inner: Any = builder
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    while isinstance(inner, partial):
        args, kwargs, inner = [*inner.args, *args], {**inner.keywords, **kwargs}, inner.func
    name, module = getattr(inner, "__qualname__", "<"), getattr(inner, "__module__", "__main__")
    plain = json.loads(json.dumps({"args": args, "kwargs": kwargs}, default=lambda _: "<")) if "<" not in name else None
    if plain is None or "<" in json.dumps(plain) or module == "__main__":
        return {}
    return {"address": f"{module}:{name}", **plain}


def builder_from_text(text: Mapping[str, Any]) -> ModelBuilder:
    """The builder that `builder_to_text` described."""
    if not text:
        raise Damaged(
            "this client's model was built by a function that cannot be found again (a lambda, or one of a script); "
            "build it yourself and load models/*.safetensors into it, or put the function into a module"
        )
    return partial(_find(text["address"]), *(_tuples(a) for a in text["args"]), **text["kwargs"])


def fingerprint(scenario: Scenario) -> str:
    """A checksum of who the clients are and what data they have."""
    digest = hashlib.sha256()
    for client in scenario.clients:
        for split in (client.train, client.validation, client.test):
            digest.update(repr((client.name, tuple(split.x.shape), float(split.x.double().sum()))).encode())
            digest.update(split.y.numpy().tobytes())
    return digest.hexdigest()


def _find(address: str) -> Any:
    module, _, name = address.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"a run on disk cannot keep the setting {value!r}; use numbers, texts, lists and tables")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _commit() -> str:
    try:
        here = Path(__file__).parent
        found = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Plain values as TOML; what is None is left out, since TOML has no word for it.

    >>> print(to_toml({"seed": 0, "method": {"name": "fedprox", "settings": {"mu": 0.1}}}))
    seed = 0
    <BLANKLINE>
    [method]
    name = "fedprox"
    <BLANKLINE>
    [method.settings]
    mu = 0.1
    <BLANKLINE>
    """
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not _skip(value)]
    text = "\n".join(lines) + ("\n" if lines else "")
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = f"{path}.{_key(key)}" if path else _key(key)
            text += f"\n[{name}]\n" + to_toml(value, name)
    return text


def _skip(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(part) for part in value if part is not None) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
