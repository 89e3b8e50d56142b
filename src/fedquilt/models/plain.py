"""Small networks of any size: the score-sharing paper's CNNs and MLP, and a plain multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from fedquilt.models.blocks import dense


class SmallCNN(nn.Module):
    """The score-sharing paper's CNNs: 3 x 3 convolutions, each with ReLU and max pooling, then the output.

    `filters=(16, 32)` is its 2-layer network, `(8, 16, 16, 32)` its 4-layer one. The paper names softmax or ReLU as
    "the activation"; here hidden layers have ReLU and the output is logits. Kernels and pooling were chosen here.

    >>> import torch
    >>> SmallCNN(filters=(16, 16, 32))(torch.zeros(2, 3, 48, 48)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, filters: tuple[int, ...] = (16, 32), classes: int = 4, channels: int = 3, pixels: int = 48
    ) -> None:
        super().__init__()
        if not filters or pixels >> len(filters) == 0:
            raise ValueError(f"{len(filters)} convolutions with pooling do not go with {pixels} x {pixels} pixels")
        self.input_shape = (channels, pixels, pixels)
        layers: list[nn.Module] = []
        for a, b in pairwise((channels, *filters)):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.output = nn.Linear(filters[-1] * (pixels >> len(filters)) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.features(x))
        return out


class MLP(nn.Module):
    """Fully connected layers with ReLU on the flattened input: the score-sharing paper's MLP has sizes 16-16-32.

    >>> import torch
    >>> MLP((3, 48, 48), sizes=(16, 16, 32), classes=4)(torch.zeros(2, 3, 48, 48)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, input_shape: tuple[int, ...] = (3, 48, 48), sizes: tuple[int, ...] = (16, 16, 32), classes: int = 4
    ) -> None:
        super().__init__()
        self.input_shape = tuple(input_shape)
        features = 1
        for n in input_shape:
            features *= n
        self.hidden = dense(features, *sizes, last=True)
        self.output = nn.Linear(sizes[-1] if sizes else features, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.hidden(x.flatten(1)))
        return out


class Forecaster(nn.Module):
    """What follows a signal: the last reading and what a perceptron of the past adds to it, (n, channels, steps).

    >>> import torch
    >>> Forecaster(3, past=48, steps=12)(torch.zeros(2, 3, 48)).shape
    torch.Size([2, 3, 12])
    """

    def __init__(self, channels: int, past: int, steps: int, hidden: int = 48) -> None:
        super().__init__()
        self.channels, self.steps = channels, steps
        self.hidden = nn.Linear(channels * past, hidden)
        self.output = nn.Linear(hidden, channels * steps)

    def forward(self, x: Tensor) -> Tensor:
        last = x[:, :, -1:]
        moves: Tensor = self.output(torch.tanh(self.hidden((x - last).flatten(1))))
        return last + moves.view(-1, self.channels, self.steps)
