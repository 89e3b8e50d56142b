"""Methods, read-outs, scenarios and federations from what users and `run.toml` call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from fedquilt import scenarios
from fedquilt._util.suggest import did_you_mean
from fedquilt._util.toml import values_of
from fedquilt._util.trust import check_file
from fedquilt.core.federation import Federation
from fedquilt.methods import Method
from fedquilt.methods.find import find
from fedquilt.privacy import Privacy
from fedquilt.readouts import READOUTS, Readout, named
from fedquilt.runs.checkpoint import Damaged
from fedquilt.runs.rule_texts import attack_from, rule_from
from fedquilt.runs.settings import method_from, training_from
from fedquilt.scenario import Scenario
from fedquilt.scenarios.own import from_data, from_file, split_address
from fedquilt.secure import SecureSums
from fedquilt.sharing import Compression


def make_method(method: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name, or its address such as `path/to/file.py:Class`, and settings; or as it is."""
    if isinstance(method, Method):
        if settings:
            given = f"{type(method).__name__}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"
            raise ValueError(f"settings go with the name of a method; with a method of your own, say {given}")
        return method
    other: object = method
    if not isinstance(other, str):
        hint = f"as in {other.__name__}()" if isinstance(other, type) else f"not a {type(other).__name__}"
        raise TypeError(f"a method is a name such as 'fedavg' or a method made ready, {hint}")
    kind = find(method)
    known = {f.name: f for f in fields(kind) if f.init}
    chosen = dict(settings or {})
    for key in chosen:
        if key not in known:
            told = did_you_mean(key, known, f"setting of {kind.name}") if known else f"'{kind.name}' has no settings"
            raise ValueError(told)
    for key, setting in known.items():
        if key not in chosen and setting.default is MISSING and setting.default_factory is MISSING:
            raise ValueError(f"the method '{kind.name}' needs its setting '{key}'; give it: --set {key}=...")
    return kind(**chosen)


def make_readouts(readouts: str | Readout | Sequence[str | Readout]) -> tuple[Readout, ...]:
    """Read-outs from their names."""
    made = []
    for readout in [readouts] if isinstance(readouts, str | Readout) else readouts:
        found = named(readout) if isinstance(readout, str) else readout
        if found is None:
            raise ValueError(did_you_mean(str(readout), READOUTS, "read-out"))
        made.append(found)
    return tuple(made)


def scenario_of(known: Mapping[str, Any], trust: bool = False) -> Scenario:
    """The scenario of a run, built again as its `run.toml` says; by a file as far as `_util.trust` allows it."""
    origin = known["scenario"]
    settings = values_of(origin.get("settings", {}))
    if "name" in origin:
        return scenarios.build(origin["name"], seed=origin["seed"], **settings)
    if "file" in origin:
        place = split_address(origin["file"])
        if place is not None:
            check_file(place[0], trust)
        return from_file(origin["file"], origin["seed"], settings)
    if "data" in origin:
        return from_data(Path(origin["data"]), origin["seed"], **settings)
    raise ValueError(
        f"the run of '{origin.get('title', 'a scenario')}' does not say how its clients were made; give them, in "
        "Python, as `scenario=...` of fedquilt.resume or extend; on the command line name clients by file.py:function"
    )


def rebuild(known: Mapping[str, Any], scenario: Scenario, trust: bool = False) -> Federation:
    """The federation of a run before its first round, as its `run.toml` says."""
    try:
        return Federation(
            scenario,
            method_from(known["method"], trust),
            training_from(known["training"]),
            known["seed"],
            known["device"],
            known["engine"],
            known.get("clients_at_once"),
            make_readouts(known["readouts"]),
            rule_from(known["merge"]),
            known["evaluate_every"],
            attack=attack_from(known.get("attack")),
            privacy=Privacy.of(known.get("dp")),
            secure=SecureSums.of(known.get("secure")),
            compress=Compression.of(known.get("compress")),
            everyone=known.get("everyone", False),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"run.toml does not say what it should ({error!r}); it was left as it is") from error


def options_of(known: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """How a run is done, as its `run.toml` says; settings that runs of earlier versions do not have may be unsaid."""
    for name in ("checkpoint_every", "alone"):
        if name not in known:
            raise Damaged(f"run.toml does not say {name}; it was left as it is")
    return {name: known.get(name) for name in names}
