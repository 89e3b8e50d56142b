"""Clients of one architecture: their numbers, the module they have in common, and how it lies in a row."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedquilt.families.copies import copy_of
from fedquilt.families.habits import Habits
from fedquilt.families.layout import Layout
from fedquilt.families.parts import Holding, model_of
from fedquilt.families.units import Unit
from fedquilt.layers.prepare import prepare_eval


@dataclass(frozen=True)
class Family:
    """Clients of one architecture: their numbers, the module they have in common, and how it lies in a row."""

    ids: tuple[int, ...]
    template: nn.Module
    layout: Layout
    habits: Habits = field(default_factory=Habits, compare=False)
    one_by_one: list[bool] = field(default_factory=list, compare=False, repr=False)  # filled where eval does not stack
    _copies: dict[torch.device, nn.Module] = field(default_factory=dict, compare=False, repr=False)

    @property
    def head(self) -> Unit:
        """The last unit with parameters, frozen ones too, of the model that clients predict with."""
        inside = f"{self.template.predicts}." if isinstance(self.template, Holding) else ""
        own = {name for name, _ in self.template.named_parameters() if name.startswith(inside)}
        mine = [unit for unit in self.layout.units if not own.isdisjoint(unit.parameters + unit.buffers)]
        return mine[-1]

    def evaluator(self, device: torch.device) -> nn.Module:
        """A copy of the module in eval mode on a device, to run rows through; made once."""
        if device not in self._copies:
            self._copies[device] = prepare_eval(copy_of(self.template).to(device).eval())
        return self._copies[device]

    def model(self, row: Tensor) -> nn.Module:
        """A row as an ordinary module of its own: the user's model, whatever the method holds beside it."""
        return model_of(self.layout.fill(copy_of(self.template).to(row.device), row).eval())
