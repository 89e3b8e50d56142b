"""What a method is: a frozen value that holds its settings, in two halves with a border between them.

The client half sees one client's own data (for a whole stack of clients at a time). The server half sees what clients
sent, what they declared, and what the server holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from fedquilt.messages import Member, Roster, Updates
from fedquilt.sharing import Plan
from fedquilt.training.objective import Objective, cross_entropy
from fedquilt.units import Unit, cut

if TYPE_CHECKING:
    from fedquilt.view import StackView

State = dict[str, Any]  # tensors, numbers, texts, lists and dicts of these: a checkpoint is save(state)


class Heard(NamedTuple):
    """What a merge heard in each circle: the weight of the copies merged, and the share of its members they are of."""

    weight: Tensor  # (C, 1)
    share: Tensor  # (C, 1)


@dataclass(frozen=True)
class Lesson:
    """Samples that all clients hold and what they learn from them, with the settings of local training but `epochs`.

    A lesson of the same `x`, `objective` and `epochs` as the last one goes on with the same engine.
    """

    x: Tensor
    y: Tensor
    objective: Objective
    epochs: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # (k, ...) handed to the objective


@dataclass(frozen=True)
class Prepared:
    """What the client half prepares before training, for a whole stack: see `Method.prepare`."""

    extras: Mapping[str, Tensor] = field(default_factory=dict)  # (k, ...) handed to the objective
    rates: Mapping[str, Tensor] = field(default_factory=dict)  # unit -> (k,) multiplier of the learning rate
    lesson: Lesson | None = None  # what clients train on before their own data


@dataclass(frozen=True)
class Method:
    """The base of all methods; by itself it trains alone. Subclasses override what they change."""

    name: ClassVar[str] = ""
    readout: ClassVar[str] = "received"  # the read-out that a result is reported with

    # --- client half ---------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, member: Member, classes: int) -> nn.Module:
        """The module a client trains: its own model, or a bigger one around it; forward(x): (n, classes) logits."""
        return model

    def cut(self, module: nn.Module) -> tuple[Unit, ...]:
        """The units of the trained module, bottom to top."""
        return cut(module)

    def objective(self) -> Objective:
        """What a client minimises."""
        return cross_entropy()

    def prepare(self, view: StackView) -> Prepared:
        """After installing, before training: things computed from the clients' own data, and learning rates."""
        return Prepared()

    def report(self, view: StackView) -> Mapping[str, Tensor]:
        """After training, before sending: small facts (k, ...) for the server; may write the clients' own buffers."""
        return {}

    def predict(self, view: StackView, split: str) -> Tensor | None:
        """Scores (k, n, classes) on a split where a prediction is not simply module(x); None where it is."""
        return None

    def lasting(self, unit: str) -> bool:
        """Whether a unit, not being a part of the client's model, outlives it when that is replaced by another."""
        return False

    # --- server half ---------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        """What the server half remembers before the first round."""
        return {}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        """What it remembers after a round, from what was sent. Returning the state as it was leaves the plan too."""
        return state

    def plan(self, state: State, roster: Roster) -> Plan:
        """Who shares what with whom: a function of the state and of who is there.

        By the plan that follows from what was learnt in a round, what was sent in it is merged and installed, and the
        next round's clients are told what to send.
        """
        raise NotImplementedError

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:  # fmt: skip
        """What the circles' values of a unit become, (C, size), and what is remembered of them for the next time.

        `held` are the values until now, `merged` what the merge made of the copies that were sent. `memory` holds
        tensors (C, size) by name, empty at first; they go with their circles. Circles that nobody was heard in keep
        value and memory, whatever is returned for them.
        """
        return merged, memory

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        """What clients are told beside values of units: (k, ...) for the clients of these numbers, of one family."""
        return {}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        """What is remembered when clients have changed (model, labels, data), or the last of the roster is new.

        `updates` holds what a newcomer has to show. By default the server half starts anew, which is right wherever
        plans follow from what clients declare.
        """
        return self.begin(roster)

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        """What a run's summary says about the method beside scores and bytes: numbers and texts by name."""
        return {}
