"""FedDL's experiments on inertial signals (Tu, Ouyang, Zhou, He, Xing 2021): one client a person."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from fedquilt.client import Client
from fedquilt.data import Dataset, Standardiser, choose_channels, load
from fedquilt.data.partition import Ints, by_subject
from fedquilt.data.splits import time_split
from fedquilt.engines.settings import Training
from fedquilt.models import FeddlSignals
from fedquilt.scenario import Scenario

SHARES = (0.65, 0.10, 0.25)  # the paper's 75/25, with validation taken from its training part
TRAINING = Training(rounds=40, epochs=30, batch=32, optimiser="sgd", lr=0.01, decay=0.5, decay_at=(0.5, 0.75))


def feddl_har(
    seed: int = 0, clients: int = 27, donors: int = 3, fraction: float = 1.0, data_dir: str | None = None,
    scale: str = "own", windows: int | None = None,
) -> Scenario:  # fmt: skip
    """FedDL on UCI HAR: one client a person, accelerometer and gyroscope windows of 128, six activities.

    From the paper: windows of 128 readings of 6 channels, one client a subject, a network of 2 convolutions, 2 fully
    connected layers and an output, SGD 0.01 with decay, batch 32, 30 local epochs, 40 rounds, 75/25 for each subject.
    Chosen here: total acceleration and angular velocity are the 6 channels; each subject's signals are standardised
    by its own training windows; the split goes by time, and windows that would overlap across it are dropped (the
    paper does not say; a random split leaks); 75/25 becomes 65/10/25 with validation windows; the learning rate is
    halved after 1/2 and 3/4 of the rounds. The paper's common sample set, on which the server compares models, is not
    described: here `donors` of the 30 subjects, drawn by the seed, are no clients but give their windows to the
    server, standardised by themselves. So the common samples are of nobody who takes part. `fraction` takes that
    share of each subject's time.

    Closer to the paper: `clients=8` are its users (the other clients here are more than it has); `scale="all"` has one
    scale for all, from all clients' training windows, where standardising each person removes a part of what makes
    people unlike; `windows` is at most so many windows a person, before they are split. The paper's R reads as steps of
    local training as well as epochs: with `windows=80` an epoch has two steps of batch 32, and 30 steps are 15 epochs.
    """
    data = choose_channels(load("uci_har", data_dir), ["total_acc", "body_gyro"])
    amount = Amount(clients, donors, fraction, windows)
    return _one_client_a_person("feddl-har", data, amount, scale, overlap=128, seed=seed)


def feddl_harbox(
    seed: int = 0, clients: int = 115, donors: int = 6, fraction: float = 1.0, data_dir: str | None = None,
    scale: str = "own", windows: int | None = None,
) -> Scenario:  # fmt: skip
    """FedDL on HARBox: one client a user, nine-axis windows of 100, five activities, up to 121 people's own phones.

    Taken from the paper and chosen here as in `feddl-har`; the paper takes 8 users, and 30, 60 and 90 to see how it
    scales. The paper's windows overlap by half, and the files do not say which rows do, so a window next to a cut is
    dropped as if they did.
    """
    data = load("harbox", data_dir)
    amount = Amount(clients, donors, fraction, windows)
    return _one_client_a_person("feddl-harbox", data, amount, scale, overlap=200, seed=seed)


class Amount(NamedTuple):
    """How many people take part, how many give to the server, and how much of each person's windows there are."""

    clients: int
    donors: int
    fraction: float
    windows: int | None

    def share(self, of: int) -> float:
        """Which share of a person's windows is taken."""
        if self.windows is not None and self.windows < 1:
            raise ValueError(f"windows={self.windows} leaves nobody any; give at least 1")
        return self.fraction if self.windows is None else min(self.fraction, self.windows / of)


def _one_client_a_person(
    name: str, data: Dataset, amount: Amount, scale: str, overlap: int, seed: int
) -> Scenario:  # fmt: skip
    clients, donors = amount.clients, amount.donors
    if scale not in ("own", "all"):
        raise ValueError(f"scenario '{name}': scale is own (each person's) or all (one for all), not '{scale}'")
    assert data.subject is not None
    assert data.recording is not None
    assert data.time is not None
    people = by_subject(data.subject, data.y)
    if clients < 1 or donors < 0 or clients + donors > len(people):
        raise ValueError(
            f"scenario '{name}' has {len(people)} people for clients={clients} and donors={donors}; give fewer"
        )
    order = np.random.default_rng(seed).permutation(len(people))
    giving, taking = order[:donors], np.sort(order[donors : donors + clients])
    channels, length = data.x.shape[1:]
    model = partial(FeddlSignals, data.classes, channels, length)
    kept = {}
    for p in taking:
        mine = people[p]
        parts = time_split(data.y[mine], data.recording[mine], data.time[mine], overlap, SHARES)
        kept[p] = [mine[_first(data.y[mine], part, amount.share(len(mine)))] for part in parts]
    one = Standardiser.fit(data.signals(np.concatenate([parts[0] for parts in kept.values()])))
    made = []
    for p, indices in kept.items():
        scaled = one if scale == "all" else Standardiser.fit(data.signals(indices[0]))
        train, validation, test = ((scaled(data.signals(k)), data.y[k]) for k in indices)
        made.append(Client(f"person-{people.names[p]}", model, train, validation, test))
    common = None
    if donors:
        signals = [data.signals(people[p]) for p in giving]
        x = np.concatenate([(one if scale == "all" else Standardiser.fit(s))(s) for s in signals])
        common = x, np.concatenate([data.y[people[p]] for p in giving])
    return Scenario(name, made, TRAINING, common=common, label_names=data.label_names)


def _first(y: Ints, part: Ints, fraction: float) -> Ints:
    """The first share of a split's windows, label by label (at least one of each): less time of the same person."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: give a share above 0 and at most 1")
    kept = [part[y[part] == label] for label in np.unique(y[part])]
    whole = [k[: max(1, round(fraction * len(k)))] for k in kept]
    return np.sort(np.concatenate(whole)) if whole else part
