"""A scenario by name, a function of the user's own, `path/to/file.py:function`, or samples, `path/to/file.csv`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt._util.suggest import did_you_mean
from fedquilt.cli.output import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedquilt.scenario import Scenario


@dataclass(frozen=True)
class Source:
    """Where a scenario comes from: what the user wrote, and the function that builds it."""

    name: str
    builder: Callable[..., Scenario]
    own: bool = False

    @property
    def address(self) -> str:
        """What finds it again, from anywhere."""
        from fedquilt.scenarios.own import data_at, split_address

        place, samples = split_address(self.name), data_at(self.name)
        if samples is not None:
            return str(samples.resolve())
        return self.name if place is None else f"{place[0].resolve()}:{place[1]}"

    @property
    def checksum(self) -> str:
        """Of the file or files of the user's that it is made of; empty where there is none."""
        from fedquilt.scenarios.own import data_at, split_address

        place = split_address(self.name)
        path = data_at(self.name) if place is None else place[0]
        if path is None:
            return ""
        digest = hashlib.sha256()
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as opened:
                    digest.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()};".encode())
        return digest.hexdigest()[:16]

    def build(self, seed: int, settings: Mapping[str, Any]) -> Scenario:
        """Build it; its `origin` says how to build it again."""
        from fedquilt.scenarios import build
        from fedquilt.scenarios.own import data_at, from_file

        if data_at(self.name) is not None:
            return self.builder(seed=seed, **settings)
        return from_file(self.name, seed, settings) if self.own else build(self.name, seed, **settings)


def find(name: str) -> Source:
    """The scenario of a name or of a file; what is wrong with either is said with the nearest that is right.

    >>> find("digits").name
    'digits'
    >>> find("digitz")
    Traceback (most recent call last):
    ...
    fedquilt.cli.output.Refused: there is no scenario 'digitz'; did you mean 'digits'?
    """
    from fedquilt.scenarios import SCENARIOS
    from fedquilt.scenarios.own import data_at, from_data, function_of, split_address

    place = split_address(name)
    if place is not None:
        return Source(name, function_of(*place), own=True)
    samples = data_at(name)
    if samples is not None:
        if not samples.exists():
            raise Refused(f"there is no file {samples}; give a scenario's name, a csv or npz file, or file.py:function")
        return Source(name, partial(from_data, samples))
    if name not in SCENARIOS:
        ending = Path(name).suffix.lower()
        if ending in (".toml", ".yaml", ".yml"):
            raise Refused(f"{name} is of one run: fedquilt run {name}; here name the scenario and its settings (--set)")
        if ending and Path(name).is_file():
            raise Refused(
                f"{name} cannot be read: tables are csv files (a spreadsheet saves them so), arrays npz files"
            )
        raise Refused(did_you_mean(name, SCENARIOS, "scenario"))
    return Source(name, SCENARIOS[name])
