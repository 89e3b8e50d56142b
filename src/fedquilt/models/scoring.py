"""A model with its scores of public samples beside it, cut by label, for methods that share scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from fedquilt.units import Unit

NEVER = -1e9  # the logit of a label that is not owned; finite, so that 0 times it is 0


def label_units(classes: int) -> list[str]:
    """The names of the units of scores.

    >>> label_units(2)
    ['label-0', 'label-1']
    """
    return [f"label-{label}" for label in range(classes)]


class ScoringModel(nn.Module):
    """A client's own model, silent about labels it does not own, and its scores of the public samples.

    `public` counts the public samples of each label. A unit of scores is a label's column, one number a public sample,
    or, `by_sample`, the scores of all labels for the public samples that have the label.

    >>> model = ScoringModel(nn.Linear(2, 3), labels=(0, 2), public=(2, 2, 1))
    >>> model(torch.zeros(1, 2)).softmax(1)[0, 1].item(), model.label_2.shape
    (0.0, torch.Size([5]))
    """

    def __init__(
        self, model: nn.Module, labels: Collection[int], public: Sequence[int], by_sample: bool = False
    ) -> None:
        super().__init__()
        self.model, self.classes = model, len(public)
        self.register_buffer("owned", torch.tensor([float(label in labels) for label in range(self.classes)]))
        self.register_buffer("heard", torch.zeros(self.classes))
        for label in range(self.classes):
            size = public[label] * self.classes if by_sample else sum(public)
            self.register_buffer(f"label_{label}", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.model(x)
        if outputs.shape[-1] != self.classes:
            raise ValueError(
                f"score sharing: a model gives {outputs.shape[-1]} outputs, but there are {self.classes} labels; give "
                "it an output for every label of the federation, those that its client does not own are masked"
            )
        return torch.where(self.get_buffer("owned") > 0, outputs, NEVER)

    def cut(self) -> tuple[Unit, ...]:
        """The model, what its client knows of labels, and one unit of scores a label."""
        parameters = tuple(name for name, _ in self.named_parameters())
        buffers = tuple(f"model.{name}" for name, _ in self.model.named_buffers())
        private = (Unit("model", parameters, buffers), Unit("owned", (), ("owned", "heard")))
        scores = enumerate(label_units(self.classes))
        return private + tuple(Unit(unit, (), (f"label_{label}",)) for label, unit in scores)
