"""Federations of digits whose groups are known: for the tests of `auto`."""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import nn

import fedquilt as fq
from fedquilt.data import load

ROUNDS = 24


def net(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def called(group: int, seed: int) -> np.ndarray:
    """What a group calls each digit."""
    return np.random.default_rng([seed, group]).permutation(10)


def planted(
    kind: str = "names", clients: int = 15, sizes: tuple[int, ...] = (60,), validation: int = 20, share: float = 1.0,
    seed: int = 0, rounds: int = ROUNDS, widths: tuple[int, ...] = (32,),
) -> fq.Scenario:  # fmt: skip
    """Digits dealt out to clients of three groups: with other names for the digits, or (iid, skewed) no difference."""
    data, rng = load("digits"), np.random.default_rng([seed, 9])
    x, y, used, made = data.images(), data.y, np.zeros(len(data), dtype=bool), []
    for i in range(clients):
        parts = (sizes[i % len(sizes)], validation, 25)
        odds = rng.dirichlet(np.full(10, 0.5)) if kind == "skewed" else np.full(10, 0.1)
        free = rng.permutation(np.flatnonzero(~used))
        mine = rng.choice(free, sum(parts), replace=False, p=odds[y[free]] / odds[y[free]].sum())
        used[mine] = True
        label = called(i % 3, seed)[y[mine]] if kind == "names" else y[mine]
        a, b = parts[0], parts[0] + parts[1]
        train, held, test = ((x[mine[s]], label[s]) for s in (slice(a), slice(a, b), slice(b, None)))
        model = partial(net, widths[i // 3 % len(widths)])
        made.append(fq.Client(f"c{i}", model, train, held if validation else None, test, {"cohort": str(i % 3)}))
    return fq.Scenario("planted", made, fq.Training(rounds=rounds, epochs=2, batch=10, lr=0.1, share=share))
