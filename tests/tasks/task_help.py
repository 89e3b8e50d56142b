"""Small federations of every task, with made-up samples that have something to learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.tasks import IGNORED, Task

LENGTH, TOKENS = 6, 5


class Speller(nn.Module):
    """A token's scores from an embedding and a linear layer, place by place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(TOKENS, 4)
        self.head = nn.Linear(4, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


class Net(nn.Module):
    """Two modules of a few layers, one of which normalises."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.configuration = nn.Sequential(nn.Linear(wide, 8), nn.LayerNorm(8), nn.Tanh())
        self.operation = nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.operation(self.configuration(x))
        return found


def numbers(client: int, count: int, outputs: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(client * 1000 + count)
    x = torch.randn(count, 3, generator=draw)
    slopes = torch.tensor([[1.0, -2.0, 0.5], [0.5, 1.0, 1.0]])[:outputs]
    slopes = slopes if client % 2 else slopes.flip(1)
    return x, x @ slopes.T + 0.1 * torch.randn(count, outputs, generator=draw)


def labels(client: int, count: int) -> tuple[Tensor, Tensor]:
    x, y = numbers(client, count, 2)
    return x, torch.cat([y > 0, y[:, :1] > y[:, 1:]], dim=1)


def tokens(client: int, count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(client * 1000 + count)
    x = torch.randint(0, TOKENS, (count, LENGTH), generator=draw)
    y = (x + (1 if client % 2 else 2)) % TOKENS
    y[:, 4:] = torch.where(torch.rand(count, 2, generator=draw) < 0.5, IGNORED, y[:, 4:])
    return x, y


def readings(client: int, count: int) -> tuple[Tensor, Tensor]:
    time = torch.arange(count + 9).float()
    wave = torch.sin(0.7 * time + client) + 0.3 * torch.cos(0.2 * time * (1 + client % 2))
    windows = wave.unfold(0, 9, 1)[:count]
    return windows[:, :6].clone(), windows[:, 6:].clone()


MADE: dict[str, tuple[Callable[[int, int], tuple[Tensor, Tensor]], Callable[[], nn.Module]]] = {
    "regression": (partial(numbers, outputs=2), partial(Net, 3, 2)),
    "multilabel": (labels, partial(Net, 3, 3)),
    "tokens": (tokens, Speller),
    "forecasting": (readings, partial(Net, 6, 3)),
}


def federation(kind: str, clients: int = 4, task: Task | None = None) -> fq.Scenario:
    """Clients of unlike sizes, every other of which has another rule."""
    make, model = MADE[kind]
    counts = [20 + 3 * number for number in range(clients)]
    made = [
        fq.Client(
            f"c{i}", model, make(i, n), make(i, 11 + i), make(i, 15), {"device": str(i % 2), "cohort": "all"}
        )
        for i, n in enumerate(counts)
    ]  # fmt: skip
    return fq.Scenario(kind, made, fq.Training(lr=0.1, batch=8, rounds=3), task=task or kind)
