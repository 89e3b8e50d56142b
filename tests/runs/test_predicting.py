"""New rows of a table, answered by the models of a run."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.scenarios.own import from_data

HOW = {"client": "clinic", "one_hot": ("sex", "ward"), "leave_out": ("id",), "gaps": "mean", "standardise": True}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patients of three clinics with gaps, a column of texts, and wards that have numbers."""
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("table") / "visits.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["id", "clinic", "sex", "ward", "age", "answer"])
        for row in range(180):
            age = draw.integers(20, 90)
            answer = "ill" if age + 20 * (row % 2) > 65 else "well"
            out.writerow([f"P{row}", f"clinic {row % 3}", "fm"[row % 2], row % 4, age if row % 7 else "", answer])
    return path


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> fq.Run:
    made = from_data(table, label=("answer",), **HOW)  # type: ignore[arg-type]
    out, training = tmp_path_factory.mktemp("kept") / "run", {"lr": 0.2, "batch": 8}
    return fq.run(made, "fedper", rounds=8, training=training, engine="sequential", alone=False, out=out)


def columns(table: Path) -> dict[str, Any]:
    with table.open() as file:
        rows = list(csv.DictReader(file))
    found: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
    return found | {"age": [float(age or "nan") for age in found["age"]], "ward": [int(w) for w in found["ward"]]}


def test_rows_are_answered_as_the_samples_that_they_are(run: fq.Run, table: Path) -> None:
    said = fq.predict_rows(str(run.folder), table)
    assert [each["client"] for each in said] == [f"clinic {row % 3}" for row in range(180)]
    for client in run.federation.scenario.clients:
        x = torch.cat([client.train.x, client.validation.x, client.test.x])
        wanted = Counter(run.federation.scenario.label_names[i] for i in run.predict(client.name, x).tolist())
        assert Counter(each["predicted"] for each in said if each["client"] == client.name) == wanted
        p = run.model(client.name)(x).softmax(1).amax(1).sort().values
        assert sorted(s["probability"] for s in said if s["client"] == client.name) == pytest.approx(
            p.tolist(), abs=1e-5
        )
    right = [each["predicted"] == answer for each, answer in zip(said, columns(table)["answer"], strict=True)]
    assert np.mean(right) > 0.75
    assert fq.predict_rows(str(run.folder), columns(table)) == said


def test_a_gap_does_not_make_another_ward_of_a_ward(run: fq.Run, table: Path) -> None:
    whole = columns(table)
    with_gap = {**whole, "ward": [float("nan"), *map(float, whole["ward"][1:])]}
    with pytest.warns(UserWarning, match="column 'ward' has 'nan', which was in no row"):
        said = fq.predict_rows(str(run.folder), with_gap)
    assert said[1:] == fq.predict_rows(str(run.folder), whole)[1:]


def test_one_client_may_answer_for_all(run: fq.Run, table: Path) -> None:
    strangers = {**columns(table), "clinic": ["elsewhere"] * 180}
    with pytest.raises(ValueError, match=r"there is no client in .* 'elsewhere'; .* name one whose model answers"):
        fq.predict_rows(str(run.folder), strangers)
    assert {each["client"] for each in fq.predict_rows(str(run.folder), strangers, "clinic 1")} == {"clinic 1"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sex": None}, "no column 'sex'"),
        ({"age": ["old"] * 180}, "column 'age' is no numbers in these rows, such as 'old'"),
        ({"clinic": None}, "no column 'clinic'.*which names clients"),
        ({"age": [1.0]}, "columns have unlike lengths"),
    ],
)
def test_what_is_wrong_is_said(run: fq.Run, table: Path, change: dict[str, Any], told: str) -> None:
    rows = {key: value for key, value in (columns(table) | change).items() if value is not None}
    with pytest.raises(ValueError, match=told):
        fq.predict_rows(str(run.folder), rows)


def test_numbers_are_predicted_too_and_a_run_of_no_table_is_refused(table: Path, tmp_path: Path) -> None:
    rows = columns(table) | {"age": np.arange(180.0), "answer": np.arange(180) / 4}
    how: dict[str, Any] = {"leave_out": ["id", "sex"], "client": "clinic", "label": "answer"}
    run = fq.run(fq.scenario_from(rows, **how), "fedavg", rounds=1, alone=False, out=tmp_path / "numbers")
    with pytest.raises(ValueError, match=r"say it by column=... \(--client-column\)"):
        fq.predict_rows(tmp_path / "numbers", rows)
    said = fq.predict_rows(tmp_path / "numbers", rows, column="clinic")
    x = torch.tensor([[4 % 4, 4.0]])
    assert said[4] == {"client": "clinic 1", "predicted": pytest.approx(float(run.predict("clinic 1", x)), rel=1e-5)}
    plain = fq.scenario_from((np.zeros((20, 2)), np.arange(20) % 2), clients=2)
    fq.run(plain, "fedavg", rounds=1, alone=False, out=tmp_path / "arrays")
    with pytest.raises(ValueError, match="was not run on a table"):
        fq.predict_rows(tmp_path / "arrays", rows, "client-1")


def test_on_the_command_line(run: fq.Run, table: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.csv"
    new.write_text("\n".join(table.read_text().replace(",answer", ",seen").splitlines()[:4]) + "\n")
    assert main(["predict", str(run.folder), str(new)]) == 0
    lines = list(csv.DictReader((tmp_path / "new-predicted.csv").read_text().splitlines()))
    assert [line["predicted"] for line in lines] == [s["predicted"] for s in fq.predict_rows(str(run.folder), new)]
    assert lines[0]["id"] == "P0"
    assert 0.5 <= float(lines[0]["probability"]) <= 1
    assert "3 rows answered by the models of 3 clients" in " ".join(capfd.readouterr().out.split())
