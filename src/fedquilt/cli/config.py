"""A run as a file: `fedquilt run config.toml` (or .yaml), and `fedquilt run runs/x/run.toml` to repeat one.

A configuration is a `run.toml` in which all but the scenario and the method may be left out:

    scenario = "digits"             # or path/to/file.py:function, from the file's own folder
    method = "fedprox"              # or path/to/file.py:Class
    rounds = 10
    readouts = ["received", "knn"]

    [training]
    lr = 0.1

What is said on the command line counts more. Settings of the scenario and the method stand in tables of their own:
`scenario = {name = "digits", settings = {clients = 8}}`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt._util.suggest import did_you_mean
from fedquilt._util.toml import values_of
from fedquilt.cli.output import Refused
from fedquilt.cli.request import Choices, Request, check_hardware, rounds_of
from fedquilt.cli.scenario import find
from fedquilt.cli.settings import assign, spec_of

if TYPE_CHECKING:
    from fedquilt.methods import Method
    from fedquilt.scenario import Scenario

ENDINGS = (".toml", ".yaml", ".yml")
OPTIONS = {
    "rounds": int, "seed": int, "device": str, "engine": str, "clients_at_once": int, "threads": int,
    "evaluate_every": int, "alone": bool, "everyone": bool, "unseen": int, "checkpoint_every": int, "out": str,
}  # fmt: skip
_TABLES = ("scenario", "method", "training", "merge", "readouts", "attack", "dp", "secure", "compress")
# what a run notes of itself, which decides nothing when it is repeated
_NOTED = (
    "format", "engines", "shards", "clients", "label_names", "fingerprint", "started", "extended",
    "model_code", "versions",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What a file says of a run."""

    path: Path
    scenario: str
    scenario_seed: int | None
    scenario_settings: Mapping[str, Any]
    method: Method
    training: Mapping[str, Any]
    readouts: tuple[str, ...]
    merge: Mapping[str, Any]
    attack: Mapping[str, Any]
    dp: Mapping[str, Any]
    secure: Mapping[str, Any] | None
    compress: Mapping[str, Any]
    options: Mapping[str, Any]  # of the command, by the names of its parameters
    fingerprint: str = ""  # of the samples that the run was run on, where it was one

    def request(self, choices: Choices) -> Request:
        """What is to be run: what the file says, and on top what was said on the command line."""
        with _sensible(self.path):
            return self._request(choices)

    def changed(self, order: Request, made: Scenario) -> bool:
        """Whether the scenario of a run that is to be repeated as it was is made of other samples by now."""
        from fedquilt.runs.settings import fingerprint

        same = order.scenario_settings == self.scenario_settings and not order.choices.unseen
        return bool(self.fingerprint) and same and fingerprint(made) != self.fingerprint

    def _request(self, choices: Choices) -> Request:
        from fedquilt.attacks import attack_of
        from fedquilt.engines.settings import Training
        from fedquilt.privacy import Privacy
        from fedquilt.runs.rebuilding import make_readouts
        from fedquilt.secure import SecureSums
        from fedquilt.sharing import Compression, merge_of

        check_hardware(choices)
        merge = {"name": choices.merge} if choices.merge != self.merge.get("name", "mean") else dict(self.merge)
        kind = merge.pop("name", "mean")
        make = merge_of(kind)
        source, name = find(self.scenario), self.method.name
        specs = {"scenario": spec_of(source.builder), "training": spec_of(Training), "merge": spec_of(make)}
        attack = {"name": choices.attack} if choices.attack != self.attack.get("name") else dict(self.attack)
        named = attack.pop("name", None)
        lie = None if named is None else attack_of(named)
        if lie is not None:
            specs["attack"] = spec_of(lie)
        specs["dp"] = spec_of(Privacy)
        specs["secure"] = spec_of(SecureSums)
        specs["compress"] = spec_of(Compression)
        rounds, words = rounds_of(choices, specs["training"])
        placed = assign(words, {**specs, name: spec_of(type(self.method))}, [name])
        if rounds is not None:
            placed["training"]["rounds"] = rounds
        readouts = tuple(choices.readouts.split(",")) if choices.readouts else self.readouts
        return Request(
            source,
            (replace(self.method, **placed[name]),),
            {**self.scenario_settings, **placed["scenario"]},
            {**self.training, **placed["training"]},
            make_readouts(readouts or ("received", "adapted")),
            make(**{**values_of(merge), **placed["merge"]}),
            choices,
            None if lie is None else lie(**{**attack, **placed["attack"]}),
            Privacy(**_promised(self.dp, placed["dp"])) if self.dp or placed["dp"] else None,
            SecureSums(**{**(self.secure or {}), **placed["secure"]})
            if choices.secure or self.secure is not None or placed["secure"]
            else None,
            Compression(**_compressed(self.compress, placed["compress"])),
        )


