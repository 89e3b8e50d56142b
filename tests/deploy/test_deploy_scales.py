"""Samples of a device have the scale of its federation: what columns of a table were brought to is kept with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

import fedquilt as fq
from fedquilt.deploy.columns import COLUMNS
from fedquilt.deploy.device.check_folder import check
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.membership import add
from fedquilt.deploy.project import Project

AGES = 50 + 10 * np.random.default_rng(0).normal(size=(60, 2)).round(1)


def federation(tmp_path: Path, standardise: bool) -> Project:
    table = tmp_path / "visits.csv"
    rows = [f"{a},{b},h{i % 2},{i % 3 % 2}" for i, (a, b) in enumerate(AGES.tolist())]
    table.write_text("\n".join(["age,pulse,clinic,label", *rows]))
    scenario = fq.scenario_from(table, client="clinic", standardise=standardise)
    return create_from_scenario(tmp_path / "fed", scenario)


def file_of(x: np.ndarray, tmp_path: Path) -> Path:
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=x.astype(np.float32), y_train=np.arange(len(x)) % 2)
    return path


@pytest.mark.parametrize("late", [False, True])
def test_who_brings_another_scale_is_told_and_who_brings_the_same_is_not(late: bool, tmp_path: Path) -> None:
    project = federation(tmp_path, standardise=True)
    if late:
        project = add(project, "h2")
    home = project.client_folder("h2" if late else "h0")
    said = check(home, file_of(AGES, tmp_path))
    assert said is not None
    assert "column 'age'" in said
    assert "deviation 1" in said
    assert check(home, file_of((AGES - AGES.mean(0)) / AGES.std(0), tmp_path)) is None
    assert "in the column 'pulse'" in (check(home, file_of((AGES - 50) / [10, 1000], tmp_path)) or "")
    (home / COLUMNS).unlink()  # the owner knows better
    assert check(home, file_of(AGES, tmp_path)) is None


def test_where_nothing_was_scaled_any_scale_is_right_but_columns_are_counted(tmp_path: Path) -> None:
    home = federation(tmp_path, standardise=False).client_folder("h0")
    assert check(home, home / "data.npz") is None
    assert check(home, file_of(1000 * AGES, tmp_path)) is None


def test_numbers_of_a_client_s_own_data_stay_with_it(tmp_path: Path) -> None:
    project = federation(tmp_path, standardise=True)
    mine = project.client_folder("h0") / COLUMNS
    assert '"mean": 5' in mine.read_text()
    assert mine.stat().st_mode & 0o077 == 0
    for other in (project.server_folder, add(project, "h2").client_folder("h2")):
        assert '"mean": null' in (other / COLUMNS).read_text()
