"""ModFL (Liang, Srinivasan, Andresen 2022): the modules of one model federate with different peers.

Algorithm 1: a model is a configuration module (input side) followed by an operation module (output side). The former is
averaged over the clients of one device generation (lines 9-11), the latter over a cohort of clients that operate alike
(lines 12-15), weighted by sample counts as in FedAvg. Cohorts are declared, or found from what is uploaded (line 12).

Settled here, where the paper is silent:
- The similarity of line 12. Where the number of cohorts is not given, it is found from how well gradients of clients
  of one architecture agree where they all start, less their noise, which two halves of each client's samples tell
  (`methods.cohorts.by_directions`); then all are clustered by their gradients' cosine. Later no number is found so: the
  modules below have grown apart by device. Whoever comes late joins the cohort that went its way; cohorts stay.
- With a given number it is the cosine between updates of operation modules, clustered with average linkage, every few
  rounds, with hysteresis (`sharing.cluster_updates`). An update is a copy less one point for all clients: what they
  received, the same for everyone at first, and the mean of what they received once circles differ. (Less what each
  received itself, an update would no longer tell of the cohort: members of a circle pull its mean in all directions.)
- Any number of modules, each with its own grouping, not only two.
- Multi-task: modules of unlike shapes never share a circle, whatever the grouping says.
- `by` may ask for FedDL's affinity (how alike whole models answer on common samples) in the place of cohorts.
One device and one cohort is FedAvg; a private operation module is FedPer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedquilt.families.parts import Parts
from fedquilt.families.units import modules_of
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods import cohorts as finding
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.sharing import Plan, UnitPlan, circles_by_trait
from fedquilt.sharing.grouping import Linkage

FOUND, AFFINITY, EVERYONE, PRIVATE = "found", "affinity", "everyone", "private"
LOOK = "look-"
PAPER = {"configuration": "device", "operation": "cohort"}


@dataclass(frozen=True)
class ModFL(Method):
    """The modules of one model federate with different peers: by device, by cohort, found or given.

    `by` says for each module (or pattern such as "conv*"; the first that fits holds) with whom it is shared. Where it
    says nothing of the paper's two modules, these follow the traits device and cohort. Its values are the name of a
    trait; "found": cohorts found in the first round from which way clients' losses pull the module, as many as there
    are (with `cohorts`: so many for each task, by clustering updates, anew `every` few rounds); "affinity": the same
    from how alike models answer, grouped with `linkage`; "everyone"; "private". `split` (Algorithm 1, line 2) cuts
    models that declare no modules: so many units at the bottom are the configuration module, the others the operation
    module; a negative number counts from the top. A model that declares just these two is cut anew, between layers.
    Found circles are compared with the trait `compare`.
    """

    name: ClassVar[str] = "modfl"
    by: Mapping[str, str] = field(default_factory=lambda: dict(PAPER))
    split: int | None = None
    cohorts: int | None = None
    every: int = 2
    hysteresis: float = 0.1
    linkage: Linkage = "average"
    compare: str = "cohort"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.by, Mapping):
            raise TypeError(f"modfl: by={self.by!r} must say for each module with whom it is shared, as in {PAPER}")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"modfl: hysteresis={self.hysteresis} must be from 0 (move at once) to below 1")
        if self.every < 1:
            raise ValueError(f"modfl: every={self.every} never finds cohorts; give 1 or more rounds")
        if self.cohorts is not None and FOUND not in self.by.values():
            raise ValueError(
                f"modfl: cohorts={self.cohorts}, but no module has its cohorts found; say so, e.g. by.operation=found"
            )
        if self.cohorts is not None and self.cohorts < 2:
            raise ValueError(f"modfl: cohorts={self.cohorts} is one circle for all: say by.operation=everyone instead")
        if self.split == 0:
            raise ValueError("modfl: split=0 leaves no configuration module; give a number of units, from either end")

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        return Parts(model, units=modules_of(model, tuple(PAPER), self.split))

    def local(self) -> tuple[Step, ...]:
        if self.cohorts is not None or FOUND not in self.by.values():
            return Install(), Train()
        reports = tuple(LOOK + pattern for pattern in self._sought)
        return Install(), Do(self._look, data="train", reports=reports, told=LOOK), Train()

    def _look(self, me: Me) -> Mapping[str, Tensor]:
        """Which way each module that cohorts are sought for is pulled, where the server asks."""
        modules = {p: [unit for unit in me.values if self._pattern(unit) == p] for p in self._sought}
        return {LOOK + p: finding.directions(me, units, p) for p, units in modules.items() if units}

    # --- server half -----------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        if AFFINITY in self.by.values():
            roster.needed_common("modfl: circles by affinity compare models")
        known = {pattern: finding.nothing_known(self._tasks(roster, pattern)) for pattern in self._sought}
        return {"round": 0, "known": known}

    @property
    def learns(self) -> bool:
        return bool(self._sought)

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        if not self._sought:
            return state
        due, known = self._due(updates.round), {}
        for pattern, now in state["known"].items():
            tasks = self._tasks(roster, pattern)
            if self.by[pattern] == FOUND and self.cohorts is None:
                now = finding.by_directions(now, tasks, updates, LOOK + pattern, roster.samples)
            if self.by[pattern] == FOUND:
                now = finding.by_updates(now, tasks, updates, due, self.cohorts, self.hysteresis)
            elif due and updates.ups:
                answers = updates.probabilities(roster.needed_common("modfl: circles by affinity compare models"))
                now = finding.by_affinity(now, tasks, *answers, self.linkage)
            known[pattern] = now
        return {"round": updates.round, "known": known}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        if len(roster) == len(before):
            return self.begin(roster) if bool(roster.changed(before).any()) else state
        known = {}
        for pattern, of_others in state["known"].items():
            tasks = self._tasks(roster, pattern)
            now = finding.with_newcomer(of_others, tasks)
            if self.by[pattern] == FOUND and updates.ups:
                now = finding.by_updates(now, tasks, updates, False, self.cohorts, self.hysteresis)
            known[pattern] = now
        return {**state, "known": known}

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        """Whether clients are to look which way their modules are pulled: where nobody like them has a cohort yet."""
        sought = [] if self.cohorts is not None else [p for p in self._sought if self.by[p] == FOUND]
        asked = any(finding.unheard(state["known"][p], self._tasks(roster, p), ids[0]) for p in sought)
        return {LOOK: torch.ones(len(ids), 1, dtype=torch.bool)} if asked else {}

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        """How many cohorts were found, and how well they match the declared ones (adjusted Rand index), by module."""
        declared = circles_by_trait([member.traits.get(self.compare) for member in roster.members])
        return finding.found_facts(state["known"], declared)

    def plan(self, state: State, roster: Roster) -> Plan:
        """Lines 9-15: with whom each module is averaged. Who would not send by that, but is looked at, is asked."""
        plans, asked = {}, {}
        due = self._due(state["round"] + 1)
        for unit in roster.units:
            pattern, has = self._pattern(unit), roster.has(unit)
            how = self._groupings[pattern]
            if how == PRIVATE:
                circle = torch.full((len(roster),), -1)
            elif how in (FOUND, AFFINITY):
                circle = torch.where(has, state["known"][pattern]["circle"], -1)
            else:
                circle = circles_of_shape(roster, unit, None if how == EVERYONE else roster.trait(how))
            plans[unit] = UnitPlan(circle, roster.samples)
            looked_at = torch.zeros(len(roster), dtype=torch.bool)
            if how == FOUND:
                looked_at |= has & (~state["known"][pattern]["decided"] | (due and self.cohorts is not None))
            if due and AFFINITY in self.by.values():
                looked_at |= has
            asked[unit] = looked_at & ~plans[unit].sends
        return Plan(plans, asked)

    def _due(self, round_: int) -> bool:
        return (round_ - 1) % self.every == 0

    @property
    def _groupings(self) -> dict[str, str]:
        return dict(self.by) | {module: trait for module, trait in PAPER.items() if module not in self.by}

    @property
    def _sought(self) -> list[str]:
        return [pattern for pattern, how in self.by.items() if how in (FOUND, AFFINITY)]

    def _pattern(self, unit: str) -> str:
        for pattern in self._groupings:
            if fnmatchcase(unit, pattern):
                return pattern
        raise ValueError(
            f"modfl: the module '{unit}' is in no circle; add it to `by` (e.g. by.{unit}=cohort), or give `split`, the "
            "number of units at the bottom that are the configuration module"
        )

    def _tasks(self, roster: Roster, pattern: str) -> list[finding.Task]:
        """For each client its units of a pattern with their shapes."""
        return [tuple(pair for pair in m.units.items() if self._pattern(pair[0]) == pattern) for m in roster.members]
