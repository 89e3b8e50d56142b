"""What a method is: a frozen value that holds its settings, in two halves with a border between them.

The client half sees one client's own data (for a whole stack of clients at a time). The server half sees what clients
sent, what they declared, and what the server holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from fedquilt._util.choices import check_choices
from fedquilt.engines.objective import Batch
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.steps import Install, Step, Train
from fedquilt.sharing import Plan
from fedquilt.tasks import Task

State = dict[str, Any]  # tensors, numbers, texts, lists and dicts of these: a checkpoint is save(state)


class Heard(NamedTuple):
    """What a merge heard in each circle: the weight of the copies merged, and the share of its members they are of.

    And what the server half remembers, after it has learnt from the round.
    """

    weight: Tensor  # (C, 1)
    share: Tensor  # (C, 1)
    state: State


@dataclass(frozen=True)
class Method:
    """The base of all methods; by itself it trains alone. Subclasses override what they change."""

    name: ClassVar[str] = ""
    readout: ClassVar[str] = "received"  # the read-out that a result is reported with
    predicts_logits: ClassVar[bool] = True  # whether softmax makes probabilities of what `predict` gives
    needs_plain_sgd: ClassVar[bool] = False  # whether it reads gradients off the way that a client went
    needs_classes: ClassVar[str] = ""  # what it does with classes, where it has to have some
    needs_no_decay: ClassVar[bool] = False  # whether weight decay would move what its objective puts in place
    merges: ClassVar[bool] = True  # whether copies of units are merged, or clients send reports alone
    sends_parameters: ClassVar[bool] = True  # whether units of parameters are among what travels, or state alone
    depends_on_rounds: ClassVar[bool] = False  # whether what it does in a round depends on how many there will be

    def __post_init__(self) -> None:
        """Refuse a setting that is none of the words that its type, a `Literal`, has; who checks more calls this."""
        check_choices(self, self.name)

    # --- client half: what it holds, what it does ----------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        """What a client of this model holds: by default just that."""
        return Parts(model)

    def local(self) -> tuple[Step, ...]:
        """What a client does in a round, step by step; the same for all clients and all rounds."""
        return Install(), Train()

    def predict(self, me: Me, batch: Batch) -> Tensor:
        """A client's scores (n, classes) of some samples."""
        return me.model(batch.x)

    def check_task(self, task: Task) -> None:
        """Refuse a task that this method makes no sense for, before any work."""
        if self.needs_classes and not task.has_classes:
            raise ValueError(
                f"the method '{self.name}' {self.needs_classes}, and there are no classes in {task.kind}: use one that "
                "goes by losses and weights alone, such as fedavg, ditto, fedrep or auto"
            )

    @property
    def predicts(self) -> Callable[[Me, Batch], Tensor] | None:
        """How the method predicts; None where its clients just run their module."""
        return None if type(self).predict is Method.predict else self.predict

    # --- server half ---------------------------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether the server half learns from what single clients send."""
        return type(self).learn is not Method.learn

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

    def report_shapes(
        self, roster: Roster, number: int, told: Mapping[str, Tensor]
    ) -> Mapping[str, tuple[int, ...]] | None:
        """The shapes of what a client of this number reports in a round in which it is told this, (1, ...) each.

        None: all report alike. Devices that report otherwise are left out, so a method whose reports follow from a
        client's model, or from what it is told, says so here.
        """
        return None

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        """What is remembered when clients have changed (model, labels, data), or the last of the roster is new.

        `updates` holds what a newcomer has to show. By default the server half starts anew, which is right wherever
        plans follow from what clients declare.
        """
        return self.begin(roster)

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        """What a run's summary says about the method beside scores and bytes: numbers and texts by name."""
        return {}