def _promised(told: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The privacy of a file, with what was said on top; another promise has another noise, which is to be found."""
    kept = {key: value for key, value in told.items() if key != "noise" or not said or "epsilon" not in told}
    return {**kept, **said}


def _compressed(told: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The compression of a file, with what was said on top; how much is kept goes with topk alone."""
    return {**{key: value for key, value in told.items() if key != "kept" or said.get("up", "topk") == "topk"}, **said}


def read_config(path: Path, trust: bool) -> Config:
    """The configuration in a file; code that the `run.toml` of somebody else names is refused as `resume` does."""
    with _sensible(path):
        return _config(path, _read(path), trust)


@contextmanager
def _sensible(path: Path) -> Iterator[None]:
    """Say in a sentence that a file has values of another kind than they should be."""
    try:
        yield
    except (TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{path} does not say what it should: {' '.join(str(error).split())}") from error


def _config(path: Path, known: Mapping[str, Any], trust: bool) -> Config:
    """What a file's settings mean."""
    from fedquilt.engines.threads import as_begun

    for key in known:
        if key not in (*OPTIONS, *_TABLES, *_NOTED):
            raise Refused(f"{path}: {did_you_mean(key, [*OPTIONS, *_TABLES], 'setting of a run')}")
    for key in ("scenario", "method"):
        if key not in known:
            raise Refused(f'{path} does not say which {key}; write {key} = "NAME" (fedquilt list {key}s)')
    for key, kind in OPTIONS.items():
        if key in known and (not isinstance(known[key], kind) or isinstance(known[key], bool) is not (kind is bool)):
            raise Refused(f"{path}: {key} = {known[key]!r} must be {_KINDS[kind]}")
    scenario, method = (_table(known[key]) for key in ("scenario", "method"))
    merge, readouts = known.get("merge", "mean"), known.get("readouts", ())
    merge = _table(merge)
    attack = _table(known["attack"]) if "attack" in known else {}
    options = {key: known[key] for key in OPTIONS if key in known and key != "out"} | {
        "merge": merge.get("name", "mean"),
        "attack": attack.get("name"),
    }
    if "format" in known and "threads" in known:  # a run that was kept, maybe on a machine with more cores
        options["threads"] = as_begun(known["threads"])
    return Config(
        path,
        _address(path, scenario, trust or "format" not in known),
        scenario.get("seed"),
        values_of(scenario.get("settings", {})),
        _method(path, method, trust or "format" not in known),
        values_of(known.get("training", {})),
        (readouts,) if isinstance(readouts, str) else tuple(readouts),
        merge,
        attack,
        values_of(known.get("dp", {})),
        _secure(path, known.get("secure", False)),
        _compress(path, known.get("compress", {})),
        options | ({"out_dir": Path(known["out"])} if "out" in known else {}),
        "" if known.get("unseen") else str(known.get("fingerprint", "")),  # who is held out is not among the samples
    )


_KINDS = {int: "a whole number", str: "a text", bool: "true or false"}


def _secure(path: Path, told: Any) -> dict[str, Any] | None:
    """Settings of secure sums; None where they are not asked for."""
    if isinstance(told, Mapping):
        return dict(told)
    if not isinstance(told, bool):
        raise Refused(f"{path}: secure = {told!r} must be true, or a table [secure] of settings")
    return {} if told else None


def _compress(path: Path, told: Any) -> dict[str, Any]:
    """Settings of compression, or what clients send alone."""
    if not isinstance(told, str | Mapping):
        raise Refused(f'{path}: compress = {told!r} must be a kind such as "int8", or a table [compress] of settings')
    return {"up": told} if isinstance(told, str) else dict(told)


def _table(told: Any) -> dict[str, Any]:
    """What is said of a thing, or its name alone, as a table."""
    if not isinstance(told, str | Mapping):
        raise Refused(f"a scenario, method, merge or attack is a name or a table with a name, not {told!r}")
    return {"name": told} if isinstance(told, str) else dict(told)


def _read(path: Path) -> dict[str, Any]:
    """A file's settings; YAML where its name says so."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give a scenario and a method, or a run's or your own .toml")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except ValueError as error:
            raise Refused(f"{path} is not TOML: {error}") from None
    try:
        import yaml
    except ModuleNotFoundError:
        raise Refused(
            f"{path} needs PyYAML, which is not installed: pip install pyyaml; or write it as .toml"
        ) from None
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Refused(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Refused(f"{path} says nothing of a run; write lines such as scenario: digits")
    return found


def _address(path: Path, scenario: Mapping[str, Any], trust: bool) -> str:
    """A scenario's name, or its file, which is looked for from the configuration's own folder."""
    from fedquilt._util.trust import check_file
    from fedquilt.scenarios.own import data_at, split_address

    told = scenario.get("name") or scenario.get("file") or scenario.get("data")
    if told is None:
        title = scenario.get("title", "a scenario")
        raise Refused(
            f"{path}: '{title}' was made by code and has no name; put that code into a function of a file, and write "
            'scenario = "path/to/file.py:function"'
        )
    place, samples = split_address(str(told)), data_at(str(told))
    if samples is not None:
        return str(path.parent / samples)
    if place is None:
        return str(told)
    file = path.parent / place[0]
    check_file(file, trust)
    return f"{file}:{place[1]}"


def _method(path: Path, text: Mapping[str, Any], trust: bool) -> Method:
    """A method by its name or address with settings, or as a `run.toml` has it."""
    from fedquilt.runs.rebuilding import make_method
    from fedquilt.runs.settings import method_from

    wrong = sorted(text.keys() - {"name", "settings", "class", "package"})
    if wrong or "name" not in text:
        told = did_you_mean(wrong[0], ["name", "settings"], "entry of a method") if wrong else "the method has no name"
        raise Refused(f"{path}: {told}; settings stand in [method.settings]")
    if "class" in text or "package" in text:
        return method_from(text, trust)
    file, colon, kind = str(text["name"]).partition(".py:")
    word = f"{path.parent / file}{colon}{kind}" if colon else file
    return make_method(word, values_of(text.get("settings", {})))
