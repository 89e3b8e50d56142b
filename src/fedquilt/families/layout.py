"""Many clients' units on a leading axis: a family is one matrix, a client a row, a unit a range of columns.

Everything that happens to parameters (training, installing, merging, keeping) is then an operation on a matrix or on a
range of its columns, whatever the architecture is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedquilt.families.units import Unit

Signature = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Span:
    """Where a parameter or buffer lies in a row, and what it is there."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """How a module lies in a row of numbers: all parameters, unit by unit, then all buffers, then what stays home.

    A parameter that is frozen is a buffer here, and a constant one unless the module itself writes it. Buffers that are
    not finite at first (a running maximum, say) and `constant` ones, which nothing writes, are each client's own: no
    unit has them, so they never travel. Of the constant ones only `own`, which differ among clients, lie in a row; the
    others are part of the module. What a client trains with are the first `trained` numbers of the row; after them
    comes a method's state, which no engine sees, and at the end, where changes `wait`, a number for each parameter:
    what earlier messages left out of its change.

    >>> from fedquilt.families.units import cut
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> layout = Layout(net, cut(net))
    >>> layout.parameters, layout.width, layout.size("1")
    (15, 22, 13)
    """

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], constant: Collection[str] = (), own: Collection[str] = (),
        wait: bool = False,
    ) -> None:  # fmt: skip
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.units = tuple(units)
        self.places: dict[str, Span] = {}
        self.width = 0
        ranges: dict[str, list[tuple[int, int]]] = {unit.name: [] for unit in units}
        self._named: dict[str, list[str]] = {unit.name: [] for unit in units}  # a unit's tensors, in the wire's order
        self.parameter_names = tuple(n for unit in units for n in unit.parameters)
        models = [unit for unit in units if not unit.state]
        written = [n for unit in models for n in unit.buffers if n not in constant]
        endless = [n for n in written if not bool(torch.isfinite(tensors[n]).all())]
        shared = [(unit.name, unit.parameters) for unit in models]
        buffers = [(unit.name, [n for n in unit.buffers if n in written and n not in endless]) for unit in models]
        self._place_units((*shared, *buffers), tensors, ranges)
        self.parameters = sum(tensors[n].numel() for n in self.parameter_names)
        self._place(endless, tensors)
        self.core = self.width  # what follows is not learned, and lasts as long as a client's model
        self.constant = tuple(n for unit in models for n in unit.buffers if n in constant)
        self.own = tuple(n for n in self.constant if n in own)
        self._place(self.own, tensors)
        self.trained = self.width
        self.buffer_names = tuple(n for n in self.places if n not in self.parameter_names)
        self._place_units([(unit.name, unit.buffers) for unit in units if unit.state], tensors, ranges)
        self.state = {unit.name: self.places[unit.buffers[0]].shape for unit in units if unit.state}
        self.travels = sum(stop - start for some in ranges.values() for start, stop in some)
        self.waiting = self.parameters if wait else 0  # how many numbers at the end wait
        self.width += self.waiting
        self.ranges: dict[str, tuple[tuple[int, int], ...]] = {name: tuple(r) for name, r in ranges.items()}
        self._joined: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        self.signatures: dict[str, Signature] = {
            unit.name: tuple(self.places[n].shape for n in self._named[unit.name]) for unit in units
        }

    def _place_units(
        self, units: Sequence[tuple[str, Sequence[str]]], tensors: Mapping[str, Tensor],
        ranges: dict[str, list[tuple[int, int]]],
    ) -> None:  # fmt: skip
        """Give the tensors of units the next places of the row."""
        for unit, names in units:
            start = self.width
            self._place(names, tensors)
            self._named[unit] += names
            if self.width > start:
                ranges[unit].append((start, self.width))

    def _place(self, names: Collection[str], tensors: Mapping[str, Tensor]) -> None:
        """Give some tensors the next places of the row."""
        for name in names:
            tensor = tensors[name]
            _check_dtype(name, tensor)
            self.places[name] = Span(self.width, self.width + tensor.numel(), tuple(tensor.shape), tensor.dtype)
            self.width += tensor.numel()

    @cached_property
    def statistics(self) -> dict[str, int]:
        """How many of the numbers of each unit are buffers of the model: they come last."""
        first, last = self.parameters, self.trained
        inside = {unit: [r for r in ranges if first <= r[0] < last] for unit, ranges in self.ranges.items()}
        return {unit: sum(stop - start for start, stop in ranges) for unit, ranges in inside.items() if ranges}

    @cached_property
    def learned(self) -> dict[str, tuple[int, int]]:
        """From where to where the parameters of each unit that has some lie: they are the first of its numbers."""
        return {unit: some[0] for unit, some in self.ranges.items() if some and some[0][0] < self.parameters}

    def size(self, *units: str) -> int:
        """How many numbers some units have together, parameters and buffers."""
        return sum(stop - start for unit in units for start, stop in self.ranges[unit])

    def span(self, part: str = "") -> tuple[int, int]:
        """From where to where the parameters of a part lie, or all of them: units of a part lie together."""
        inside = [unit for unit in self.units if unit.name.startswith(f"{part}/") or not part]
        names = [name for unit in inside for name in unit.parameters]
        if not names:
            raise KeyError(f"a client here holds no part '{part}' with parameters")
        return self.places[names[0]].start, self.places[names[-1]].stop

    def named(self, unit: str, flat: Tensor) -> dict[str, Tensor]:
        """The tensors of a unit by name, from its numbers as one vector, or from those of its first tensors."""
        names, sizes = self._named[unit], list[int]()
        for name in names:
            if sum(sizes) < len(flat):
                sizes.append(self.places[name].stop - self.places[name].start)
        pairs = zip(names, flat.split(sizes), strict=False)
        return {name: part.view(self.places[name].shape).to(self.places[name].dtype) for name, part in pairs}

    def _columns(self, units: tuple[str, ...]) -> list[tuple[int, int]]:
        """The column ranges of some units in the order of the wire, neighbours joined."""
        if units not in self._joined:
            joined: list[tuple[int, int]] = []
            for start, stop in (r for unit in units for r in self.ranges[unit]):
                if joined and joined[-1][1] == start:
                    joined[-1] = (joined[-1][0], stop)
                else:
                    joined.append((start, stop))
            self._joined[units] = joined
        return self._joined[units]

    def take(self, rows: Tensor, *units: str) -> Tensor:
        """The values of some units in each row, (k, size), one unit after another: a view where they lie together."""
        ranges = self._columns(units)
        if len(ranges) == 1:
            return rows[:, ranges[0][0] : ranges[0][1]]
        return torch.cat([rows[:, start:stop] for start, stop in ranges], dim=1) if ranges else rows[:, :0]

    def pieces(self, rows: Tensor, value: Tensor, *units: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Where some units lie in the rows, as views, each with its part of a (k, size) value."""
        at = 0
        for start, stop in self._columns(units):
            yield rows[:, start:stop], value[:, at : at + stop - start]
            at += stop - start

    def tensor(self, rows: Tensor, name: str) -> Tensor:
        """One parameter or buffer of every row, (k, *shape), as a view."""
        place = self.places[name]
        inside: Tensor = rows[:, place.start : place.stop]
        return inside.view(len(rows), *place.shape)

    def split(self, row: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers of one row, by name."""
        return self.split_parameters(row[: self.parameters]), self.split_buffers(row[self.parameters : self.trained])

    def split_buffers(self, row: Tensor) -> dict[str, Tensor]:
        """The buffers of a row of buffers alone, by name, in their own types."""
        parts = row.split([self.places[name].stop - self.places[name].start for name in self.buffer_names])
        shaped = zip(self.buffer_names, parts, strict=True) if self.buffer_names else ()
        return {n: part.view(self.places[n].shape).to(self.places[n].dtype) for n, part in shaped}

    def split_parameters(self, row: Tensor) -> dict[str, Tensor]:
        """The parameters of a row of parameters alone, by name, as views."""
        parts = row.split([self.places[name].stop - self.places[name].start for name in self.parameter_names])
        shaped = zip(self.parameter_names, parts, strict=True) if self.parameter_names else ()
        return {n: part.view(self.places[n].shape) for n, part in shaped}

    def row(self, module: nn.Module) -> Tensor:
        """A module's parameters and buffers as one row."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        flat = [tensors[name].detach().float().reshape(-1) for name in self.places]
        flat += [flat[0].new_zeros(self.waiting)] if self.waiting else []
        return torch.cat(flat) if flat else torch.empty(0)  # nothing, where all is frozen

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


def fits_a_row(tensor: Tensor) -> bool:
    """Whether a row of float32 holds a tensor's numbers, NaNs and infinite ones included.

    >>> fits_a_row(torch.tensor([True])), fits_a_row(torch.tensor(2**24 + 1)), fits_a_row(torch.tensor(torch.inf))
    (True, False, True)
    """
    if tensor.is_complex() or tensor.layout != torch.strided:
        return False
    return bool(torch.isclose(tensor.float().to(tensor.dtype), tensor, rtol=0, atol=0, equal_nan=True).all())


def _check_dtype(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.Parameter) and tensor.dtype != torch.float32:
        raise ValueError(f"parameter '{name}' is {tensor.dtype}; build the model in float32")
    if not isinstance(tensor, nn.Parameter) and not fits_a_row(tensor):
        raise ValueError(f"buffer '{name}' holds values that float32 cannot; keep it out of the buffers")
