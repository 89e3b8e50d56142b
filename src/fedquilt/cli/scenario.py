"""A scenario by name, or a function of the user's own: `path/to/file.py:function`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        from fedquilt.scenarios.own import split_address

        place = split_address(self.name)
        return self.name if place is None else f"{place[0].resolve()}:{place[1]}"

    def build(self, seed: int, settings: Mapping[str, Any]) -> Scenario:
        """Build it; its `origin` says how to build it again."""
        from fedquilt.scenarios import build
        from fedquilt.scenarios.own import from_file

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
    from fedquilt.scenarios.own import function_of, split_address

    place = split_address(name)
    if place is not None:
        return Source(name, function_of(*place), own=True)
    if name not in SCENARIOS:
        raise Refused(did_you_mean(name, SCENARIOS, "scenario"))
    return Source(name, SCENARIOS[name])
