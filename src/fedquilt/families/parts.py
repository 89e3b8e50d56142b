"""What a client holds: its model, further models beside it, and state that a method keeps with the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fedquilt.families.heads import through
from fedquilt.families.units import Cut, Unit, cut


@dataclass(frozen=True)
class Parts:
    """What a client holds. One model keeps its own units; those of several are called `part/unit`.

    `models` are named parts; `predicts` is the one that a client predicts with and that its user gets. `state` holds
    the first values of tensors that go with the client and are no part of a model: each is a unit by its name, private
    unless a plan shares it. `units` cuts a single model otherwise than it would be. `writes` names buffers of a model
    that the method's steps write; others that no step of training writes are each client's own and never travel.
    `draws` names further parts that are the client's model from another draw of first weights, each with a number.
    `head` is the path of a layer of a single model: what that is given are the model's `features`.

    >>> parts = Parts({"shared": nn.Linear(2, 1), "personal": nn.Linear(2, 1)}, predicts="personal")
    >>> [unit.name for unit in parts.cut()]
    ['shared/model', 'personal/model']
    >>> import torch
    >>> [unit.name for unit in Parts(nn.Linear(2, 1), state={"drift": torch.zeros(3)}).cut()]
    ['model', 'drift']
    """

    models: nn.Module | Mapping[str, nn.Module]
    state: Mapping[str, Tensor] = field(default_factory=dict)
    predicts: str = ""
    units: Cut | None = None
    writes: tuple[str, ...] = ()
    draws: Mapping[str, int] = field(default_factory=dict)
    head: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.models, nn.Module):
            if self.units is not None:
                raise ValueError("several models are cut each by itself; give `units` for a single one only")
            if self.predicts not in self.models:
                raise ValueError(
                    f"a client that holds {', '.join(self.models)} predicts with one of them, not '{self.predicts}'"
                )
        elif self.draws:
            raise ValueError(f"beside {', '.join(self.draws)} a client's first model has a name, too: models={{...}}")

    def drawn(self, build: Callable[[int], nn.Module]) -> Parts:
        """The same with all models in place; `build` gives the client's model by the number of a draw."""
        if isinstance(self.models, nn.Module) or not self.draws:
            return self
        more = {name: build(number) for name, number in self.draws.items()}
        return replace(self, models={**self.models, **more}, draws={})

    def module(self) -> nn.Module:
        """All of it as one module: the model itself where there is nothing else."""
        return self.models if isinstance(self.models, nn.Module) and self._bare else Holding(self)

    @property
    def _bare(self) -> bool:
        """Whether there is nothing but models."""
        return not self.state and not self.head

    def written(self, buffer: str) -> bool:
        """Whether steps of the method write a buffer of that module."""
        return buffer.startswith(f"{Holding.STATE}.") or buffer.removeprefix(f"{Holding.ONE}.") in self.writes

    def cut(self) -> tuple[Unit, ...]:
        """The units of that module, bottom to top, part after part, state at the end."""
        if isinstance(self.models, nn.Module):
            units = cut(self.models, self.units)
            if self._bare:
                return units
            units = tuple(_inside(unit, Holding.ONE) for unit in units)
        else:
            units = tuple(
                replace(_inside(unit, part), name=f"{part}/{unit.name}")
                for part, model in self.models.items()
                for unit in cut(model)
            )
        if taken := [unit.name for unit in units if unit.name in self.state]:
            raise ValueError(
                f"the model has a part '{taken[0]}', and the method keeps something of that name beside it; give the "
                "part of the model another name"
            )
        return units + tuple(Unit(name, (), (f"{Holding.STATE}.{name}",), state=True) for name in self.state)


def _inside(unit: Unit, part: str) -> Unit:
    """A unit of a model that is a part of something bigger."""
    names = ([f"{part}.{name}" for name in tensors] for tensors in (unit.parameters, unit.buffers))
    parameters, buffers = (tuple(each) for each in names)
    return replace(unit, parameters=parameters, buffers=buffers)


class Holding(nn.Module):
    """The models that a client holds and a method's state beside them, as one module; it runs one of the models."""

    ONE, STATE = "model", "state"

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        models = {self.ONE: parts.models} if isinstance(parts.models, nn.Module) else parts.models
        self.predicts, self.fedquilt_head = parts.predicts or self.ONE, parts.head
        for name, model in models.items():
            if not name.isidentifier() or name == self.STATE or hasattr(self, name):
                raise ValueError(f"'{name}' cannot be the name of a part; take another word")
            self.add_module(name, model)
        if parts.state:
            self.add_module(self.STATE, nn.Module())
            for name, value in parts.state.items():
                self.get_submodule(self.STATE).register_buffer(name, value.detach().clone())

    @property
    def fedquilt_runs(self) -> list[dict[str, str]]:
        """How to run each of the models, as arguments of a call."""
        return [{"part": name} for name, _ in self.named_children() if name != self.STATE]

    def forward(self, x: Tensor, part: str = "", features: bool = False, **kwargs: object) -> Any:
        """What one of the models gives; with `features`, these and the scores."""
        model = self.get_submodule(part or self.predicts)
        return through(model, self.fedquilt_head, x) if features else model(x, **kwargs)


def model_of(module: nn.Module) -> nn.Module:
    """The user's own model in what a client holds: the one that it predicts with."""
    return module.get_submodule(module.predicts) if isinstance(module, Holding) else module
