"""Settings as words: `clients=18 lr=0.05 by.head=cohort` becomes values, each for the part that knows its name.

A key belongs to the scenario, to training, to the merge or to a method. Where two of them know it, it has to be said
which is meant: `training.share=0.5`, `fedprox.mu=0.1`. Those of privacy, secure sums and compression are always
said with their names: `dp.epsilon=8`, `secure.minimum=5`, `compress.up=int8`.
"""

from __future__ import annotations

import ast
import collections.abc
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedquilt._util.suggest import did_you_mean
from fedquilt._util.wording import settings_of
from fedquilt.cli.output import Refused

MANY = ("--set", "--sweep", "--traits")  # options that take several words
# parts whose settings are always said with their name: dp.noise is not the noise of a scenario
BY_NAME = ("dp", "secure", "compress")
_ELSEWHERE = {  # what settings are called in other places
    "learning_rate": "lr", "batch_size": "batch", "local_epochs": "epochs", "num_rounds": "rounds",
    "num_clients": "clients", "target": "label", "optimizer": "optimiser", "standardize": "standardise",
}  # fmt: skip
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def spread(words: Sequence[str]) -> list[str]:
    """Several settings after one `--set`, each with a `--set` of its own.

    >>> spread(["run", "digits", "--set", "clients=8", "noise=0.2", "--json"])
    ['run', 'digits', '--set', 'clients=8', '--set', 'noise=0.2', '--json']
    """
    found: list[str] = []
    option: str | None = None
    for word in words:
        if option is not None and "=" in word and not word.startswith("-") and found[-1] != option:
            found.append(option)
        elif "=" not in word or word.startswith("-"):
            option = word if word in MANY else None
        found.append(word)
    return found


def with_port(words: Sequence[str]) -> list[str]:
    """A `--watch` without a port gets one: 0, any that is free.

    >>> with_port(["run", "--watch", "digits"]), with_port(["--watch", "8000"])
    (['run', '--watch', '0', 'digits'], ['--watch', '8000'])
    """
    found: list[str] = []
    for at, word in enumerate(words):
        found.append(word)
        if word == "--watch" and not "".join(words[at + 1 : at + 2]).isdigit():
            found.append("0")
    return found


@dataclass(frozen=True)
class SettingSpec:
    """The settings one part of the work knows: their types and their defaults."""

    hints: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def spec_of(thing: Callable[..., Any]) -> SettingSpec:
    """The settings of a function or a dataclass.

    >>> from fedquilt.engines.settings import Training
    >>> spec_of(Training).hints["lr"]
    <class 'float'>
    """
    named = settings_of(thing)
    try:
        told = get_type_hints(thing.func if isinstance(thing, partial) else thing)
    except (NameError, TypeError):  # a user's annotations may name what is not there when the program runs
        told = {}
    defaults = {key: default for key, default in named.items() if default is not inspect.Parameter.empty}
    for key, value in getattr(thing, "__dataclass_fields__", {}).items():
        if callable(value.default_factory):
            defaults[key] = value.default_factory()
    guesses = {key: Any if defaults.get(key) is None else type(defaults[key]) for key in named}
    return SettingSpec({key: told.get(key, guesses[key]) for key in named}, defaults)


