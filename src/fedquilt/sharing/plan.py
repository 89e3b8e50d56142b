"""Sharing plans: for each unit, with whom (circle), how loud (weight) and how close (pull), over all clients.

A plan is a value: it never changes, prints itself, compares, and rests as lists.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedquilt.sharing.mixedunit import AnyUnit, MixedUnit
from fedquilt.sharing.planned import Numbers
from fedquilt.sharing.unitplan import UnitPlan


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Plan:
    """Who shares which unit with whom. `asked[unit][i]`: client i also sends that unit to be looked at, merged or not.

    `offered[unit][i]`: client i is sent the values of all circles of that unit, to choose from. `copies[unit][i]`: it
    is sent single copies of a mixed unit, those of the clients of these numbers, -1 for none.

    >>> plan = Plan({"conv": UnitPlan([0, 0, 0], [10, 20, 30]), "head": UnitPlan([-1, -1, -1])})
    >>> print(plan)
    conv       1 circle of 3
    head       private
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    units: Mapping[str, AnyUnit]
    asked: Mapping[str, Tensor]
    offered: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]
    clients: int

    def __init__(
        self, units: Mapping[str, AnyUnit], asked: Mapping[str, Numbers] | None = None,
        offered: Mapping[str, Numbers] | None = None, copies: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        if not units:
            raise ValueError("a plan needs at least one unit; cut the model into units first")
        first = next(iter(units))
        clients = len(units[first])
        for name, unit in units.items():
            if len(unit) != clients:
                raise ValueError(
                    f"unit '{name}' is planned for {len(unit)} clients but unit '{first}' for {clients}; "
                    "a plan is over all clients, so give those without the unit the circle -1"
                )
            problem = unit.problem()
            if problem:
                raise ValueError(f"unit '{name}': {problem}")
        object.__setattr__(self, "units", MappingProxyType(dict(units)))
        object.__setattr__(self, "clients", clients)
        object.__setattr__(self, "asked", self._masks("asked", asked or {}))
        object.__setattr__(self, "offered", self._masks("offered", offered or {}))
        object.__setattr__(self, "copies", self._numbers(copies or {}))

    def _masks(self, what: str, given: Mapping[str, Numbers]) -> Mapping[str, Tensor]:
        """(K,) bool by unit; units for nobody are left out."""
        masks: dict[str, Tensor] = {}
        verb = {"asked": "asked for", "offered": "offered"}[what]
        for name, numbers in given.items():
            if name not in self.units:
                raise ValueError(f"unit '{name}' is {verb} but not in the plan; it has {', '.join(self.units)}")
            mask = torch.as_tensor(numbers).detach().to("cpu", torch.bool, copy=True)
            if mask.shape != (self.clients,):
                raise ValueError(
                    f"unit '{name}': {what} has shape {tuple(mask.shape)} but there are {self.clients} clients; "
                    "give one each"
                )
            if bool(mask.any()):
                masks[name] = mask
        return MappingProxyType(masks)

    def _numbers(self, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """(K, M) clients' numbers by unit."""
        found: dict[str, Tensor] = {}
        for name, numbers in given.items():
            if not isinstance(self.units.get(name), MixedUnit):
                raise ValueError(
                    f"copies of unit '{name}' are offered, but it is no mixed unit of the plan: make it one"
                )
            whole = torch.as_tensor(numbers).detach().to("cpu", torch.int64, copy=True)
            if whole.ndim != 2 or len(whole) != self.clients or bool(((whole < -1) | (whole >= self.clients)).any()):
                raise ValueError(
                    f"unit '{name}': copies has shape {tuple(whole.shape)}; give each of {self.clients} clients as "
                    "many numbers of clients, -1 for none"
                )
            found[name] = whole
        return MappingProxyType(found)

    def __reduce__(self) -> tuple[type[Plan], tuple[dict[str, Any], ...]]:
        # the read-only views themselves cannot be copied
        return Plan, (dict(self.units), dict(self.asked), dict(self.offered), dict(self.copies))

    def __getitem__(self, unit: str) -> AnyUnit:
        if unit not in self.units:
            raise KeyError(f"unit '{unit}' is not in the plan; it has {', '.join(self.units)}")
        return self.units[unit]

    def sends(self, unit: str) -> Tensor:
        """(K,) who sends its copy of `unit`: to be merged, or because it is asked to."""
        sends = self[unit].sends
        return sends | self.asked[unit] if unit in self.asked else sends

    @cached_property
    def from_all(self) -> frozenset[str]:
        """The units that everyone sends."""
        return frozenset(unit for unit in self.units if bool(self.sends(unit).all()))

    def receives(self, unit: str) -> Tensor:
        """(K,) who receives a value of `unit`."""
        return self[unit].receives

    @property
    def circle_sizes(self) -> dict[str, Tensor]:
        """(C,) members of each circle, by unit, in the order of the unit's `labels`; mixed units have no circles."""
        return {name: unit.members for name, unit in self.units.items() if isinstance(unit, UnitPlan)}

    @cached_property
    def alike(self) -> tuple[tuple[AnyUnit, tuple[str, ...]], ...]:
        """Units with the very same plan, together: they can be merged and installed as one block of columns.

        >>> from fedquilt.sharing import everyone
        >>> [names for _, names in everyone(["conv", "head"], [1, 2]).alike]
        [('conv', 'head')]
        """
        groups: list[tuple[AnyUnit, list[str]]] = []
        for name, unit in self.units.items():
            for other, names in groups:
                if unit == other:
                    names.append(name)
                    break
            else:
                groups.append((unit, [name]))
        return tuple((unit, tuple(names)) for unit, names in groups)

    def check(self, signatures: Mapping[str, Sequence[Hashable]], names: Sequence[str]) -> None:
        """Refuses a plan that the clients' models cannot follow. `signatures[unit][i]`: shapes, None: has no such unit.

        Only the circles of a pool may have members of unlike shapes: it has values of each shape.

        >>> plan = Plan({"head": UnitPlan([0, 0, -1])})
        >>> plan.check({"head": [((2, 3),), ((2, 3),), None]}, names=["watch-1", "watch-2", "phone-1"])
        """
        if len(names) != self.clients:
            raise ValueError(f"the plan is for {self.clients} clients but there are {len(names)}; plan for all of them")
        for name, unit in self.units.items():
            if name not in signatures:
                raise ValueError(
                    f"unit '{name}' is planned but no client's model has it; there are {', '.join(signatures)}"
                )
            shapes = signatures[name]
            first: dict[int, int] = {}
            for i, peers in unit.peers():
                if shapes[i] is None:
                    raise ValueError(
                        f"unit '{name}': client '{names[i]}' is planned to share it but its model has no such unit; "
                        "give it the circle -1"
                    )
                other = first.setdefault(peers, i)
                if shapes[i] != shapes[other] and not (isinstance(unit, UnitPlan) and unit.pool):
                    raise ValueError(
                        f"unit '{name}': clients '{names[other]}' and '{names[i]}' share it, but one has the shapes "
                        f"{shapes[other]} and the other {shapes[i]}; plan them in different circles"
                    )
            for i, others in enumerate(self.copies[name].tolist() if name in self.copies else ()):
                wrong = [j for j in others if j >= 0 and shapes[j] != shapes[i]]
                if wrong:
                    raise ValueError(
                        f"unit '{name}': client '{names[i]}' is offered the copy of '{names[wrong[0]]}', which has "
                        "other shapes; offer copies of its own shapes"
                    )

    def but(self, units: Mapping[str, AnyUnit] | None = None, asked: Mapping[str, Numbers] | None = None) -> Plan:
        """A plan with some units changed or added; `asked` replaces what was asked before, None keeps it."""
        now = self.asked if asked is None else asked
        return Plan({**self.units, **(units or {})}, now, self.offered, self.copies)

    def __or__(self, other: Plan) -> Plan:
        """Both plans' units side by side, as in `everyone(base, samples) | nobody(head, clients)`."""
        return Plan(
            {**self.units, **other.units}, {**self.asked, **other.asked}, {**self.offered, **other.offered},
            {**self.copies, **other.copies},
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Plan)
            and list(self.units) == list(other.units)
            and all(unit == other.units[name] for name, unit in self.units.items())
            and _equal(self.asked, other.asked)
            and _equal(self.offered, other.offered)
            and _equal(self.copies, other.copies)
        )

    __hash__ = None  # type: ignore[assignment]  # equal by content, and tensors cannot be hashed by content

    def __str__(self) -> str:
        width = max(9, *(len(name) for name in self.units)) + 2
        lines = []
        for name, unit in self.units.items():
            more = f"; asked of {int(self.asked[name].sum())}" if name in self.asked else ""
            if name in self.offered:
                more += f"; {unit.count} values offered to {int(self.offered[name].sum())}"
            if name in self.copies:
                more += f"; {int((self.copies[name] >= 0).sum())} copies offered"
            lines.append(f"{name:<{width}}{unit.describe()}{more}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan of {len(self.units)} units over {self.clients} clients>\n{self}"

    def to_json(self) -> dict[str, Any]:
        """Lists and numbers only. `asked`, `offered` and `copies` list clients' numbers, where there are such."""
        data: dict[str, Any] = {"units": {name: unit.lists for name, unit in self.units.items()}}
        for key, masks in (("asked", self.asked), ("offered", self.offered)):
            if masks:
                data[key] = {name: mask.nonzero()[:, 0].tolist() for name, mask in masks.items()}
        if self.copies:
            data["copies"] = {name: numbers.tolist() for name, numbers in self.copies.items()}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote; other keys are left alone."""
        units: dict[str, AnyUnit] = {}
        for name, lists in data["units"].items():
            try:
                units[name] = MixedUnit(**lists) if "matrix" in lists else UnitPlan(**lists)
            except (TypeError, ValueError) as error:
                raise ValueError(f"unit '{name}': {error}") from error
        clients = len(next(iter(units.values()))) if units else 0
        masks: dict[str, dict[str, Tensor]] = {"asked": {}, "offered": {}}
        for key, of in masks.items():
            for name, ids in data.get(key, {}).items():
                of[name] = torch.zeros(clients, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)
        copies = {name: torch.tensor(numbers, dtype=torch.int64) for name, numbers in data.get("copies", {}).items()}
        return cls(units, **masks, copies=copies)


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(mask, other[name]) for name, mask in one.items())
