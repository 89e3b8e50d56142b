"""Two methods as one, called `first+second`: plans are the first's, and what the second adds to FedAvg is added there.

    modfl+fedadam    fedavgm, fedadagrad, fedadam, fedyogi: their optimiser in every circle of the first's plan
    modfl+fedrep     fedprox, fedrep: where clients of the first train, they train as those of the second do
    feddl+ditto      ditto: beside the first's model a twin that predicts and is never sent,
                         v <- v - eta (grad F_i(v) + lambda (v - w)),    w: what the first's client received

Units that the first keeps home are received from nobody; there the twin is drawn to the client's own copy. A twin keeps
parameters and no running statistics. What would change nothing, or would have to be done twice, is refused. The
first is written as if it were alone: it never sees a twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn

from fedquilt._util.suggest import did_you_mean
from fedquilt.engines.objective import Batch, proximal, task_loss
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me, Values
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.method import Heard, Method, State
from fedquilt.interface.steps import Do, Given, Install, Send, Step, Train
from fedquilt.methods.ditto import Ditto
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedquilt.methods.fedprox import FedProx
from fedquilt.methods.fedrep import FedRep
from fedquilt.sharing import MixedUnit, Plan, nobody

PLUS, TWIN = "+", "twin"
ADDITIONS: dict[str, type[Method]] = {
    kind.name: kind for kind in (FedProx, FedRep, FedAvgM, FedAdagrad, FedAdam, FedYogi, Ditto)
}


@dataclass(frozen=True)
class Composed(Method):
    """Two methods as one. Settings are those of both; what both have is called `second_setting` for the second."""

    kinds: ClassVar[tuple[type[Method], type[Method]]]

    def __post_init__(self) -> None:
        first, second = self.first, self.second  # which check their settings
        if isinstance(second, Ditto):
            if second.lams:
                raise ValueError(f"{self.name}: a twin beside another method has one lam; lams go with 'ditto' alone")
            if first.predicts is not None:
                raise ValueError(f"{self.name}: '{first.name}' predicts in a way of its own, where a twin has no part")
        elif not self._optimises and Train() not in first.local():
            raise ValueError(
                f"{self.name}: clients of '{first.name}' train in a way of their own, which '{second.name}' would undo"
            )

    @cached_property
    def first(self) -> Method:
        """The method whose plans hold."""
        return self.kinds[0](**{f.name: getattr(self, f.name) for f in fields(self.kinds[0]) if f.init})

    @cached_property
    def second(self) -> Method:
        """The method that adds something."""
        first, second = self.kinds
        return second(**{f.name: getattr(self, _called(f.name, first, second)) for f in fields(second) if f.init})

    @property
    def _optimises(self) -> bool:
        return self.kinds[1].update is not Method.update

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        parts = self.first.parts(model, member, classes)
        if not isinstance(self.second, Ditto):
            return parts
        if not isinstance(parts.models, nn.Module):
            raise ValueError(f"{self.name}: a client of '{self.first.name}' has several models; a twin is of one")
        tracking = [m for m in parts.models.modules() if isinstance(getattr(m, "running_mean", None), Tensor)]
        if tracking:
            raise ValueError(
                f"{self.name}: the model of client '{member.name}' has running statistics "
                f"({type(tracking[0]).__name__}), and a twin keeps none; take norms that keep none"
            )
        values = dict(parts.module().named_parameters())
        start = torch.cat([values[name].detach().flatten() for unit in parts.cut() for name in unit.parameters])
        return replace(parts, state={**parts.state, TWIN: start})

    def local(self) -> tuple[Step, ...]:
        if self._optimises:
            return self.first.local()
        if isinstance(self.second, Ditto):
            near = task_loss() + proximal(self.second.lam, to="anchor")
            twin = Train(near, epochs=self.second.personal_epochs, given=_anchor, when="round")
            theirs = [_without_twin(step) for step in self.first.local()]
            return *theirs, Do(_swap), twin, Do(_swap), Do(_swap, when="look")
        instead = [step for step in self.second.local() if not isinstance(step, Install)]
        return tuple(new for step in self.first.local() for new in (instead if step == Train() else [step]))

    def predict(self, me: Me, batch: Batch) -> Tensor:
        return self.first.predict(me, batch)

    # --- server half -----------------------------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        return self.first.learns

    def begin(self, roster: Roster) -> State:
        return self.first.begin(_seen(roster))

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        return self.first.learn(state, updates, _seen(roster))

    def plan(self, state: State, roster: Roster) -> Plan:
        plan = self.first.plan(state, _seen(roster))
        if self._optimises and not any(unit.count for unit in plan.units.values()):
            raise ValueError(f"{self.name}: '{self.first.name}' shares nothing that a server could optimise")
        if self._optimises and any(isinstance(unit, MixedUnit) for unit in plan.units.values()):
            raise ValueError(
                f"{self.name}: '{self.first.name}' mixes clients' copies, and a server optimises what circles hold"
            )
        return plan.but(nobody([TWIN], len(roster)).units) if isinstance(self.second, Ditto) else plan

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:  # fmt: skip
        return (self.second if self._optimises else self.first).update(unit, held, merged, heard, memory)

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        return self.first.tell(state, _seen(roster), ids)

    def report_shapes(
        self, roster: Roster, number: int, told: Mapping[str, Tensor]
    ) -> Mapping[str, tuple[int, ...]] | None:
        return self.first.report_shapes(_seen(roster), number, told)

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        return self.first.enrol(state, _seen(before), _seen(roster), updates)

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        return self.first.describe(state, plan, _seen(roster))

    @property
    def predicts(self) -> Callable[[Me, Batch], Tensor] | None:
        return self.first.predicts


# --- a twin, of which the first method knows nothing ------------------------------------------------------------------


def _swap(me: Me) -> dict[str, Tensor]:
    """The twin in the model's place, and what was there in the twin's."""
    return {**me.values.with_parameters(me.values[TWIN]), TWIN: me.values.parameters()}


def _anchor(me: Me) -> dict[str, Tensor]:
    """What the twin is drawn to, while it is in the model's place: what was received, else the client's own copy."""
    own = me.values.with_parameters(me.values[TWIN])
    parts = []
    for unit, value in own.items():
        mine, theirs = value[: len(me.values.trained(unit))], me.received.trained(unit)
        parts.append(torch.where(me.receives[unit], theirs, mine) if unit in me.receives else mine)
    return {"anchor": torch.cat(parts)}


class _WithoutTwin(Values):
    """A client's numbers as the first method knows them."""

    def __iter__(self) -> Iterator[str]:
        return (unit for unit in super().__iter__() if unit != TWIN)

    def __len__(self) -> int:
        return super().__len__() - 1


