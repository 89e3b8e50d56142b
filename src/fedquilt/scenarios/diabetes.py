"""Regression on a bundled table: how diabetes went on in a year, at clinics whose patients are of one age and sex."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedquilt.client import Client
from fedquilt.data.splits import random_split
from fedquilt.engines.settings import Training
from fedquilt.models.plain import MLP
from fedquilt.scenario import Scenario

UNIT = 100.0  # of the measure of progression, which runs from 25 to 346
HIDDEN = ("age", "sex")  # what a clinic's patients have in common is not among what its model is given


def diabetes(seed: int = 0, ages: int = 5) -> Scenario:
    """Diabetes (bundled): a number to predict, the disease's progression in a year; 10 clinics by age and sex.

    scikit-learn's 442 patients (Efron, Hastie, Johnstone and Tibshirani 2004) with body mass index, blood pressure and
    six blood serum measurements, each scaled to deviation 1 over all; the target is in hundreds. Every clinic has the
    patients of one sex in one of `ages` bins of age of equal size: some 44, of which it keeps half to train on. Age and
    sex are not among what models are given. The federation, the sizes and the training settings were chosen here.

    >>> made = diabetes()
    >>> len(made.clients), made.task.kind, sum(client.samples for client in made.clients)
    (10, 'regression', 222)
    """
    from sklearn.datasets import load_diabetes

    if not 1 <= ages <= 10:
        raise ValueError(f"scenario 'diabetes' with ages={ages}: give 1 to 10 bins of age")
    bundled = load_diabetes(scaled=False)
    kept = [at for at, name in enumerate(bundled.feature_names) if name not in HIDDEN]
    x = bundled.data[:, kept]
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    y = (bundled.target / UNIT).astype(np.float32)
    age, sex = (bundled.data[:, bundled.feature_names.index(name)] for name in HIDDEN)
    made = []
    for number, which in enumerate(np.unique(sex)):
        of_sex = np.flatnonzero(sex == which)
        by_age = of_sex[np.argsort(age[of_sex], kind="stable")]
        for at, mine in enumerate(np.array_split(by_age, ages)):
            parts = random_split(np.zeros(len(mine)), (0.5, 0.15, 0.35), seed + number * ages + at)
            train, validation, test = ((x[mine[part]], y[mine[part]]) for part in parts)
            traits = {"sex": str(number + 1), "age": f"{age[mine].min():.0f}-{age[mine].max():.0f}"}
            model = partial(MLP, (len(kept),), (16,), 1)
            made.append(Client(f"sex-{number + 1}-age-{at + 1}", model, train, validation, test, traits))
    training = Training(rounds=30, epochs=2, batch=8, lr=0.02)
    return Scenario("diabetes", made, training, label_names=["progression"], task="regression")
