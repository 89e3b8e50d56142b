"""The server's values: one for each unit and circle, merged from what was sent and updated by the method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedquilt._util.shared_memory import place_on
from fedquilt.core.guard import Guard
from fedquilt.core.selection import Selection
from fedquilt.engines.cuda_graph import Graph
from fedquilt.families.layout import Signature
from fedquilt.interface.messages import Roster
from fedquilt.interface.method import Heard, Method, State
from fedquilt.sharing import AnyUnit, Merged, MixedUnit, Rule, UnitPlan, merge_unit, mix
from fedquilt.sharing.merge import Mean
from fedquilt.sharing.rule import NOTHING_KNOWN, ContextRule, MergeContext
from fedquilt.sharing.weighted_sums import Sums

_ALL = slice(None)
_CAPTURE_UP_TO = 2**24  # numbers in a merge; bigger ones take longer than launching them, and graphs keep memory
Key = tuple[str, Signature]  # a unit in one of the shapes it comes in


@dataclass(frozen=True)
class Merging:
    """How copies become a circle's value: merged by a rule, then updated by the method.

    `statistics` says of a unit how many of its numbers, the last ones, are running statistics, which are only merged.
    A `guard` merges with noise in place of the rule.
    """

    rule: Rule
    method: Method
    statistics: Mapping[Key, int]
    trusted: Tensor | None = None  # (K,) bool: the clients whose copies the rule trusts
    key: int = 0  # a hash of the seed and the round, for rules that draw
    state: State = field(default_factory=dict)  # what the method's server half remembers of this round
    guard: Guard | None = None

    @property
    def updates(self) -> bool:
        """Whether the method makes something of merged values."""
        return type(self.method).update is not Method.update

    @cached_property
    def in_context(self) -> bool:
        """Whether the rule wants to know more than copies; asked once, since protocols take long to answer."""
        return isinstance(self.rule, ContextRule)


@dataclass
class CircleValues:
    """The server's values of units with one and the same plan: a row a circle, unit after unit in the columns.

    Of mixed units it holds the clients' copies, a row each.
    """

    plan: AnyUnit
    keys: tuple[Key, ...]
    value: Tensor  # (circles, size)
    known: Tensor  # (circles,) bool: whether a circle has a value at all
    settled: bool = False  # whether it is certain, without asking the device, that all circles have one
    memory: dict[str, Tensor] = field(default_factory=dict)  # (circles, size) what the method remembers of the values
    captured: _Captured | None = None  # the last merge, if it was on a GPU

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(unit for unit, _ in self.keys)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size_of(signature) for _, signature in self.keys)

    def columns(self, key: Key) -> slice:
        """Where one unit lies."""
        at = self.keys.index(key)
        start = sum(self.sizes[:at])
        return slice(start, start + self.sizes[at])

    def column(self, key: Key) -> Tensor:
        """The values of one unit, as a view."""
        return self.value[:, self.columns(key)]

    def received(self, of: Callable[[Tensor], Tensor], columns: slice = _ALL) -> tuple[Tensor, Tensor]:
        """(k, size) what some clients receive, and (k,) whether there is such a value.

        `of` takes their part out of a tensor over all clients.
        """
        here = self.plan.to(self.value.device)
        if isinstance(here, MixedUnit):
            mixed = mix(of(here.matrix) * self.known, self.value[:, columns])
            return mixed.value, mixed.heard
        rows = of(here.row)
        value = self.value.expand(len(rows), -1) if here.count == 1 else self.value[rows]
        return value[:, columns], self.known[rows]

    def sent(self, of: Selection, whole: bool) -> tuple[Tensor, Tensor | None]:
        """(k, size) what clients receive, and (k,) how far they move towards it; None: all the way, as `whole` says."""
        if whole and isinstance(self.plan, UnitPlan) and self.plan.count == 1:
            return self.value.expand(len(of.ids), -1), None
        value, known = self.received(of)
        return value, None if whole else of(self.plan.to(self.value.device).taken) * known

    def copies(self, key: Key, numbers: Tensor) -> Tensor:
        """(k, M, size) of one mixed unit the copies of clients of these numbers (k, M); 0 where a number is -1."""
        there = numbers.to(self.value.device)
        return self.column(key)[there.clamp(min=0)] * (there >= 0)[:, :, None]

    def single(self, key: Key) -> CircleValues:
        """The values of one of the units alone."""
        memory = {name: tensor[:, self.columns(key)].clone() for name, tensor in self.memory.items()}
        return CircleValues(self.plan, (key,), self.column(key).clone(), self.known.clone(), self.settled, memory)

    def merge(self, parts: Sequence[tuple[Tensor, Tensor]], how: Merging) -> Tensor:
        """Merge client numbers and their copies; which of the copies were not finite and left out, (k,)."""
        return self.hold(self.merged(parts, how), parts, how)

    def merged(self, parts: Sequence[tuple[Tensor, Tensor]], how: Merging) -> Merged:
        """What becomes of client numbers and their copies, before the method makes something of it."""
        guard, context = how.guard, self.context(how)
        return guard.merge(self, parts) if guard else merge_unit(self.plan, parts, how.rule, context)

    def take(self, sums: Sums, ids: Tensor, how: Merging) -> Tensor:
        """Merge sums of clients' copies that nobody here has seen; which of the clients sent none, (k,)."""
        if not len(sums.total):
            return sums.refused
        here = sums.to(self.value.device)
        return self.hold(here.mean(), [(ids, here.total)], how)

    def hold(self, merged: Merged, parts: Sequence[tuple[Tensor, Tensor]], how: Merging) -> Tensor:
        """Keep what the method makes of merged values; which of the copies were left out, (k,)."""
        if how.updates:
            merged = merged._replace(value=self._updated(merged, parts, how))
        self.value.copy_(merged.onto(self.value))
        self.known |= merged.heard
        return merged.refused

    def context(self, how: Merging, columns: slice = _ALL) -> MergeContext:
        """What a rule may know beside these columns of the copies."""
        if not how.in_context:
            return NOTHING_KNOWN
        return MergeContext(self.value[:, columns], None if self.all_known() else self.known, how.key, how.trusted)

    def _updated(self, merged: Merged, parts: Sequence[tuple[Tensor, Tensor]], how: Merging) -> Tensor:
        """(circles, size) what the method makes of the merged values, unit by unit; what it remembers is kept here."""
        share = self._share(merged, parts) if how.guard is None else torch.full_like(merged.weight, how.guard.rate)
        heard = Heard(merged.weight[:, None], share[:, None], how.state)
        found: list[Tensor] = []
        for key in self.keys:
            whole = self.columns(key)
            at = slice(whole.start, whole.stop - how.statistics.get(key, 0))
            memory = {name: tensor[:, at] for name, tensor in self.memory.items()}
            value, kept = how.method.update(key[0], self.value[:, at], merged.value[:, at], heard, memory)
            found += [value, merged.value[:, at.stop : whole.stop]]  # running statistics are averaged, no more
            for name, tensor in kept.items():
                if name not in self.memory:
                    self.memory[name] = torch.zeros_like(self.value)
                mine = self.memory[name][:, at]  # in place: a captured merge finds it where it was
                mine.copy_(torch.where(merged.heard[:, None], tensor, mine))
        return torch.cat(found, dim=1)

    def _share(self, merged: Merged, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """(circles,) the share of a circle's members, of those that weigh anything, that were heard."""
        device = self.value.device
        here = self.plan.to(device)
        if isinstance(here, MixedUnit):
            return merged.heard.float()
        ids = torch.cat([ids.to(device, non_blocking=True) for ids, _ in parts])
        weighs = (here.weight > 0).float()
        nobody = torch.zeros(here.count, device=device)
        heard = nobody.index_add(0, here.row[ids], weighs[ids] * ~merged.refused)
        return heard / nobody.index_add(0, here.row, weighs).clamp(min=1)

    def replayed(self, ids: Tensor, values: Tensor, how: Merging) -> Tensor:
        """`merge` of one part. On a GPU, copies that come in the same memory again are merged by a captured graph."""
        if not values.is_cuda or values.numel() > _CAPTURE_UP_TO or not isinstance(how.rule, Mean) or how.guard:
            return self.merge([(ids, values)], how)
        by = id(how.state) if how.updates else 0  # what was captured with another state is not what would be done now
        key = (values.data_ptr(), values.shape, values.stride(), self.value.data_ptr(), by)
        if self.captured is None or self.captured.key != key:
            self.captured = _Captured(key, self, values, how)
        return self.captured.merge(ids)

    def all_known(self) -> bool:
        """Whether every circle has a value; once it has, it keeps one."""
        self.settled = self.settled or bool(self.known.all())
        return self.settled


def size_of(signature: Signature) -> int:
    return sum(int(torch.Size(shape).numel()) for shape in signature)


def owned(plan: AnyUnit, key: Key, roster: Roster) -> Tensor:
    """(circles,) which circles have a member with a unit of this shape."""
    has = torch.tensor([member.units.get(key[0]) == key[1] for member in roster.members])
    if isinstance(plan, UnitPlan) and plan.pool is not None:  # all are there to be chosen
        return has.any().expand(plan.count)
    inside = has & (plan.circle >= 0) if isinstance(plan, UnitPlan) else has
    return torch.zeros(plan.count, dtype=torch.bool).index_fill_(0, plan.row[inside], True)


def held(plan: AnyUnit) -> Tensor:
    """(circles,) of which circles the server gets a value in a round: whoever is alone in one keeps it.

    >>> held(UnitPlan([0, 0, 3])).tolist()
    [True, False]
    """
    if isinstance(plan, UnitPlan) and plan.pool is None:
        return plan.members > 1
    return torch.ones(plan.count, dtype=torch.bool)


class _Captured:
    """A merge of copies that lie in one place: done as it is at first, captured when it comes again, then replayed."""

    def __init__(self, key: tuple[object, ...], circle_values: CircleValues, values: Tensor, how: Merging) -> None:
        self.key, self.circle_values, self.values, self.how = key, circle_values, values, how
        self.ids = torch.zeros(len(values), dtype=torch.int64, device=values.device)
        self.left_out = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        self.graph: Graph | None = None
        self.seen = 0

    def merge(self, ids: Tensor) -> Tensor:
        """Merge the copies of clients of these numbers; which of them were left out, (k,)."""
        self.ids.copy_(place_on(tuple(ids.tolist()), self.ids.device))
        self.seen += 1
        if self.graph is None and self.seen > 1:
            self.graph = Graph(self._merge, self.values.device)
        if self.graph is None:
            self._merge()
        else:
            self.graph.replay()
        return self.left_out.clone()

    def _merge(self) -> None:
        self.left_out.copy_(self.circle_values.merge([(self.ids, self.values)], self.how))
