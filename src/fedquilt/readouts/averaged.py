"""Averaged (client-side personalisation, section 5.5.5): between what a client received and what it trained.

Eq. 5.4-5.5: theta = w adapted + (1 - w) received with w = n_i / n_all, the client's share of all training samples.

By class, an idea the thesis leaves open: the rows of the output layer that belong to class c take w_c = n_ic / n_c
instead. A client does not know how many samples of a class all others have; it takes n_c = n_all / classes, which is
right where all classes are equally frequent over all clients, as they are in the thesis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.families.layout import Layout
from fedquilt.interface.client_stack import ClientStack
from fedquilt.interface.readout import EvaluationContext, Readout


@dataclass(frozen=True)
class Averaged(Readout):
    """The mean of the received and the adapted model, the latter weighted by the client's share of all samples."""

    kind: ClassVar[str] = "averaged"

    def predictions(self, look: EvaluationContext, split: str) -> Tensor:
        self._make(look)
        return look.predictions(self.name, split)

    def logs(self, look: EvaluationContext, split: str) -> Tensor | None:
        self._make(look)
        return look.logs(self.name, split)

    def _make(self, look: EvaluationContext) -> None:
        def between() -> Tensor:
            received, adapted = look.received.rows, look.adapted.rows
            between = torch.lerp(received, adapted, self.weight(look.received))
            return torch.where(received == adapted, received, between)  # there may be infinite values that stay home

        look.rows(self.name, between)

    def weight(self, view: ClientStack) -> Tensor:
        """(k, 1) or (k, width) how much the adapted model counts."""
        everyone = view.down.everyone if view.down is not None else 0
        if not everyone:
            raise ValueError(f"the read-out '{self.name}' needs the number of all clients' samples; none was received")
        samples = torch.tensor(view.samples, dtype=torch.float32, device=view.rows.device)
        return (samples / everyone)[:, None]


@dataclass(frozen=True)
class AveragedByClass(Averaged):
    """The same, but the output layer class by class: weighted by the client's share of the samples of that class."""

    kind: ClassVar[str] = "averaged-by-class"
    needs_classes: ClassVar[str] = "averages the output layer class by class"

    def weight(self, view: ClientStack) -> Tensor:
        share = super().weight(view)  # (k, 1)
        weight = share.expand(-1, view.rows.shape[1]).clone()
        table = view.data("train")
        counts = share.new_zeros(len(share), view.classes).scatter_add_(1, table.y, table.mask)
        of_class = share * view.classes * counts / counts.sum(1, keepdim=True)  # n_ic / (n_all / classes)
        for name in output_of(view.family.layout, view.classes):
            place = view.family.layout.places[name]
            each = of_class.clamp(max=1).repeat_interleave((place.stop - place.start) // view.classes, dim=1)
            weight[:, place.start : place.stop] = each
        return weight


def output_of(layout: Layout, classes: int) -> list[str]:
    """The parameters of the last layer, each with a row per class."""
    layer = layout.parameter_names[-1].rpartition(".")[0]
    names = [name for name in layout.parameter_names if name.rpartition(".")[0] == layer]
    odd = [name for name in names if layout.places[name].shape[:1] != (classes,)]
    if odd:
        raise ValueError(
            f"the last layer's '{odd[0]}' has the shape {layout.places[odd[0]].shape}, not a row for each of {classes} "
            "classes, so it cannot be averaged class by class: use the read-out 'averaged'"
        )
    return names