def _without_twin(step: Step) -> Step:
    """A step of the first method, whose functions do not see that there is a twin."""

    def blind(function: Given | None) -> Any:
        return None if function is None else lambda me: function(_hidden(me))

    if isinstance(step, Train):
        return replace(step, given=blind(step.given), rates=blind(step.rates))
    if isinstance(step, Install):
        return Install(blind(step.function))
    return replace(step, function=blind(step.function)) if isinstance(step, Do) else Send(blind(step.function))


def _hidden(me: Me) -> Me:
    return replace(me, values=_WithoutTwin(*me.values.held), received=_WithoutTwin(*me.received.held))


def _seen(roster: Roster) -> Roster:
    """The roster as the first method knows it."""
    if not any(TWIN in member.units for member in roster.members):
        return roster
    members = (
        replace(m, units={u: s for u, s in m.units.items() if u != TWIN}, kinds={**m.kinds}) for m in roster.members
    )
    return replace(roster, members=tuple(members))


# --- two classes as one -----------------------------------------------------------------------------------------------


def core_of(kind: type[Method]) -> type[Method]:
    """The method that others were added to.

    >>> from fedquilt.methods import ModFL
    >>> core_of(composed(ModFL, "fedadam")).name
    'modfl'
    """
    return core_of(kind.kinds[0]) if issubclass(kind, Composed) else kind


def composed(first: type[Method], *added: str) -> type[Method]:
    """A method with others added, one after another.

    >>> from fedquilt.methods import FedPer
    >>> composed(FedPer, "fedavgm", "ditto")(beta=0.5)
    FedPerFedAvgMDitto(personal=1, beta=0.5, rate=1.0, lam=1.0, personal_epochs=None, lams=())
    """
    for name in added:
        if name not in ADDITIONS:
            raise ValueError(did_you_mean(name, ADDITIONS, "method to be added to another"))
        if (first, name) not in _MADE:
            _MADE[first, name] = _together(first, ADDITIONS[name])
        first = _MADE[first, name]
    return first


_MADE: dict[tuple[type[Method], str], type[Method]] = {}  # the same two are the same class


def _together(first: type[Method], second: type[Method]) -> type[Method]:
    name = f"{first.name}{PLUS}{second.name}"
    _check(name, first, second)
    added = [(_called(key, first, second), hint, default) for key, hint, default in _settings(second)]
    return make_dataclass(
        first.__name__ + second.__name__,
        [*_settings(first), *added],
        bases=(Composed,),
        frozen=True,
        namespace={
            "__doc__": f"{first.name}, and added to it {second.name}: {(second.__doc__ or '').splitlines()[0]}",
            "__module__": __name__,
            "kinds": (first, second),
            "name": name,
            "readout": first.readout,
            "predicts_logits": first.predicts_logits,
            "needs_no_decay": first.needs_no_decay or second.needs_no_decay,
            "merges": first.merges,
            "sends_parameters": first.sends_parameters,
            "depends_on_rounds": first.depends_on_rounds or second.depends_on_rounds,
            "needs_classes": first.needs_classes or second.needs_classes,
        },
    )


def _check(name: str, first: type[Method], second: type[Method]) -> None:
    """Refuse two that have no meaning together."""
    if issubclass(second, first) and (first, second) != (FedAvg, FedRep):
        raise ValueError(f"{name} is {second.__name__}: use the method '{second.name}'")
    if first.needs_plain_sgd:
        raise ValueError(
            f"{name}: '{first.name}' reads something off its clients' steps, to which nothing can be added"
        )
    if second.update is not Method.update and first.update is not Method.update:
        raise ValueError(f"{name}: both say what becomes of a circle's value; take one of them")


def _called(setting: str, first: type[Method], second: type[Method]) -> str:
    """What a setting of the second is called: by both names where the first has one of that name."""
    return f"{second.name}_{setting}" if setting in {f.name for f in fields(first)} else setting


def _settings(kind: type[Method]) -> list[tuple[str, Any, Any]]:
    """The settings of a method, as fields of another class."""
    hints, found = get_type_hints(kind), []
    for f in (f for f in fields(kind) if f.init):
        made = (
            field(default_factory=f.default_factory) if f.default_factory is not MISSING else field(default=f.default)
        )
        found.append((f.name, hints[f.name], made))
    return found
