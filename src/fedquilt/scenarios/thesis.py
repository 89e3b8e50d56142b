"""The federations of the thesis on client-side personalisation: ten clients, each the specialist of one class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from fedquilt.client import Client, ModelBuilder
from fedquilt.data import Dataset, load
from fedquilt.data.partition import specialists, subset
from fedquilt.data.splits import random_split
from fedquilt.engines.settings import Training
from fedquilt.models import ThesisCNN
from fedquilt.scenario import Scenario
from fedquilt.scenarios.inputs import centred

EXTRA_MNIST = (4, 1, 4, 1, 3, 2, 2, 3, 4, 3)
EXTRA_CIFAR = (3, 3, 3, 1, 2, 2, 2, 3, 4, 1)
TRAINING = Training(rounds=100, epochs=1, batch=32, optimiser="sgd", lr=0.01, momentum=0.9)


def thesis_mnist(seed: int = 0, clients: int = 10, fraction: float = 1.0, data_dir: str | None = None) -> Scenario:
    """The thesis' MNIST: ten clients with all digits, each with two to five times as much of its own.

    From the thesis: class c is cut in 10 + t_c equal fragments, t = 4 1 4 1 3 2 2 3 4 3; every client gets one of
    each class and client c the t_c others too; the test images are cut the same way; SGD 0.01, 100 rounds. Chosen
    here: the network, momentum 0.9 and batch 32, of which its text says nothing; 1 local epoch, where its text has 5;
    a rate that does not decay; pixels from -2 to 2; 10 % of each client's training images validate. `clients` below 10
    leaves the last ones and their data out, `fraction` takes that share of all images.
    """
    return _specialists("thesis-mnist", load("mnist", data_dir), EXTRA_MNIST, ThesisCNN, clients, fraction, seed)


def thesis_cifar10(seed: int = 0, clients: int = 10, fraction: float = 1.0, data_dir: str | None = None) -> Scenario:
    """The thesis' CIFAR-10: ten clients with all classes, each with two to five times as much of its own.

    As `thesis-mnist`, with t = 3 3 3 1 2 2 2 3 4 1.
    """
    model = partial(ThesisCNN, 10, 3, 32)
    return _specialists("thesis-cifar10", load("cifar10", data_dir), EXTRA_CIFAR, model, clients, fraction, seed)


def _specialists(
    name: str, data: Dataset, extra: Sequence[int], model: ModelBuilder, clients: int, fraction: float, seed: int
) -> Scenario:
    if not 1 <= clients <= len(extra):
        raise ValueError(f"scenario '{name}' with clients={clients}: give 1 to {len(extra)}, one for each class")
    assert data.is_test is not None
    dealt = []
    for which in (~data.is_test, data.is_test):
        half = np.flatnonzero(which)
        half = half[subset(data.y[half], fraction, seed)]
        dealt.append([half[part] for part in specialists(data.y[half], extra, seed)])
    made = []
    for c in range(clients):
        learn, test = dealt[0][c], dealt[1][c]
        train, validation, _ = random_split(data.y[learn], (0.9, 0.1, 0.0), seed + c)
        first, second, third = ((centred(data, k), data.y[k]) for k in (learn[train], learn[validation], test))
        made.append(Client(f"specialist-{data.label_names[c]}", model, first, second, third))
    return Scenario(name, made, TRAINING, label_names=data.label_names)
