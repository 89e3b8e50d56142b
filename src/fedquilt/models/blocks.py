"""Pieces the papers' networks are made of."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn


class Modular(nn.Module):
    """A configuration module (the input side, as the device demands) followed by an operation module (the task).

    Both are given as functions that build them. The operation module is built first: with the same seed, clients of
    different devices then start from the same operation module, as ModFL asks.

    >>> import torch
    >>> net = Modular(lambda: nn.Linear(3, 4), lambda: nn.Linear(4, 2))
    >>> net(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    >>> sorted(net.units)
    ['configuration', 'operation']
    """

    units: ClassVar[dict[str, list[str]]] = {"configuration": ["configuration"], "operation": ["operation"]}

    def __init__(self, configuration: Callable[[], nn.Module], operation: Callable[[], nn.Module]) -> None:
        super().__init__()
        task = operation()
        self.configuration = configuration()
        self.operation = task

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.operation(self.configuration(x))
        return out


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU, last: bool = False) -> nn.Sequential:
    """Fully connected layers of the given sizes with an activation between them, and after the last one if asked.

    >>> dense(8, 4, 2)
    Sequential(
      (0): Linear(in_features=8, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=2, bias=True)
    )
    """
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if last or number < len(sizes) - 2:
            layers.append(activation())
    return nn.Sequential(*layers)
