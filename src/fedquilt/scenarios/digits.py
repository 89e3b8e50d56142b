"""The bundled scenario: handwritten digits, two generations of sensors, four cohorts of readers. No download."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from fedquilt.client import Client, Pair
from fedquilt.data import Dataset, load
from fedquilt.data.partition import by_label_sets, subset
from fedquilt.data.splits import random_split
from fedquilt.engines.settings import Training
from fedquilt.models.digits import DigitsNet
from fedquilt.scenario import Scenario

COHORTS = {
    "north": (0, 1, 2, 3, 4, 5),
    "east": (2, 3, 4, 5, 6, 7),
    "south": (4, 5, 6, 7, 8, 9),
    "west": (0, 1, 2, 3, 8, 9),
}
# which digits of a cohort exchange their names when `renamed` is 1, 2 or 3
EXCHANGED = {
    "north": ((0, 5), (1, 4), (2, 3)),
    "east": ((2, 4), (3, 6), (5, 7)),
    "south": ((4, 7), (5, 8), (6, 9)),
    "west": ((0, 8), (1, 9), (2, 3)),
}
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
PIXELS = {"gen1": 4, "gen2": 8}


def digits(
    seed: int = 0, clients: int = 24, noise: float = 0.1, renamed: int = 0, fraction: float = 1.0, common: int = 0
) -> Scenario:
    """Handwritten digits (bundled): 24 clients, two sensor generations, four cohorts with 6 of the 10 digits each.

    scikit-learn's 1797 digits of 8 x 8 pixels. Clients of device "gen2" see them as they are, clients of "gen1" in
    4 x 4 pixels (means of 2 x 2), both with sensor noise of standard deviation `noise` (white is 1). Devices and
    cohorts are crossed, so each of the 8 combinations has 3 of the 24 clients. Each digit's samples are dealt out among
    the clients whose cohort has it: no sample is on two clients. A client keeps about 37 samples to train, 9 to
    validate and 28 to test on, too few to do well alone. `fraction` takes that share of all samples.

    Everything here was chosen for this library; no paper has this scenario. Its noise, amounts and training settings
    were picked after some ten trials, by looking at how far apart the methods came out on test samples: it is a
    demonstration in which sharing by device and cohort has a reason to help, and no evidence for one method over
    another.

    `renamed` makes it harder on purpose: that many pairs of digits in each cohort (at most 3) exchange names, so that
    the cohorts disagree about what a digit is called and one head for all can only be a compromise. With the default,
    0, every digit keeps its name and cohorts differ in their label sets alone.

    `common` samples of each digit go to the server, as both generations of sensors see them, to compare models or to
    share scores on, and as many again to measure shared scores on (`public_test`).

    >>> scenario = digits()
    >>> len(scenario.clients), scenario.clients[0].traits
    (24, {'device': 'gen1', 'cohort': 'north'})
    """
    if clients < 1:
        raise ValueError(f"scenario 'digits' with clients={clients}: give at least 1")
    if not noise >= 0:
        raise ValueError(f"scenario 'digits' with noise={noise}: give a standard deviation from 0 up")
    if not 0 <= renamed <= 3:
        raise ValueError(f"scenario 'digits' with renamed={renamed}: give 0 to 3 pairs of digits")
    data = load("digits")
    data = data.take(subset(data.y, fraction, seed))
    if clients > len(data):
        raise ValueError(f"scenario 'digits' has {len(data)} samples for clients={clients}; give fewer clients")
    public = _of_each(data.y, common, seed)
    reference, apart = (_as_seen(data.take(half), noise, [seed, clients, at]) for at, half in enumerate(public))
    data = data.take(np.setdiff1d(np.arange(len(data)), public))
    images, y = data.images(), data.y  # (1797, 1, 8, 8) in [0, 1]
    devices, cohorts = list(PIXELS), list(COHORTS)
    traits = [{"device": devices[i % 2], "cohort": cohorts[i // 2 % 4]} for i in range(clients)]
    partition = by_label_sets(y, [COHORTS[t["cohort"]] for t in traits], everything=True, seed=seed)
    made = []
    for i, (trait, mine) in enumerate(zip(traits, partition, strict=True)):
        seen = _sensed(images[mine], trait["device"], noise, [seed, i])
        called = np.arange(10)
        for a, b in EXCHANGED[trait["cohort"]][:renamed]:
            called[[a, b]] = called[[b, a]]
        label = called[y[mine]]
        train, validation, test = random_split(label, shares=(0.5, 0.125, 0.375), seed=seed + i)
        made.append(
            Client(
                f"{trait['device']}-{trait['cohort']}-{i // 8 + 1}",
                partial(DigitsNet, PIXELS[trait["device"]]),
                train=(seen[train], label[train]),
                validation=(seen[validation], label[validation]),
                test=(seen[test], label[test]),
                traits=trait,
                labels=COHORTS[trait["cohort"]],
            )
        )
    training = Training(rounds=20, epochs=4, batch=8, optimiser="sgd", lr=0.2)
    names = [str(d) for d in range(10)]
    if not common:
        return Scenario("digits", made, training, label_names=names)
    return Scenario("digits", made, training, reference, apart, names)


def _of_each(y: Ints, number: int, seed: int) -> Ints:
    """(2, n) so many samples of each label, and as many others."""
    most = int(np.bincount(y).min()) // 2
    if not 0 <= number < most:
        raise ValueError(f"scenario 'digits' with common={number}: give 0 to {most - 1} samples of each digit")
    rng = np.random.default_rng([seed, 1])
    drawn = [rng.permutation(np.flatnonzero(y == label))[: 2 * number].reshape(2, -1) for label in np.unique(y)]
    return np.concatenate(drawn, axis=1)


def _as_seen(data: Dataset, noise: float, seed: list[int]) -> dict[str, dict[str, Pair]]:
    """The same digits as each generation of sensors sees them."""
    return {"device": {device: (_sensed(data.images(), device, noise, seed), data.y) for device in PIXELS}}


def _sensed(images: Floats, device: str, noise: float, seed: list[int]) -> Floats:
    """Images (n, 1, 8, 8) as a generation of sensors sees them."""
    seen = images.reshape(-1, 1, 4, 2, 4, 2).mean(axis=(3, 5)) if device == "gen1" else images
    noisy: Floats = seen + np.random.default_rng(seed).normal(0, noise, seen.shape).astype(np.float32)
    return noisy
