"""FedEM's partitions (Marfoq et al. 2021), which FedMN's experiments use too: CIFAR-10, CIFAR-100, EMNIST, FEMNIST."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedquilt.client import Client, ModelBuilder
from fedquilt.data import Dataset, load
from fedquilt.data.dirichlet import dirichlet, pachinko
from fedquilt.data.partition import Partition, by_subject, subset
from fedquilt.data.splits import random_split
from fedquilt.engines.settings import Training
from fedquilt.models import FedemCNN, MobileNetV2, SmallCNN
from fedquilt.scenario import Scenario
from fedquilt.scenarios.inputs import centred

SHARES = (0.70, 0.10, 0.20)  # the paper's 80/20, with validation taken from its training part
AT_LEAST = 20  # samples a client, so that there is something to validate and to test on


def _training(lr: float) -> Training:
    return Training(
        rounds=200, batch=128, optimiser="sgd", lr=lr, momentum=0.9, weight_decay=5e-4, decay=0.1, decay_at=(0.5, 0.75)
    )


def fedem_cifar10(
    seed: int = 0,
    clients: int = 80,
    alpha: float = 0.4,
    groups: int = 3,
    fraction: float = 1.0,
    model: str = "mobilenet-v2",
    width: float = 1.0,
    data_dir: str | None = None,
) -> Scenario:
    """FedEM's CIFAR-10: 80 clients, classes in 3 groups divided by Dirichlet shares, MobileNet-v2.

    From the papers: official train and test images merged, classes in 3 random groups and each group divided among
    the clients by Dirichlet(0.4) shares, 80/20 for each client, MobileNet-v2, SGD with momentum 0.9 and weight decay
    5e-4, batch 128, 1 local epoch, 200 rounds (FedMN: 150), rate x 0.1 after 1/2 and 3/4 of them. Chosen here: the
    network starts from random weights, not from ImageNet's, and its strides suit 32 x 32, so the papers' numbers are
    out of reach; the rate 0.03; 80/20 becomes 70/10/20 with validation samples; at least 20 samples a client.
    `fraction` takes that share of all images, `width` scales the network's channels, and `model="small-cnn"` is a
    network of two convolutions for a quick look.
    """
    data = load("cifar10", data_dir)
    data = data.take(subset(data.y, fraction, seed))
    parts = dirichlet(data.y, clients, alpha, groups, at_least=AT_LEAST, seed=seed)
    return _scenario("fedem-cifar10", data, parts, _network(model, data.classes, width), 0.03, seed)


def fedem_cifar100(
    seed: int = 0,
    clients: int = 100,
    alpha: float = 0.4,
    beta: float = 10.0,
    fraction: float = 1.0,
    model: str = "mobilenet-v2",
    width: float = 1.0,
    data_dir: str | None = None,
) -> Scenario:
    """FedEM's CIFAR-100: 100 clients by Pachinko allocation over the 20 super-classes, MobileNet-v2.

    From the papers: official train and test images merged, Pachinko allocation with 0.4 over the super-classes and 10
    over the labels in each; the rest, and what was chosen here, as in `fedem-cifar10`, with the rate 0.01.
    """
    data = load("cifar100", data_dir)
    data = data.take(subset(data.y, fraction, seed))
    assert data.coarse is not None
    parts = pachinko(data.y, data.coarse, clients, alpha, beta, seed)
    return _scenario("fedem-cifar100", data, parts, _network(model, data.classes, width), 0.01, seed)


def fedem_emnist(
    seed: int = 0, clients: int = 100, alpha: float = 0.4, fraction: float = 1.0, data_dir: str | None = None
) -> Scenario:
    """FedEM's EMNIST: a tenth of the data, 100 clients with Dirichlet shares of its 62 characters, a 2-layer CNN.

    From the papers: 10 % of EMNIST by class, each class divided by Dirichlet(0.4) shares, 80/20 for each client, the
    CNN, and the training settings of `fedem-cifar10`. Chosen here: the rate 0.1; 70/10/20 with validation samples; at
    least 20 samples a client. `fraction` is of the papers' tenth.
    """
    data = load("emnist", data_dir)
    data = data.take(subset(data.y, 0.1 * fraction, seed))
    parts = dirichlet(data.y, clients, alpha, at_least=AT_LEAST, seed=seed)
    return _scenario("fedem-emnist", data, parts, partial(FedemCNN, data.classes), 0.1, seed)


def femnist(seed: int = 0, clients: int = 539, fraction: float = 1.0, data_dir: str | None = None) -> Scenario:
    """FEMNIST: 539 writers of digits and letters, each a client, 62 characters, a 2-layer CNN.

    From the papers: one client a writer, 539 of them, 80/20 for each, the CNN, and the training settings of
    `fedem-cifar10`. Chosen here: which writers, drawn by the seed among those with at least 20 characters; the rate
    0.05; 70/10/20 with validation samples. `fraction` takes that share of each writer's characters.
    """
    data = load("femnist", data_dir)
    assert data.subject is not None
    writers = by_subject(data.subject, data.y, at_least=AT_LEAST)
    if clients > len(writers):
        raise ValueError(f"scenario 'femnist' has {len(writers)} writers for clients={clients}; give fewer")
    chosen = np.sort(np.random.default_rng(seed).permutation(len(writers))[:clients])
    # of each writer's characters as a whole, since a writer has few of each
    kept = [writers[w][subset(np.zeros(len(writers[w]), int), fraction, seed)] for w in chosen]
    names = [f"writer-{writers.names[w]}" for w in chosen]
    parts = Partition(tuple(kept), data.y).named(names)
    return _scenario("femnist", data, parts, partial(FedemCNN, data.classes), 0.05, seed)


def _network(model: str, classes: int, width: float) -> ModelBuilder:
    if model == "small-cnn":
        return partial(SmallCNN, (32, 64), classes, 3, 32)
    if model != "mobilenet-v2":
        raise ValueError(f"model='{model}' is neither 'mobilenet-v2' nor 'small-cnn'")
    return partial(MobileNetV2, classes, width)


def _scenario(name: str, data: Dataset, parts: Partition, model: ModelBuilder, lr: float, seed: int) -> Scenario:
    made = []
    for i, mine in enumerate(parts):
        splits = random_split(data.y[mine], SHARES, seed + i)
        train, validation, test = ((centred(data, mine[s]), data.y[mine[s]]) for s in splits)
        made.append(Client(parts.names[i] if parts.names else f"client-{i + 1}", model, train, validation, test))
    return Scenario(name, made, _training(lr), label_names=data.label_names)
