"""What a method is: a frozen value that holds its settings, in two halves with a border between them.

The client half sees one client's own data (for a whole stack of clients at a time). The server half sees what clients
sent, what they declared, and what the server holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from fedquilt.messages import Member, Roster, Sent
from fedquilt.sharing import Plan, Rule
from fedquilt.training.objective import Objective, cross_entropy
from fedquilt.units import Unit, cut

if TYPE_CHECKING:
    from fedquilt.view import StackView

State = dict[str, Any]  # tensors, numbers, texts, lists and dicts of these: a checkpoint is save(state)


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

    def merging(self, rule: Rule) -> Rule:
        """The rule by which copies are merged, given the one that was asked for."""
        return rule

    def begin(self, roster: Roster) -> tuple[State, Plan]:
        """The first plan, and whatever the server half has to remember."""
        raise NotImplementedError

    def next(self, state: State, plan: Plan, sent: Sent, roster: Roster) -> tuple[State, Plan]:
        """The plan by which what was sent is merged and installed, and which says what the next round sends."""
        return state, plan

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        """What the server half tells clients beside values of units: (k, ...) for the clients of these numbers."""
        return {}

    def declared(self, state: State, plan: Plan, before: Roster, roster: Roster) -> tuple[State, Plan]:
        """Clients have changed (model, labels, data): the plan of the coming round.

        By default the plan stays while models are cut as before, and is written anew where they are not.
        """
        pairs = zip(before.members, roster.members, strict=True)
        return (state, plan) if all(old.units == new.units for old, new in pairs) else self.begin(roster)

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        """What a run's summary says about the method beside scores and bytes: numbers and texts by name."""
        return {}

    def welcome(self, state: State, plan: Plan, roster: Roster, sent: Sent) -> tuple[State, Plan]:
        """A newcomer, the last of the roster, joins without regrouping the others; `sent` holds its own first copies.

        By default the plan is written anew for the longer roster, which is right wherever plans follow from what
        clients declare.
        """
        return self.begin(roster)
