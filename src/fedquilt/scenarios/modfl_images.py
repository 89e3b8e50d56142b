"""ModFL's image experiment (Liang, Srinivasan, Andresen 2022), and its likeness for those without STL-10."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedquilt.client import ModelBuilder
from fedquilt.data import Dataset, load
from fedquilt.data.partition import Ints
from fedquilt.data.skew import Array, coarser, grey
from fedquilt.data.splits import random_split
from fedquilt.engines.settings import Training
from fedquilt.models import ModflCifar, ModflStl
from fedquilt.scenario import Scenario
from fedquilt.scenarios.cohorts import Generation, cohort_clients, per_label_sample
from fedquilt.scenarios.inputs import centred

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "horse", "ship", "truck")
STL = ("airplane", "car", "bird", "cat", "deer", "dog", "horse", "ship", "truck")
PER_LABEL = 1300  # 11700 samples a data set over 9 labels, as in the paper
SHARES = (0.65, 0.10, 0.25)  # the paper's 75/25, with validation taken from its training part
TRAINING = Training(rounds=200, epochs=1, batch=16, optimiser="adam", lr=0.001)


def modfl_images(
    seed: int = 0,
    clients: int = 72,
    labels: int = 6,
    cohorts: int = 9,
    fraction: float = 1.0,
    data_dir: str | None = None,
) -> Scenario:
    """ModFL's images: half the clients with CIFAR-10, half with STL-10, 9 cohorts with 3, 6 or 9 of 9 shared labels.

    From the paper: the 9 labels both data sets have, 1300 samples of each and data set, half of the clients on
    either, 9 cohorts with `labels` labels each (9: one cohort, IID), the same amount of data for every client and
    each of its labels, both networks, Adam 0.001, batch 16, 1 local epoch, 200 rounds, 72 clients (its largest and
    Table I's). Chosen here: cohorts' label sets are windows on a shuffled ring, so that each label is in as many
    cohorts as any other; 75/25 becomes 65/10/25 with validation samples; pixels are scaled to about -2..2. `fraction`
    scales the 1300.
    """
    small, large = load("cifar10", data_dir), load("stl10", data_dir)
    generations = [
        _generation("cifar", small.with_labels(CIFAR), ModflCifar, fraction, seed),
        _generation("stl", large.with_labels(STL), ModflStl, fraction, seed),
    ]
    made = cohort_clients("modfl-images", generations, clients, cohorts, labels, len(CIFAR), seed)
    return Scenario("modfl-images", made, TRAINING, label_names=CIFAR)


def modfl_cameras(
    seed: int = 0,
    clients: int = 72,
    labels: int = 6,
    cohorts: int = 9,
    fraction: float = 1.0,
    data_dir: str | None = None,
) -> Scenario:
    """ModFL's images on CIFAR-10 alone: two camera generations, 16 x 16 grey and 32 x 32 colour, 9 cohorts.

    The experiment of `modfl-images` for those without STL-10; the paper does not have it. CIFAR-10's images of the
    same 9 labels are cut in two disjoint halves. Clients of "gen2" see theirs as they are, with ModFL's CIFAR
    network; clients of "gen1" see theirs in 16 x 16 pixels of luminance (means of 2 x 2), with ModFL's STL network
    for that size. Everything else, 1300 samples a label and generation too, is as in `modfl-images`.
    """
    data = load("cifar10", data_dir).with_labels(CIFAR)
    order = np.random.default_rng([seed, 1]).permutation(len(data))
    halves = [data.take(np.sort(order[half::2])) for half in range(2)]
    generations = [
        _generation("gen1", halves[0], partial(ModflStl, channels=1, pixels=16), fraction, seed, coarse=True),
        _generation("gen2", halves[1], ModflCifar, fraction, seed),
    ]
    made = cohort_clients("modfl-cameras", generations, clients, cohorts, labels, len(CIFAR), seed)
    return Scenario("modfl-cameras", made, TRAINING, label_names=CIFAR)


def _generation(
    name: str, data: Dataset, model: ModelBuilder, fraction: float, seed: int, coarse: bool = False
) -> Generation:
    mine = data.take(per_label_sample(data.y, max(1, round(PER_LABEL * fraction)), seed))

    def inputs(index: Ints) -> Array:
        x = centred(mine, index)
        return coarser(grey(x), 2) if coarse else x

    return Generation(name, model, inputs, mine.y, random_split(mine.y, SHARES, seed))
