"""A federation where devices and cohorts are crossed: for tests of methods whose modules follow traits.

Old devices have 8 channels, new ones 12, and what matters is in other channels. Two cohorts give the four classes other
names. So clients with one device should share the input side, clients of one cohort the output side. With `few` labels
each cohort has two classes that the other has not, which shows in what its clients send from the first round on.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from layered import CORNERS
from torch import Tensor, nn

import fedquilt as fq

CHANNELS = {"old": 8, "new": 12}
FEW = {"north": torch.tensor([0, 1]), "south": torch.tensor([1, 2])}  # corners that north calls 0 and 1, south 2 and 3
NAMES = {"north": torch.tensor([0, 1, 2, 3]), "south": torch.tensor([1, 2, 3, 0])}


class TwoModules(nn.Module):
    """A configuration module for a number of channels and an operation module that is the same for all."""

    units: ClassVar[dict[str, list[str]]] = {"configuration": ["configuration"], "operation": ["operation"]}

    def __init__(self, channels: int, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.configuration = nn.Sequential(nn.Linear(channels, 3), nn.Tanh())
        torch.manual_seed(0)  # the same first operation module for every device
        self.operation = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.operation(self.configuration(x))
        return out


def crossed(seed: int = 0, each: int = 3, samples: int = 10, rounds: int = 10, few: bool = False) -> fq.Scenario:
    """`each` clients of every device and cohort, in this order: old north, old south, new north, new south."""
    random = torch.Generator().manual_seed(seed)

    def draw(device: str, cohort: str, count: int) -> tuple[Tensor, Tensor]:
        corners = FEW[cohort] if few else torch.arange(4)
        corner = corners[torch.randint(len(corners), (count,), generator=random)]
        x = torch.randn(count, CHANNELS[device], generator=random)
        x[:, -3:] = CORNERS[corner] + 0.6 * x[:, -3:]
        return x, NAMES[cohort][corner]

    def client(device: str, cohort: str, i: int) -> fq.Client:
        train, validation, test = (draw(device, cohort, count) for count in (samples + i, 20, 80))
        traits = {"device": device, "cohort": cohort, "planet": "earth"}
        model = partial(TwoModules, CHANNELS[device])
        return fq.Client(f"{device}-{cohort}-{i}", model, train, validation, test, traits)

    clients = [client(d, c, i) for d in CHANNELS for c in NAMES for i in range(each)]
    return fq.Scenario("crossed", clients, fq.Training(rounds=rounds, epochs=5, batch=5, lr=0.2))
