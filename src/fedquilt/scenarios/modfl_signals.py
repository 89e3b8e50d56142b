"""ModFL's activity experiment (Liang, Srinivasan, Andresen 2022), and its likeness on HAPT alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedquilt.client import ModelBuilder
from fedquilt.data import Dataset, choose_channels, cut_windows, load, resample
from fedquilt.data.partition import Ints
from fedquilt.data.splits import Parts, time_split
from fedquilt.engines.settings import Training
from fedquilt.models import modfl_hapt, modfl_realworld, modfl_wisdm
from fedquilt.scenario import Scenario
from fedquilt.scenarios.cohorts import Generation, cohort_clients

NAMES = ("walking", "upstairs", "downstairs", "sitting", "standing")
HAPT = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING")
REALWORLD = ("walking", "climbingup", "climbingdown", "sitting", "standing")
WISDM = ("Walking", "Upstairs", "Downstairs", "Sitting", "Standing")
PER_LABEL = 250  # 1250 samples a data set over 5 labels, as in the paper
SHARES = (0.70, 0.10, 0.20)  # the paper's 80/20, with validation taken from its training part
TRAINING = Training(rounds=2000, epochs=1, batch=8, optimiser="adam", lr=0.001)
GRAVITY = 9.81


def modfl_har(
    seed: int = 0,
    clients: int = 60,
    labels: int = 4,
    cohorts: int = 5,
    fraction: float = 1.0,
    data_dir: str | None = None,
) -> Scenario:
    """ModFL's activities: clients with HAPT, RealWorld or WISDM, 5 cohorts with 2, 4 or 5 of the 5 shared activities.

    From the paper: the 5 labels the data sets share, 250 samples of each and data set, a third of the clients on
    each, 5 cohorts with `labels` labels each (5: one cohort, IID), equal amounts for every client and label, the
    three networks, Adam 0.001, batch 8, 1 local epoch, 2000 rounds, 60 clients (its largest). Chosen here: windows of
    2.56 s (128 readings at 50 Hz, 51 at 20 Hz) side by side, without overlap, so that no reading is on two clients;
    each subject's windows are split by time before they are dealt out; 80/20 becomes 70/10/20 with validation
    windows; acceleration in g; cohorts' label sets are windows on a shuffled ring. `fraction` scales the 250.
    """
    sources = [
        ("hapt", HAPT, modfl_hapt, 128, 1.0),
        ("realworld", REALWORLD, modfl_realworld, 128, GRAVITY),
        ("wisdm", WISDM, modfl_wisdm, 51, GRAVITY),
    ]
    loaded = [load(name, data_dir) for name, *_ in sources]
    generations = [
        _generation(name, _in_g(data, unit), names, model, length, fraction, seed)
        for data, (name, names, model, length, unit) in zip(loaded, sources, strict=True)
    ]
    made = cohort_clients("modfl-har", generations, clients, cohorts, labels, len(NAMES), seed)
    return Scenario("modfl-har", made, TRAINING, label_names=NAMES)


def modfl_wearables(
    seed: int = 0,
    clients: int = 30,
    labels: int = 4,
    cohorts: int = 5,
    fraction: float = 1.0,
    data_dir: str | None = None,
) -> Scenario:
    """ModFL's activities on HAPT alone: accelerometers at 20 Hz, accelerometers with gyroscopes at 50 Hz, 5 cohorts.

    The experiment of `modfl-har` for those without RealWorld and WISDM; the paper does not have it, but its
    introduction tells of such devices. HAPT's 30 subjects are halved at random. "gen1" has the one half's
    acceleration only, filtered and resampled to 20 Hz, with ModFL's WISDM network; "gen2" has the other half's
    acceleration and angular velocity at 50 Hz, with ModFL's HAPT network. Windows, splits and amounts (250 a label
    and generation) are as in `modfl-har`.
    """
    data = load("hapt", data_dir)
    assert data.subject is not None
    people = np.random.default_rng([seed, 1]).permutation(np.unique(data.subject))
    old, new = (data.take(np.isin(data.subject, people[half::2])) for half in range(2))
    generations = [
        _generation("gen1", resample(choose_channels(old, ["acc"]), 20), HAPT, modfl_wisdm, 51, fraction, seed),
        _generation("gen2", new, HAPT, modfl_hapt, 128, fraction, seed),
    ]
    made = cohort_clients("modfl-wearables", generations, clients, cohorts, labels, len(NAMES), seed)
    return Scenario("modfl-wearables", made, TRAINING, label_names=NAMES)


def _in_g(data: Dataset, unit: float) -> Dataset:
    """The data with acceleration in g, whatever unit it is in."""
    if unit == 1.0:
        return data
    x = data.x.copy()
    x[:, [c.startswith("acc") for c in data.channels]] /= unit
    return replace(data, x=x)


def _generation(
    name: str, data: Dataset, names: tuple[str, ...], model: ModelBuilder, length: int, fraction: float, seed: int
) -> Generation:
    """Windows side by side, split by time subject by subject, at most the paper's number of each label."""
    cut = cut_windows(data, length, length).with_labels(names)
    assert cut.subject is not None
    assert cut.recording is not None
    assert cut.time is not None
    pieces: list[list[Ints]] = [[], [], []]
    for subject in np.unique(cut.subject):
        mine = np.flatnonzero(cut.subject == subject)
        parts = time_split(cut.y[mine], cut.recording[mine], cut.time[mine], length, SHARES)
        for piece, part in zip(pieces, parts, strict=True):
            piece.append(mine[part])
    rng = np.random.default_rng([seed, 2])
    kept = []
    for piece, share in zip(pieces, SHARES, strict=True):
        whole = rng.permutation(np.concatenate(piece))
        amount = max(1, round(PER_LABEL * fraction * share))
        kept.append(np.sort(np.concatenate([whole[cut.y[whole] == label][:amount] for label in range(len(names))])))
    return Generation(name, model, cut.signals, cut.y, Parts(*kept))
