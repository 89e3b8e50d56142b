"""Many clients' units on a leading axis: a family is one matrix, a client a row, a unit a range of columns.

Everything that happens to parameters (training, installing, merging, keeping) is then an operation on a matrix or on a
range of its columns, whatever the architecture is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from fedquilt.copies import copy_of
from fedquilt.parts import model_of
from fedquilt.structure import structure
from fedquilt.training.layers import prepare_eval
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
    """How a module lies in a row of numbers: first all parameters, unit by unit, then all buffers, then state.

    What a client trains with are the first `trained` numbers of the row: state is a method's, and no engine sees it.

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
        for kind, of_state in (("parameters", False), ("buffers", False), ("buffers", True)):
            for unit in [unit for unit in units if unit.state == of_state]:
                start = at
                for name in getattr(unit, kind):
                    tensor = tensors[name]
                    if kind == "buffers" and not bool(torch.isfinite(tensor).all()):
                        continue  # a mask of -inf, say: it is part of the code, neither trained nor averaged
                    _check_dtype(name, tensor, kind)
                    self.places[name] = Place(at, at + tensor.numel(), tuple(tensor.shape), tensor.dtype)
                    at += tensor.numel()
                if at > start:
                    ranges[unit.name].append((start, at))
            if kind == "parameters":
                self.parameters = at
            elif not of_state:
                self.trained = at
        self.width = at
        self.parameter_names = tuple(n for unit in units for n in unit.parameters)
        self.frozen = tuple(n for n in self.parameter_names if not tensors[n].requires_grad)  # these never train
        self.buffer_names = tuple(n for unit in units for n in unit.buffers if n in self.places and not unit.state)
        self.ranges: dict[str, tuple[tuple[int, int], ...]] = {name: tuple(r) for name, r in ranges.items()}
        self._joined: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        self.state = {unit.name: self.places[unit.buffers[0]].shape for unit in units if unit.state}
        self.signatures: dict[str, Signature] = {
            unit.name: tuple(self.places[n].shape for n in unit.parameters + unit.buffers if n in self.places)
            for unit in units
        }

    @cached_property
    def statistics(self) -> dict[str, int]:
        """How many of the numbers of each unit are buffers of the model: they come last."""
        first, last = self.parameters, self.trained
        inside = {unit: [r for r in ranges if first <= r[0] < last] for unit, ranges in self.ranges.items()}
        return {unit: sum(stop - start for start, stop in ranges) for unit, ranges in inside.items() if ranges}

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
        """The tensors of a unit by name, from its numbers as one vector."""
        (whole,) = [each for each in self.units if each.name == unit]
        names = [name for name in whole.parameters + whole.buffers if name in self.places]
        parts = flat.split([self.places[name].stop - self.places[name].start for name in names])
        pairs = zip(names, parts, strict=True)
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
        return {n: part.view(self.places[n].shape) for n, part in zip(self.parameter_names, parts, strict=True)}

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


@dataclass(frozen=True)
class Family:
    """Clients of one architecture: their numbers, the module they have in common, and how it lies in a row."""

    ids: tuple[int, ...]
    template: nn.Module
    layout: Layout
    one_by_one: list[bool] = field(default_factory=list, compare=False, repr=False)  # filled where eval does not stack
    _copies: dict[torch.device, nn.Module] = field(default_factory=dict, compare=False, repr=False)

    def evaluator(self, device: torch.device) -> nn.Module:
        """A copy of the module in eval mode on a device, to run rows through; made once."""
        if device not in self._copies:
            self._copies[device] = prepare_eval(copy_of(self.template).to(device).eval())
        return self._copies[device]

    @cached_property
    def mixes_samples(self) -> bool:
        """Whether what the module makes of a sample in eval mode depends on the others: it has norms of the batch."""
        norms = (m for m in self.template.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        return any(norm.running_mean is None for norm in norms)

    def model(self, row: Tensor) -> nn.Module:
        """A row as an ordinary module of its own: the user's model, whatever the method holds beside it."""
        return model_of(self.layout.fill(copy_of(self.template).to(row.device), row).eval())


def families(
    modules: Mapping[int, nn.Module], units: Mapping[int, Sequence[Unit]], samples: Mapping[int, Hashable]
) -> tuple[Family, ...]:
    """Group clients by architecture, that is by structure, units, and what a sample is (its shape and type)."""
    groups: dict[tuple[str, str, Hashable], list[int]] = {}
    layouts: dict[int, Layout] = {}
    known: dict[int, tuple[str, Layout]] = {}  # clients may share a module: it is read once
    for i, module in modules.items():
        if id(module) not in known:
            known[id(module)] = (structure(module), Layout(module, units[i]))
        text, layouts[i] = known[id(module)]
        groups.setdefault((text, layouts[i].key(), samples[i]), []).append(i)
    return tuple(Family(tuple(ids), modules[ids[0]], layouts[ids[0]]) for ids in groups.values())
