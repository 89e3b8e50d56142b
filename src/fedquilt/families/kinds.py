"""Which models are of one kind: read alike, and doing the same with a few samples to the last bit.

A client's module is built, looked at and let go: of all modules of a kind one is kept as the template, and of the
others only the numbers they start from, once where they are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedquilt.client import Split
from fedquilt.families.architecture import Description, describe_architecture
from fedquilt.families.family import Family
from fedquilt.families.habits import Habits, behaviour, bits_of, few, habits_of, same_bits
from fedquilt.families.layout import Layout, fits_a_row
from fedquilt.families.units import Unit


@dataclass(eq=False)
class Kind:
    """Models of one kind: a template, how it lies in a row, what it does, and the numbers that clients start from."""

    template: nn.Module
    description: Description
    units: tuple[Unit, ...]
    layout: Layout
    habits: Habits
    data: Split  # the few samples that its models are tried on; none with features: they are not
    rows: list[Tensor] = field(default_factory=list)
    constants: list[dict[str, Tensor]] = field(default_factory=list)
    _rows: dict[bytes, int] = field(default_factory=dict)
    _constants: dict[bytes, int] = field(default_factory=dict)
    _behaviours: dict[bytes, bytes | None] = field(default_factory=dict)

    def take(self, module: nn.Module) -> Build:
        """The numbers of a module of this kind."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        row = self.layout.row(module)
        constants = {name: tensors[name].detach().clone() for name in self.layout.constant}
        at, which = _digest([row]), _digest(constants.values())
        if at not in self._rows:
            self._rows[at] = len(self.rows)
            self.rows.append(row)
        if which not in self._constants:
            self._constants[which] = len(self.constants)
            self.constants.append(constants)
        return Build(self, self._rows[at], self._constants[which])

    def does_as(self, module: nn.Module) -> bool:
        """Whether the template with a module's numbers makes the same of a few samples as that module."""
        if not self.data.x.numel():
            return True
        numbers = dict(module.named_parameters()) | dict(module.named_buffers())
        which = _digest(numbers.values())
        if which not in self._behaviours:
            self._behaviours[which] = behaviour(self.template, self.data.x, self.data.y, numbers)
        return self._behaviours[which] == behaviour(module, self.data.x, self.data.y)

    def differing(self, builds: Collection[Build]) -> list[str]:
        """What is constant and some of these models have otherwise than the template."""
        sets = [self.constants[which] for which in {build.constants for build in builds} - {0}]
        return [name for name, first in self.constants[0].items() if any(not same_bits(s[name], first) for s in sets)]


@dataclass(frozen=True)
class Build:
    """What a client's model starts from: its kind, and the places of its numbers and constants there."""

    kind: Kind
    row: int
    constants: int

    def first(self, layout: Layout) -> Tensor:
        """(width,) the row of a client in a family's layout."""
        row = self.kind.rows[self.row]
        own = [self.kind.constants[self.constants][name].float().flatten() for name in layout.own]
        return torch.cat([row[: layout.core], *own, row[layout.core :]]) if own else row


class Kinds:
    """All kinds of models seen so far.

    >>> from fedquilt.families.units import cut
    >>> kinds, data = Kinds(), Split(torch.randn(4, 2), torch.zeros(4).long())
    >>> builds = {i: kinds.of(nn.Linear(2, width), cut, data) for i, width in enumerate((3, 1, 3))}
    >>> [family.ids for family in families(builds)]
    [(0, 2), (1,)]
    """

    def __init__(self, wait: bool = False) -> None:
        self.wait = wait  # whether rows have room for what waits
        self.seen: dict[tuple[str, Hashable, bytes], list[Kind]] = {}

    def of(
        self, module: nn.Module, cut: Callable[[nn.Module], Sequence[Unit]], data: Split,
        written: Callable[[str], bool] = lambda name: False, constant: Collection[str] = (), held: Hashable = None,
    ) -> Build:  # fmt: skip
        """What a client with a module and some samples starts from.

        `written` says which buffers are written by more than the module itself. Samples without features are nobody's
        here: what is done with them cannot be tried, and `constant` tells which buffers are. Clients are of one kind
        only if what they have `held` beside is the same.
        """
        description = describe_architecture(module)
        # What no row can hold is part of the kind.
        odd = _digest(buffer for _, buffer in module.named_buffers() if not fits_a_row(buffer))
        alike = self.seen.setdefault((description.text, (data.x.shape[1:], data.x.dtype, held), odd), [])
        for kind in alike:
            if kind.does_as(module):
                return kind.take(module)
        habits = habits_of(module, data.x, data.y) if data.x.numel() else Habits(frozenset(constant))
        habits = replace(habits, constant=frozenset(name for name in habits.constant if not written(name)))
        units = tuple(cut(module))
        layout, samples = Layout(module, units, habits.constant, wait=self.wait), few(data.x, data.y)
        alike.append(Kind(module, description, units, layout, habits, Split(*samples)))
        return alike[-1].take(module)


def families(builds: Mapping[int, Build]) -> tuple[Family, ...]:
    """Group clients by the kinds of their models."""
    groups: dict[int, dict[int, Build]] = {}
    for number, build in builds.items():
        groups.setdefault(id(build.kind), {})[number] = build
    made = []
    for group in groups.values():
        kind = next(iter(group.values())).kind
        own = kind.differing(list(group.values()))
        layout, wait = kind.layout, bool(kind.layout.waiting)
        layout = Layout(kind.template, kind.units, kind.habits.constant, own, wait) if own else layout
        made.append(Family(tuple(group), kind.template, layout, kind.habits))
    return tuple(made)


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b()
    for tensor in tensors:
        digest.update(bits_of(tensor))
    return digest.digest()
