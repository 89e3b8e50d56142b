"""FedRep's CIFAR-10 (Collins et al. 2021): every client has images of two classes."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedquilt.client import Client
from fedquilt.data import load
from fedquilt.data.partition import by_label_sets, subset
from fedquilt.data.splits import random_split
from fedquilt.engines.settings import Training
from fedquilt.models import FedrepCNN
from fedquilt.scenario import Scenario
from fedquilt.scenarios.inputs import centred

TRAINING = Training(
    rounds=100, epochs=1, batch=10, optimiser="sgd", lr=0.01, momentum=0.5, weight_decay=1e-4, share=0.1
)


def fedrep_cifar10(
    seed: int = 0, clients: int = 100, labels: int = 2, fraction: float = 1.0, data_dir: str | None = None
) -> Scenario:
    """FedRep's CIFAR-10: 100 clients with two classes each, a tenth of them a round, a 5-layer CNN.

    From the paper and its authors' program: each class is cut in equal shards and a client has `labels` of them; the
    test images are dealt out by the same classes; two convolutions and three fully connected layers; 100 rounds of
    one epoch (FedRep trains its head for ten besides), batch 10, SGD 0.01 with momentum 0.5 and weight decay 1e-4,
    10 % of the clients a round. Chosen here: a client's classes are never the same one twice, while the program draws
    shards freely, which leaves a tenth of its clients with one class, where nothing can be wrong; weight decay on
    biases too; no random crops and flips, which the program has; 10 % of a client's training images validate; results
    are the last round's, the paper's a mean over the last ten. `fraction` takes that share of all images.
    """
    data = load("cifar10", data_dir)
    assert data.is_test is not None
    sets = _label_sets(data.classes, clients, labels, seed)
    dealt = []
    for which in (~data.is_test, data.is_test):
        half = np.flatnonzero(which)
        half = half[subset(data.y[half], fraction, seed)]
        dealt.append([half[part] for part in by_label_sets(data.y[half], sets, everything=True, seed=seed)])
    made = []
    for i, (learn, test) in enumerate(zip(*dealt, strict=True)):
        train, validation, _ = random_split(data.y[learn], (0.9, 0.1, 0.0), seed + i)
        first, second, third = ((centred(data, k), data.y[k]) for k in (learn[train], learn[validation], test))
        made.append(Client(f"client-{i + 1}", partial(FedrepCNN, data.classes), first, second, third))
    return Scenario("fedrep-cifar10", made, TRAINING, label_names=data.label_names)


def _label_sets(classes: int, clients: int, labels: int, seed: int) -> list[tuple[int, ...]]:
    """So many labels for each client, none twice, at random, and each label at as many clients as any other."""
    if clients < 1 or not 1 <= labels <= classes:
        raise ValueError(
            f"scenario 'fedrep-cifar10' with clients={clients} and labels={labels}: give at least 1 client, and 1 to "
            f"{classes} labels"
        )
    rng = np.random.default_rng(seed)
    dealt = np.zeros(classes)
    sets = []
    for _ in range(clients):
        mine = np.argsort(dealt + rng.random(classes))[:labels]  # of the labels dealt least, chance decides
        dealt[mine] += 1
        sets.append(tuple(sorted(mine.tolist())))
    return sets
