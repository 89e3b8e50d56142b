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
from fedquilt.sharing import Plan
from fedquilt.training.objective import Objective, cross_entropy
from fedquilt.units import Unit, cut

if TYPE_CHECKING:
    from fedquilt.view import StackView

State = dict[str, Any]  # tensors, numbers, texts, lists and dicts of these: a checkpoint is save(state)


@dataclass(frozen=True)
class Prepared:
    """What the client half prepares before training, for a whole stack: see `Method.prepare`."""

    extras: Mapping[str, Tensor] = field(default_factory=dict)  # (k, ...) handed to the objective
    rates: Mapping[str, Tensor] = field(default_factory=dict)  # unit -> (k,) multiplier of the learning rate


@dataclass(frozen=True)
class Method:
    """The base of all methods; by itself it trains alone. Subclasses override what they change."""

    name: ClassVar[str] = ""
    readout: ClassVar[str] = "received"  # the read-out that a result is reported with

    # --- client half ---------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, member: Member, classes: int) -> nn.Module:
        """The module a client trains: its own model, or a bigger one around it. forward(x) gives logits (n, classes)."""
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

    # --- server half ---------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> tuple[State, Plan]:
        """The first plan, and whatever the server half has to remember."""
        raise NotImplementedError

    def next(self, state: State, plan: Plan, sent: Sent, roster: Roster) -> tuple[State, Plan]:
        """The plan by which what was sent is merged and installed, and which says what the next round sends."""
        return state, plan

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        """What the server half tells clients beside values of units: (k, ...) for the clients of these numbers."""
        return {}

    def welcome(self, state: State, plan: Plan, roster: Roster, sent: Sent) -> tuple[State, Plan]:
        """A newcomer, the last of the roster, joins without regrouping the others; `sent` holds its own first copies.

        By default the plan is written anew for the longer roster, which is right wherever plans follow from what
        clients declare.
        """
        return self.begin(roster)
