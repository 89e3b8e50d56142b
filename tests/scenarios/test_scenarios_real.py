"""Every scenario whose data are present in FEDQUILT_DATA: the papers' counts, and a short run that learns."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.data import available
from fedquilt.data.label_table import label_table

PRESENT = {row.name for row in available() if row.present} if os.environ.get("FEDQUILT_DATA") else {"digits"}


def needs(*names: str) -> pytest.MarkDecorator:
    absent = sorted(set(names) - PRESENT)
    return pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)} in FEDQUILT_DATA")


def learned(scenario: fq.Scenario, method: str, **training: Any) -> tuple[float, float]:
    """Mean test accuracy after the first and the last round."""
    run = fq.run(scenario, method, training=training, engine="sequential", alone=False, readouts=("received",))
    rounds = (1, training["rounds"])
    first, last = (
        float(np.mean([row["accuracy"] for row in run.rows if row["round"] == r and row["split"] == "test"]))
        for r in rounds
    )
    return first, last


def guessing(scenario: fq.Scenario) -> float:
    """The accuracy of always naming a client's most common label: a stricter bar than chance."""
    counts = label_table(scenario, "test").counts
    return float((counts.max(1) / counts.sum(1)).mean())


SHORT: list[Any] = [
    pytest.param("digits", "modfl", {"clients": 8}, {"rounds": 4}, id="digits"),
    pytest.param("modfl-cameras", "modfl", {"clients": 4, "cohorts": 2, "labels": 3, "fraction": 0.08},
                 {"rounds": 3, "epochs": 4}, id="modfl-cameras", marks=needs("cifar10")),
    pytest.param("modfl-wearables", "modfl", {"clients": 10, "fraction": 0.6},
                 {"rounds": 3, "epochs": 6, "lr": 0.01, "batch": 32}, id="modfl-wearables", marks=needs("hapt")),
    pytest.param("feddl-har", "fedper", {"clients": 6}, {"rounds": 2, "epochs": 4, "lr": 0.05},
                 id="feddl-har", marks=needs("uci_har")),
    pytest.param("fedem-cifar10", "fedavg", {"clients": 5, "fraction": 0.02, "model": "small-cnn"},
                 {"rounds": 3, "epochs": 3, "batch": 16, "lr": 0.01}, id="fedem-cifar10", marks=needs("cifar10")),
    pytest.param("thesis-mnist", "fedavg", {"clients": 4, "fraction": 0.04}, {"rounds": 3, "epochs": 2},
                 id="thesis-mnist", marks=needs("mnist")),
    pytest.param("thesis-cifar10", "fedavg", {"clients": 3, "fraction": 0.06}, {"rounds": 3, "epochs": 3},
                 id="thesis-cifar10", marks=needs("cifar10")),
    pytest.param("animals-labels", "local", {"per_label": 60}, {"rounds": 2},
                 id="animals-labels", marks=needs("animals4")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method", "settings", "training"), SHORT)
def test_a_short_run_learns(name: str, method: str, settings: dict[str, Any], training: dict[str, Any]) -> None:
    scenario = fq.scenarios.build(name, **settings)
    first, last = learned(scenario, method, **training)
    assert last > first, (first, last)
    assert last > guessing(scenario) + 0.05, (guessing(scenario), first, last)


@needs("cifar10")
def test_modfl_cameras_has_the_papers_amounts() -> None:
    scenario = fq.scenarios.build("modfl-cameras", clients=18)
    counts = label_table(scenario).counts
    assert counts.shape == (18, 9)
    assert set(counts[counts > 0]) == {
        215
    }  # 1300 a label and generation over the 6 clients that have it, split by split
    assert (np.count_nonzero(counts, axis=1) == 6).all()
    assert (np.count_nonzero(counts, axis=0) == 12).all()


@needs("uci_har")
def test_feddl_har_is_thirty_people() -> None:
    scenario = fq.scenarios.build("feddl-har", clients=30, donors=0)
    assert [c.name for c in scenario.clients] == [f"person-{n}" for n in range(1, 31)]
    kept = label_table(scenario).counts.sum()
    assert 0.9 * 10299 < kept < 10299  # what overlaps across a cut is dropped
    assert all(c.train.x.shape[1:] == (6, 128) for c in scenario.clients)


@needs("mnist")
def test_thesis_mnist_deals_out_every_image() -> None:
    counts = label_table(fq.scenarios.build("thesis-mnist")).counts
    assert counts.sum() == 70000
    assert counts[0, 0] == 2466  # 5 of 14 fragments of 5923 training and 980 test images


@needs("cifar10")
def test_fedem_cifar10_deals_out_every_image() -> None:
    scenario = fq.scenarios.build("fedem-cifar10", model="small-cnn")
    counts = label_table(scenario).counts
    assert counts.shape == (80, 10)
    assert counts.sum() == 60000
    assert counts.sum(1).min() >= 20


@needs("cifar10")
def test_fedrep_cifar10_has_the_papers_amounts() -> None:
    scenario = fq.scenarios.build("fedrep-cifar10")
    assert {(c.samples + len(c.validation), len(c.test)) for c in scenario.clients} == {(500, 100)}
    assert (np.count_nonzero(label_table(scenario).counts, axis=1) == 2).all()
    assert sum(p.numel() for p in scenario.clients[0].model().parameters()) == 64_102


@needs("animals4")
def test_animals_keep_public_and_private_apart() -> None:
    scenario = fq.scenarios.build("animals-labels")
    assert scenario.common is not None
    assert scenario.public_test is not None
    assert len(scenario.common) == len(scenario.public_test) == 1000
    assert [c.at(7).samples for c in scenario.clients] == [200, 200, 200]


@needs("uci_har")
def test_what_walkers_do_next_is_forecast() -> None:
    scenario = fq.scenarios.build("har-forecast", clients=4, windows=60)
    assert scenario.clients[0].train.y.shape[1:] == (3, 12)
    run = fq.run(scenario, "fedavg", rounds=6, engine="vectorised", alone=False)
    assert run.trouble is None
    assert run.summary["rmse_mean"] < run.chance[0]