def assign(words: Sequence[str], specs: Mapping[str, SettingSpec], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each setting, as a value, for the part that knows it; `methods` names the parts that are methods.

    >>> specs = {"scenario": SettingSpec({"clients": int}), "fedprox": SettingSpec({"mu": float})}
    >>> assign(["clients=8", "mu=0.1"], specs, ["fedprox"])
    {'scenario': {'clients': 8}, 'fedprox': {'mu': 0.1}}
    """
    placed: dict[str, dict[str, Any]] = {name: {} for name in specs}
    for word in words:
        path, equals, text = word.partition("=")
        if not equals or not path or not text:
            raise Refused(f"'{word}' is not a setting; write key=value, as in --set lr=0.05")
        owners, key, inner = _owners(path.split("."), specs, methods)
        for owner in owners:
            spec = specs[owner]
            if inner is None:
                placed[owner][key] = convert(text, spec.hints[key], path)
            else:
                so_far = placed[owner].get(key, spec.defaults.get(key))
                entry = {inner: convert(text, _inside(spec.hints[key], path), path)}
                placed[owner][key] = {**(so_far if isinstance(so_far, Mapping) else {}), **entry}
    return placed


def _owners(
    path: list[str], specs: Mapping[str, SettingSpec], methods: Sequence[str]
) -> tuple[list[str], str, str | None]:
    """Which parts a dotted key is for, the key there, and the entry of a mapping where one is named."""
    groups = {**{name: [name] for name in specs}, "method": list(methods)}
    if path[0] in groups and len(path) > 1:
        within, path = groups[path[0]], path[1:]
    else:
        within = [name for name in specs if name not in BY_NAME]
    if len(path) > 2:
        raise Refused(f"'{'.'.join(path)}' has too many dots; a setting is key=value or key.entry=value")
    key, inner = path[0], path[1] if len(path) == 2 else None
    owners = [name for name in within if key in specs[name].hints]
    if not owners:
        raise Refused(_unknown(key, dict.fromkeys(k for name in within for k in specs[name].hints)))
    kinds = {"method" if name in methods else name for name in owners}
    if len(kinds) > 1:
        ways = " or ".join(f"{name}.{key}=..." for name in owners)
        raise Refused(f"'{key}' is a setting of more than one part: say {ways}")
    return owners, key, inner


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    """A sentence about a setting that nobody here knows: by its name elsewhere, or of another method."""
    from fedquilt.methods import METHODS

    if _ELSEWHERE.get(key) in known:
        return f"there is no setting '{key}'; here it is called '{_ELSEWHERE[key]}'"
    owners = [name for name, kind in METHODS.items() if key in {each.name for each in fields(kind) if each.init}]
    if owners:
        return f"there is no setting '{key}' here; it is one of {', '.join(owners)}"
    return did_you_mean(key, known, "setting")


def convert(text: str, hint: Any, key: str) -> Any:
    """A word as a value of a type.

    >>> convert("0.5,0.75", tuple[float, ...], "decay_at"), convert("none", int | None, "width")
    ((0.5, 0.75), None)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _any_of(text, inner, key)
    if origin is Literal:
        if text not in inner:
            raise Refused(did_you_mean(text, [str(word) for word in inner], f"value of {key}"))
        return text
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        raise Refused(f"{key} has several entries: set one at a time, as in {key}.name=value")
    if isinstance(origin, type) and issubclass(origin, collections.abc.Sequence):
        parts = text.strip("()[]").split(",")
        each = list(inner) if origin is tuple and ... not in inner else [inner[0]] * len(parts)
        if len(each) != len(parts):
            raise Refused(f"{key}={text} has {len(parts)} values; give {len(each)}, with commas between them")
        made = [convert(part.strip(), kind, key) for part, kind in zip(parts, each, strict=True)]
        return made if origin is list else tuple(made)
    return _plain(text, hint, key)


def _any_of(text: str, kinds: Sequence[Any], key: str) -> Any:
    if type(None) in kinds and text.lower() == "none":
        return None
    trouble: Refused | None = None
    # text takes anything, so it is tried last
    for kind in sorted((k for k in kinds if k is not type(None)), key=lambda kind: kind is str):
        try:
            return convert(text, kind, key)
        except Refused as refused:
            trouble = trouble or refused
    raise trouble or Refused(f"{key}={text} cannot be read")


def _plain(text: str, hint: Any, key: str) -> Any:
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise Refused(f"{key}={text} must be true or false")
        return _BOOLEANS[text.lower()]
    if hint in (int, float):
        try:
            number = hint(text)
        except ValueError:
            raise Refused(f"{key}={text} must be a {'whole number' if hint is int else 'number'}") from None
        if not math.isfinite(number):
            raise Refused(f"{key}={text} must be finite")
        return number
    if hint is str:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _inside(hint: Any, path: str) -> Any:
    """The type of a mapping's entries."""
    for kind in (hint, *get_args(hint)):
        origin = get_origin(kind) or kind
        if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
            return (get_args(kind) or (str, Any))[1]
    raise Refused(f"'{path}' names an entry, but {path.rpartition('.')[0]} is a single value; write key=value")
