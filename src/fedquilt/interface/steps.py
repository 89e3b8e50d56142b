"""What a client does in a round: a sequence of steps, each written for one client and run on many.

The server's values come before the first step, what the plan asks for is sent after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor

from fedquilt.engines.objective import Objective, task_loss
from fedquilt.interface.me import Me

Which = Callable[[Sequence[str]], Collection[str]]
Given = Callable[[Me], Mapping[str, Tensor]]
_AS_TASK = task_loss()  # one for all, so that plain training can be told from any other: step == Train()


@dataclass(frozen=True)
class Install:
    """Move every unit towards what was received, as far as its pull says.

    `function(me)` gives other values for some units, of what the client has and what it received.
    """

    function: Given | None = None


@dataclass(frozen=True)
class Train:
    """Train some units with an objective, on the settings of local training but for what is said here.

    `units` are patterns of names, or a function that picks from the names of all units, such as `last(2)`; the others
    stay as they are, running statistics included. `data` is train, or common: the samples that all clients hold.
    `given(me)` prepares tensors that the objective finds in `me.given`, with the split that `looks` names in `me.data`,
    padded to one length for all; `rates(me)` gives multipliers of the learning rate by unit, a number each; `lr` takes
    the place of the learning rate. Before the round `from_round` the step is left out. `when` is always, round (not
    where what was received is only fine-tuned) or tuning (only there). A step with a name in `told` is left out but for
    rounds in which the method's server half tells something of that name.
    """

    objective: Objective = _AS_TASK
    units: str | Sequence[str] | Which = "*"
    epochs: int | None = None
    data: str = "train"
    given: Given | None = None
    looks: str | None = None
    rates: Given | None = None
    lr: float | None = None
    from_round: int = 1
    when: Literal["always", "round", "tuning"] = "always"
    told: str = ""

    def __post_init__(self) -> None:
        if self.data not in ("train", "common"):
            raise ValueError(
                f"clients train on their own samples (train) or on those of all (common), not '{self.data}'"
            )
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"training for {self.epochs} epochs trains nothing; give at least 1")

    def picks(self, units: Sequence[str]) -> frozenset[str]:
        """Which of the units of a model are trained."""
        if callable(self.units):
            return frozenset(self.units(units))
        patterns = [self.units] if isinstance(self.units, str) else self.units
        return frozenset(unit for unit in units if any(fnmatchcase(unit, pattern) for pattern in patterns))


@dataclass(frozen=True)
class Do:
    """Compute something: `function(me)` returns what it writes, by the names of units or state.

    What it returns under a name in `reports` is sent to the server instead. `data` names a split that it looks at,
    `me.data`: train, validation, or none. A step that looks at the samples that everybody holds, `me.public`, says
    public: a model that does not take them is then refused before work. `when` is round, or look: the step is then done
    where clients are looked at, on what they received and on what they have, and nothing of it is kept or sent.
    With `told` it is left out but for rounds in which the server half tells something whose name begins so.
    """

    function: Given
    data: str | None = None
    reports: tuple[str, ...] = ()
    when: Literal["round", "look"] = "round"
    told: str = ""

    def due(self, told: Collection[str]) -> bool:
        """Whether it is done in a round in which the server half tells clients these things."""
        return self.when == "round" and (not self.told or any(name.startswith(self.told) for name in told))


@dataclass(frozen=True)
class Send:
    """Choose what is sent: `function(me)` says by unit whether the client sends it, if the plan asks for it at all."""

    function: Given


Step = Install | Train | Do | Send


def reported(steps: Sequence[Step], told: Collection[str]) -> frozenset[str]:
    """Names of what clients report in a round in which the server half tells them these things.

    >>> steps = [Install(), Do(dict, reports=("loss",)), Do(dict, reports=("score",), told="ballot")]
    >>> sorted(reported(steps, ()))
    ['loss']
    """
    return frozenset(name for step in steps if isinstance(step, Do) and step.due(told) for name in step.reports)


def last(number: int) -> Which:
    """The units at the top.

    >>> Train(units=last(1)).picks(["conv", "head"]) == {"head"}
    True
    """
    return lambda units: units[-number:]


def but_last(number: int) -> Which:
    """All units but those at the top.

    >>> Train(units=but_last(1)).picks(["conv", "head"]) == {"conv"}
    True
    """
    return lambda units: units[:-number]
