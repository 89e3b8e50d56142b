"""Many clients' units on a leading axis: a family is one matrix, a client a row, a unit a range of columns.

Everything that happens to parameters (training, installing, merging, keeping) is then an operation on a matrix or on a
range of its columns, whatever the architecture is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fedquilt.units import Unit

Signature = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Place:
    """Where a parameter or buffer lies in a row, and what it is there."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """How a module lies in a row of numbers: first all parameters, unit by unit, then all buffers.

    >>> from fedquilt.units import cut
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> layout = Layout(net, cut(net))
    >>> layout.parameters, layout.width, layout.size("1")
    (15, 22, 13)
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.units = tuple(units)
        self.places: dict[str, Place] = {}
        at = 0
        ranges: dict[str, list[tuple[int, int]]] = {unit.name: [] for unit in units}
        for kind in ("parameters", "buffers"):
            for unit in units:
                start = at
                for name in getattr(unit, kind):
                    tensor = tensors[name]
                    _check_dtype(name, tensor, kind)
                    self.places[name] = Place(at, at + tensor.numel(), tuple(tensor.shape), tensor.dtype)
                    at += tensor.numel()
                if at > start:
                    ranges[unit.name].append((start, at))
            if kind == "parameters":
                self.parameters = at
        self.width = at
        self.parameter_names = tuple(n for unit in units for n in unit.parameters)
        self.buffer_names = tuple(n for unit in units for n in unit.buffers)
        self.ranges: dict[str, tuple[tuple[int, int], ...]] = {name: tuple(r) for name, r in ranges.items()}
        self.signatures: dict[str, Signature] = {
            unit.name: tuple(self.places[n].shape for n in unit.parameters + unit.buffers) for unit in units
        }

    def size(self, unit: str) -> int:
        """How many numbers a unit has, parameters and buffers."""
        return sum(stop - start for start, stop in self.ranges[unit])

    def take(self, rows: Tensor, unit: str) -> Tensor:
        """A unit's value in each row, (k, size): a view where its columns are one range."""
        ranges = self.ranges[unit]
        if len(ranges) == 1:
            return rows[:, ranges[0][0] : ranges[0][1]]
        return torch.cat([rows[:, start:stop] for start, stop in ranges], dim=1)

    def put(self, rows: Tensor, unit: str, value: Tensor) -> None:
        """Write a unit's value, (k, size), into rows, in place."""
        at = 0
        for start, stop in self.ranges[unit]:
            rows[:, start:stop] = value[:, at : at + stop - start]
            at += stop - start

    def tensor(self, rows: Tensor, name: str) -> Tensor:
        """One parameter or buffer of every row, (k, *shape), as a view."""
        place = self.places[name]
        return rows[:, place.start : place.stop].unflatten(1, place.shape or (1,)).reshape(len(rows), *place.shape)

    def split(self, row: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers of one row, by name, as views; buffers that are not numbers of float32 are cast."""
        parts = row.split([place.stop - place.start for place in self.places.values()])
        tensors = {
            name: part.view(place.shape) if place.dtype == torch.float32 else part.view(place.shape).to(place.dtype)
            for (name, place), part in zip(self.places.items(), parts, strict=True)
        }
        return {n: tensors[n] for n in self.parameter_names}, {n: tensors[n] for n in self.buffer_names}

    def row(self, module: nn.Module) -> Tensor:
        """A module's parameters and buffers as one row."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return torch.cat([tensors[name].detach().float().reshape(-1) for name in self.places])

    def fill(self, module: nn.Module, row: Tensor) -> nn.Module:
        """Write a row into a module of this layout, in place."""
        parameters, buffers = self.split(row.detach())
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name, value in (parameters | buffers).items():
                own[name].copy_(value)
        return module

    def key(self) -> str:
        """What two models must have in common to be one family, besides their code."""
        return repr([(unit.name, self.signatures[unit.name]) for unit in self.units])


def _check_dtype(name: str, tensor: Tensor, kind: str) -> None:
    if kind == "parameters" and tensor.dtype != torch.float32:
        raise ValueError(f"parameter '{name}' is {tensor.dtype}; build the model in float32")
    if kind == "buffers" and tensor.numel() and not torch.equal(tensor.float().to(tensor.dtype), tensor):
        raise ValueError(f"buffer '{name}' holds values that float32 cannot; keep it out of the buffers")


def _structure(module: nn.Module) -> str:
    """A module's structure as text. Anonymous functions inside a module would hide behind equal texts: see families."""
    return repr(module)


@dataclass(frozen=True)
class Family:
    """Clients of one architecture: their numbers, the module they have in common, and how it lies in a row."""

    ids: tuple[int, ...]
    template: nn.Module
    layout: Layout

    def model(self, row: Tensor) -> nn.Module:
        """A row as an ordinary module of its own."""
        return self.layout.fill(copy.deepcopy(self.template), row).eval()


def families(
    modules: Mapping[int, nn.Module], units: Mapping[int, Sequence[Unit]], shapes: Mapping[int, tuple[int, ...]]
) -> tuple[Family, ...]:
    """Group clients by architecture, that is by structure, units and shape of a sample."""
    groups: dict[tuple[str, str, tuple[int, ...], type], list[int]] = {}
    layouts: dict[int, Layout] = {}
    for i, module in modules.items():
        layouts[i] = Layout(module, units[i])
        groups.setdefault((_structure(module), layouts[i].key(), shapes[i], type(module)), []).append(i)
    return tuple(Family(tuple(ids), modules[ids[0]], layouts[ids[0]]) for ids in groups.values())


def initial_rows(family: Family, modules: Mapping[int, nn.Module], known: dict[tuple[str, Signature], Tensor]) -> Tensor:
    """The first values of a family's clients, (k, width).

    Equal units start equal, also across families: the first to bring a unit of some name and signature gives its value
    to all that come later (`known` is filled). Buffers differ where a client's own module brings other ones, such as
    the labels it owns.
    """
    rows = torch.stack([family.layout.row(modules[i]) for i in family.ids])
    for unit in family.layout.units:
        key = (unit.name, family.layout.signatures[unit.name])
        inside = sum(family.layout.places[n].stop - family.layout.places[n].start for n in unit.parameters)
        value = family.layout.take(rows, unit.name).clone()
        known.setdefault(key, value[0].clone())
        value[:, :inside] = cast(Tensor, known[key])[:inside]
        family.layout.put(rows, unit.name, value)
    return rows
