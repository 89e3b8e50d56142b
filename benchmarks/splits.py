"""Federations of MNIST and CIFAR-10 with and without planted groups: the cells of benchmarks/auto.py that no paper has.

`iid`: no difference. `dirichlet-A`: label frequencies drawn from a Dirichlet distribution of concentration A.
`labels-2`: two labels a client. `turned`: four groups whose images are turned by quarters. `names`: three groups with
other names for the labels. `pixels`: three groups with other orders of the pixels. Groups are the trait `cohort`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import nn

import fedquilt as fq
from fedquilt.data import load
from fedquilt.models import ThesisCNN

KINDS = ("iid", "dirichlet-0.5", "dirichlet-0.1", "labels-2", "turned", "names", "pixels")
GROUPS = {"turned": 4, "names": 3, "pixels": 3}


def mlp() -> nn.Module:
    """Two hidden layers on images of 14 x 14 pixels."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )  # fmt: skip


def mnist(
    kind: str, seed: int = 0, clients: int = 24, samples: tuple[int, int, int] = (60, 24, 60), rounds: int = 100
) -> fq.Scenario:
    """MNIST in 14 x 14 pixels, with an MLP."""
    data = load("mnist")
    x = data.images().astype(np.float32).reshape(-1, 1, 14, 2, 14, 2).mean((3, 5))
    training = fq.Training(rounds=rounds, epochs=2, batch=10, lr=0.1)
    return _deal(f"mnist-{kind}", x, np.asarray(data.y), kind, seed, clients, samples, mlp, training)


def cifar(
    kind: str, seed: int = 0, clients: int = 24, samples: tuple[int, int, int] = (200, 50, 100), rounds: int = 100
) -> fq.Scenario:
    """CIFAR-10, with a small CNN."""
    data = load("cifar10")
    x = (data.images().astype(np.float32) - 0.5) / 0.25
    training = fq.Training(rounds=rounds, epochs=2, batch=20, lr=0.05)
    model = partial(ThesisCNN, channels=3, pixels=32)
    return _deal(f"cifar10-{kind}", x, np.asarray(data.y), kind, seed, clients, samples, model, training)


def _deal(
    name: str, x: np.ndarray, y: np.ndarray, kind: str, seed: int, clients: int, samples: tuple[int, int, int],
    model: fq.client.ModelBuilder, training: fq.Training,
) -> fq.Scenario:  # fmt: skip
    """Each client its own samples, drawn by label frequencies of its own; seen through the eyes of its group."""
    rng, made = np.random.default_rng([seed, 7]), []
    heaps = {label: list(rng.permutation(np.flatnonzero(y == label))) for label in range(10)}
    for i in range(clients):
        group = i % GROUPS.get(kind, 1)
        labels = rng.choice(10, sum(samples), p=_frequencies(kind, rng))
        mine = np.array([heaps[label].pop() for label in labels])
        seen, called = _through(kind, group, seed, x[mine], y[mine])
        a, b = samples[0], samples[0] + samples[1]
        train, validation, test = ((seen[s], called[s]) for s in (slice(a), slice(a, b), slice(b, None)))
        made.append(fq.Client(f"client-{i}", model, train, validation, test, {"cohort": str(group)}))
    return fq.Scenario(name, made, training)


def _frequencies(kind: str, rng: np.random.Generator) -> np.ndarray:
    if kind.startswith("dirichlet-"):
        return rng.dirichlet(np.full(10, float(kind.removeprefix("dirichlet-"))))
    if kind == "labels-2":
        two = np.zeros(10)
        two[rng.choice(10, 2, replace=False)] = 0.5
        return two
    return np.full(10, 0.1)


def _through(kind: str, group: int, seed: int, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng([seed, group])
    if kind == "turned":
        return np.rot90(x, group, (2, 3)).copy(), y
    if kind == "names":
        return x, order.permutation(10)[y]
    if kind == "pixels":
        flat = x.reshape(*x.shape[:2], -1)
        return flat[..., order.permutation(flat.shape[-1])].reshape(x.shape), y
    return x, y
