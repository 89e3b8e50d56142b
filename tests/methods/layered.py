"""A federation whose clients fall in latent groups that differ by layer: for tests of methods that look for them.

Two kinds of sensors write what matters into different channels, and each has two kinds of users who call two of the
four classes by each other's name. So the lowest layer, too narrow for both sensors, is best shared by clients with one
sensor, the next by clients with one sensor and one way of naming, and nobody has enough samples to learn alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fedquilt as fq

CORNERS = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
NAMES = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2]])
CHANNELS = 12
LAYERS = ["0", "2", "4"]


def layered(seed: int = 0, each: int = 3, samples: int = 24, rounds: int = 12) -> fq.Scenario:
    """`each` clients of every sensor and naming; clients 0-5 have one sensor when `each` is 3, 0-2 one naming too."""
    random = torch.Generator().manual_seed(seed)

    def draw(sensor: int, naming: int, count: int) -> tuple[Tensor, Tensor]:
        corner = torch.randint(4, (count,), generator=random)
        x = torch.randn(count, CHANNELS, generator=random)
        mine = slice(3 * sensor, 3 * sensor + 3)
        x[:, mine] = CORNERS[corner] + 0.6 * x[:, mine]
        return x, NAMES[naming][corner]

    def client(sensor: int, naming: int, i: int) -> fq.Client:
        train, validation, test = (draw(sensor, naming, count) for count in (samples, 20, 80))
        traits = {"sensor": str(sensor), "naming": f"{sensor}{naming}"}
        return fq.Client(f"sensor{sensor}-naming{naming}-{i}", network(), train, validation, test, traits)

    clients = [client(s, n, i) for s in (0, 1) for n in (0, 1) for i in range(each)]
    common = 0.3 * torch.randn(200, CHANNELS, generator=random)
    for sensor in (0, 1):
        common[:, 3 * sensor : 3 * sensor + 3] += 1.5 * CORNERS[torch.randint(4, (200,), generator=random)]
    training = fq.Training(rounds=rounds, epochs=10, batch=12, lr=0.02, optimiser="adam")
    return fq.Scenario("layered", clients, training, common=(common, torch.zeros(200, dtype=torch.int64)))


def network(hidden: int = 4) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(CHANNELS, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 4)
    )
