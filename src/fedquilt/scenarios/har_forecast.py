"""Forecasting on UCI HAR: how a person's phone moves next."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedquilt.client import Client
from fedquilt.data import choose_channels, load
from fedquilt.data.partition import by_subject
from fedquilt.data.splits import time_split
from fedquilt.engines.settings import Training
from fedquilt.models.plain import Forecaster
from fedquilt.scenario import Scenario

SHARES = (0.6, 0.1, 0.3)
DYNAMIC = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS")


def har_forecast(
    seed: int = 0, clients: int = 20, past: int = 48, steps: int = 12, windows: int = 90, data_dir: str | None = None
) -> Scenario:
    """UCI HAR as a forecast: the next quarter of a second of a walking person's acceleration, one client a person.

    Windows of total acceleration, 3 axes at 50 Hz, while walking on the level, upstairs or downstairs: the first `past`
    readings are given, the `steps` that follow are to be predicted, each person's in deviations of its own training
    windows. At most `windows` a person, split by time so that no reading is in two parts. `clients` people are drawn by
    the seed. Everything but the data was chosen here.
    """
    data = choose_channels(load("uci_har", data_dir), ["total_acc"])
    names = [name.upper() for name in data.label_names]
    walking = [at for at, name in enumerate(names) if name in DYNAMIC]
    data = data.take(np.isin(data.y, walking))
    if past < 1 or steps < 1 or past + steps > data.x.shape[2]:
        raise ValueError(f"scenario 'har-forecast': past={past} and steps={steps} do not fit in {data.x.shape[2]}")
    assert data.subject is not None
    assert data.recording is not None
    assert data.time is not None
    people = by_subject(data.subject, data.y)
    if not 1 <= clients <= len(people):
        raise ValueError(f"scenario 'har-forecast' has {len(people)} people for clients={clients}; give fewer")
    model = partial(Forecaster, data.x.shape[1], past, steps)
    made = []
    for p in np.sort(np.random.default_rng(seed).permutation(len(people))[:clients]):
        mine = people[p]
        parts = time_split(data.y[mine], data.recording[mine], data.time[mine], 128, SHARES)
        kept = [mine[part][: max(1, round(windows * share))] for part, share in zip(parts, SHARES, strict=True)]
        signals = [data.signals(part) for part in kept]
        mean, spread = signals[0].mean((0, 2), keepdims=True), signals[0].std((0, 2), keepdims=True)
        scaled = [(signal - mean) / spread for signal in signals]
        train, validation, test = ((s[:, :, :past], s[:, :, past : past + steps]) for s in scaled)
        made.append(Client(f"person-{people.names[p]}", model, train, validation, test))
    training = Training(rounds=20, epochs=2, batch=16, optimiser="adam", lr=0.003)
    return Scenario("har-forecast", made, training, task="forecasting")
