"""Scenarios from a user's own samples, whatever they come in."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedquilt as fq
from fedquilt.data.dirichlet import dirichlet
from fedquilt.data.own import read_samples
from fedquilt.scenarios import own

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(60, 3)).round(3)
NAMES = np.array(["no", "yes", "maybe"])[np.arange(60) % 3]
WHOSE = np.repeat(["north", "south"], 30)


def write_csv(path: Path, rows: range = range(60), client: bool = True) -> Path:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["age", "height", "weight", "answer", *(["town"] if client else [])])
        for i in rows:
            out.writerow([*X[i], NAMES[i], *([WHOSE[i]] if client else [])])
    return path


class Frame:
    """What a data frame of pandas has, as far as it is looked at."""

    def __init__(self, **columns: Any) -> None:
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def to_numpy(self) -> Any:
        return np.stack(list(self._columns.values()), axis=1)


def whole(scenario: fq.Scenario) -> dict[str, set[tuple[float, ...]]]:
    """All samples of each client."""
    return {
        c.name: {tuple(np.round(row, 3)) for s in (c.train, c.validation, c.test) for row in s.x.double().tolist()}
        for c in scenario.clients
    }


def check_towns(scenario: fq.Scenario) -> None:
    """Both towns have their own samples with their own labels, each once."""
    assert scenario.label_names == ("maybe", "no", "yes")
    known = {tuple(row): name for row, name in zip(X.tolist(), NAMES, strict=True)}
    wanted = {town: {tuple(row) for row in X[town == WHOSE].tolist()} for town in ("north", "south")}
    assert whole(scenario) == wanted
    for client in scenario.clients:
        splits = [client.train, client.validation, client.test]
        assert sum(map(len, splits)) == 30
        for split in splits:
            for row, label in zip(split.x.double().tolist(), split.y.tolist(), strict=True):
                assert known[tuple(np.round(row, 3))] == scenario.label_names[label]


def test_a_csv_with_a_column_of_clients(tmp_path: Path) -> None:
    check_towns(fq.scenario_from(write_csv(tmp_path / "a.csv"), label="answer", client="town"))


def test_a_folder_of_csv_files_is_a_client_a_file(tmp_path: Path) -> None:
    write_csv(tmp_path / "north.csv", range(30), client=False)
    write_csv(tmp_path / "south.csv", range(30, 60), client=False)
    check_towns(fq.scenario_from(tmp_path, label="answer"))


def test_a_folder_of_npz_files(tmp_path: Path) -> None:
    for town in ("north", "south"):
        np.savez(tmp_path / f"{town}.npz", x=X[town == WHOSE], y=NAMES[town == WHOSE])
    check_towns(fq.scenario_from(tmp_path))


def test_arrays_and_who_they_are_of() -> None:
    check_towns(fq.scenario_from((X, NAMES), client=WHOSE))


def test_a_data_frame() -> None:
    frame = Frame(age=X[:, 0], height=X[:, 1], weight=X[:, 2], answer=NAMES, town=WHOSE)
    check_towns(fq.scenario_from(frame, label="answer", client="town"))


def test_a_frame_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": X[:, 0], "height": X[:, 1], "weight": X[:, 2], "answer": NAMES, "town": WHOSE})
    check_towns(fq.scenario_from(frame, label="answer", client="town"))


def test_a_torch_dataset_is_dealt_out() -> None:
    labels = np.arange(60) % 3
    made = fq.scenario_from(TensorDataset(torch.tensor(X), torch.tensor(labels)), clients=4, partition="iid")
    assert [c.name for c in made.clients] == ["client-1", "client-2", "client-3", "client-4"]
    assert [sum(map(len, (c.train, c.validation, c.test))) for c in made.clients] == [15] * 4
    assert set().union(*whole(made).values()) == {tuple(row) for row in X.tolist()}
    assert made.label_names == ()


def test_a_partition_is_a_name_a_function_or_made_ready() -> None:
    labels = np.arange(60) % 3
    ready = dirichlet(labels, 5, alpha=0.2, seed=4)
    by_hand = whole(fq.scenario_from((X, labels), partition=ready))
    by_function = whole(fq.scenario_from((X, labels), partition=lambda y, n, seed: dirichlet(y, 5, 0.2, seed=4)))
    assert by_hand == by_function
    assert [len(rows) for rows in by_hand.values()] == [len(part) for part in ready]
    with pytest.raises(ValueError, match="did you mean 'dirichlet'"):
        fq.scenario_from((X, labels), partition="dirichlett")


def test_clients_with_numbers_for_names() -> None:
    made = fq.scenario_from((X, NAMES), client=np.arange(60) // 20)
    assert [c.name for c in made.clients] == ["0", "1", "2"]
    assert [c.name for c in fq.scenario_from((X, NAMES), client=torch.arange(60) // 20).clients] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("shape", "wanted"), [((60, 8, 8), (1, 8, 8)), ((60, 8, 8, 3), (3, 8, 8)), ((60, 3, 8, 8), (3, 8, 8))]
)
def test_images_of_bytes_become_numbers_up_to_one(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    x = DRAW.integers(0, 256, shape).astype(np.uint8)
    x[0].flat[0] = 255
    client = fq.scenario_from((x, np.zeros(60, int)), clients=1).clients[0]
    assert client.train.x.shape[1:] == wanted
    every = torch.cat([client.train.x, client.validation.x, client.test.x])
    assert every.dtype == torch.float32
    assert float(every.max()) == 1.0
    assert float(every.sum()) == pytest.approx(x.sum() / 255, rel=1e-4)


def test_samples_are_standardised_by_the_training_samples_of_their_client() -> None:
    x = X * [1.0, 100.0, 0.0] + [5.0, -3.0, 7.0]
    made = fq.scenario_from((x, NAMES), client=WHOSE, standardise=True)
    for client in made.clients:
        assert client.train.x.mean(0).tolist() == pytest.approx([0, 0, 0], abs=1e-5)
        assert client.train.x.std(0, correction=0).tolist() == pytest.approx([1, 1, 0], abs=1e-4)
        assert abs(float(client.test.x[:, 1].mean())) > 1e-4, "test samples by the same numbers, not by their own"


def test_a_model_of_none_of_nothing_or_of_shape_and_classes() -> None:
    def sized(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(shape[0], classes)

    for model in (None, sized, lambda: nn.Linear(3, 3)):
        made = fq.scenario_from((X, NAMES), model, client=WHOSE)
        assert made.clients[0].model()(torch.zeros(2, 3)).shape == (2, 3)
    with pytest.raises(TypeError, match="takes 1 arguments"):
        fq.scenario_from((X, NAMES), lambda shape: nn.Linear(3, 3))
    with pytest.raises(TypeError, match="must be a function"):
        fq.scenario_from((X, NAMES), nn.Linear(3, 3))


def test_it_runs() -> None:
    labels = np.array(["left", "right"])[(X[:, 0] > 0).astype(int)]
    made = fq.scenario_from((X, labels), client=WHOSE, training=fq.Training(rounds=15, batch=6, lr=0.3))
    run = fq.run(made, "fedavg", engine="sequential", alone=False)
    assert run.summary["accuracy_mean"] > 0.8
    assert run.trouble is None


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fq.scenario_from(([[1.0]], [0.5]), task="classification"), "say task='regression'"),
        (lambda: fq.scenario_from((X, NAMES[:5])), "do not go with labels"),
        (lambda: fq.scenario_from((X, NAMES), client=[1, 2]), "give one a sample"),
        (lambda: fq.scenario_from((X, NAMES), client=WHOSE, traits={"nord": {"a": "b"}}), "did you mean 'north'"),
        (lambda: fq.scenario_from(Frame(a=X[:, 0], label=NAMES, b=WHOSE)), "column 'b' is no numbers"),
        (lambda: fq.scenario_from(Frame(a=X[:, 0], lable=NAMES)), "did you mean 'lable'"),
        (lambda: fq.scenario_from(Frame(a=np.array([1, np.nan]), label=NAMES[:2])), "column 'a' has gaps"),
        (lambda: fq.scenario_from(Frame(label=NAMES)), "no columns beside label"),
        (lambda: fq.scenario_from("nowhere.csv"), "there is no file or folder"),
        (lambda: fq.scenario_from(SimpleNamespace()), "is no source of samples"),
    ],
)
def test_what_is_wrong_is_said(call: Any, told: str) -> None:
    with pytest.raises((ValueError, TypeError, OSError), match=told):
        call()


def test_a_csv_that_is_ragged_or_has_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,label\n1,x\n2\n")
    with pytest.raises(ValueError, match="line 3 has 1 entries"):
        fq.scenario_from(path)
    path.write_text("a,label\n1,x\n,y\n")
    with pytest.raises(ValueError, match="column 'a' has gaps"):
        fq.scenario_from(path)


def test_labels_keep_their_numbers_where_they_have_some(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,label\n1.5,2\n2.5,0\n")
    found = read_samples(path)
    assert found.y.tolist() == [2, 0]
    assert found.label_names == ()
    assert read_samples(([[1], [2]], [-1, 1])).label_names == ("-1", "1")


def test_pandas_is_not_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    check_towns(fq.scenario_from(write_csv(tmp_path / "a.csv"), label="answer", client="town"))


def test_numbers_to_predict_come_from_arrays_and_tables() -> None:
    y = X[:, 0] * 2 + 0.1
    made = fq.scenario_from((X, y), client=WHOSE, training=fq.Training(rounds=20, batch=6, lr=0.1))
    assert (made.task.kind, made.clients[0].train.y.shape[1]) == ("regression", 1)
    assert sum(len(s) for c in made.clients for s in (c.train, c.validation, c.test)) == len(X)
    run = fq.run(made, "fedavg", engine="sequential", alone=False)
    assert run.summary["r2_mean"] > 0.5
    assert fq.scenario_from(Frame(a=X[:, 0], label=y), clients=3).task.kind == "regression"
    whole = fq.scenario_from((X, np.arange(len(X)) % 7), clients=3, task="regression")
    assert whole.clients[0].train.y.is_floating_point()
    several = fq.scenario_from((X, np.stack([y > 0, y > 1], axis=1)), clients=3, task="multilabel")
    assert several.classes == 2


def test_a_hugging_face_data_set_is_a_table_with_named_labels() -> None:
    class Feature:
        names = ("no", "yes")

    class HuggingFace:  # as `datasets.Dataset` is seen here
        column_names = ("a", "b", "label")

        @property
        def features(self) -> dict[str, Feature | None]:
            return {"a": None, "b": None, "label": Feature()}

        def __getitem__(self, name: str) -> list[float]:
            columns = {"a": X[:, 0], "b": X[:, 1], "label": (X[:, 0] > 0).astype(int)}
            return list(columns[name])

    made = fq.scenario_from(HuggingFace(), clients=3)
    assert made.label_names == ("no", "yes")
    assert made.clients[0].train.x.shape[1] == 2


def test_several_columns_are_several_targets(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,left,right,who\n" + "".join(f"{i},{i % 3},{i / 2},{-i},{i % 2}\n" for i in range(40)))
    made = fq.scenario_from(path, label=["left", "right"], client="who", task="regression")
    for client in made.clients:
        for split in (client.train, client.validation, client.test):
            assert split.x.shape[1:] == (2,)
            assert torch.equal(split.y, torch.stack([split.x[:, 0] / 2, -split.x[:, 0]], dim=1))
    run = fq.run(made, "fedavg", rounds=1, engine="sequential", alone=False)
    assert run.predict("0", made.clients[0].test.x[:3]).shape == (3, 2)
    with pytest.raises(ValueError, match="did you mean 'left'"):
        fq.scenario_from(path, label=["lft", "right"], client="who", task="regression")
    with pytest.raises(ValueError, match="no label is named"):
        fq.scenario_from(path, label=[], client="who", task="regression")
    path.write_text("a,left,right\n1,2,up\n2,3,down\n")
    with pytest.raises(ValueError, match="'right' is none of numbers"):
        fq.scenario_from(path, label=("left", "right"), clients=1, task="regression")


def test_names_of_labels_may_be_an_array() -> None:
    client = fq.Client("7", lambda: nn.Linear(1, 2), ([[0.0], [1.0]], [0, 1]))
    assert fq.Scenario("s", [client], label_names=np.array(["no", "yes"])).label_names == ("no", "yes")
    with pytest.raises(TypeError, match="label_names is a list of texts"):
        fq.Scenario("s", [client], label_names="no")


def clinics(path: Path, n: int = 240) -> Path:
    """A table as people have them: a number for each patient, a column of texts, gaps."""
    draw = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["patient", "clinic", "sex", "age", "answer"])
        for row in range(n):
            age = "" if row % 7 == 0 else row % 50
            table.writerow([1000 + row, f"clinic {row % 3}", "fm"[row % 2], age, ("ill", "well")[draw.integers(2)]])
    return path


def test_columns_are_left_out_spread_and_filled(tmp_path: Path) -> None:
    path = clinics(tmp_path / "a.csv")
    with pytest.raises(
        ValueError, match=r"column 'sex' is no numbers; make a column of each .* by one_hot=sex, or leave"
    ):
        fq.scenario_from(path, label="answer", client="clinic")
    with pytest.raises(ValueError, match="column 'age' has gaps; fill them by gaps=mean"):
        fq.scenario_from(path, label="answer", client="clinic", one_hot="sex", leave_out=["patient"])
    made = fq.scenario_from(path, label="answer", client="clinic", one_hot="sex", leave_out="patient", gaps="mean")
    first = made.clients[0]
    assert first.train.x.shape[1:] == (3,)  # sex=f, sex=m, age
    assert torch.equal(first.train.x[:, 0] + first.train.x[:, 1], torch.ones(first.samples))
    lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
    ages = {float(age) for _, clinic, _, age, _ in lines if clinic == first.name and age}
    filled = {float(value) for split in (first.train, first.validation, first.test) for value in split.x[:, 2]} - ages
    assert len(filled) == 1  # all its gaps hold one number, the mean of its training samples that have one
    whole = first.train.x[:, 2][~torch.isin(first.train.x[:, 2], torch.tensor(list(filled)))]
    assert filled.pop() == pytest.approx(float(whole.double().mean()), rel=1e-6)


def test_a_column_that_numbers_the_rows_is_told_of(tmp_path: Path) -> None:
    path = clinics(tmp_path / "a.csv")
    with pytest.warns(UserWarning, match="column 'patient' has another whole number in every row"):
        fq.scenario_from(path, label="answer", client="clinic", one_hot="sex", leave_out="age")


def test_a_client_without_a_number_in_a_column_and_samples_without_a_label(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,who,label\n" + "1,x,0\n2,x,1\n" * 10 + ",y,0\n,y,1\n" * 10)
    with pytest.raises(ValueError, match="client 'y': none of its training samples has a number in column 'a'"):
        fq.scenario_from(path, client="who", gaps="mean")
    path.write_text("a,label\n1,yes\n2,\n3,no\n")
    with pytest.raises(ValueError, match="a row has no label in column 'label', the first in line 3"):
        fq.scenario_from(path)
    with pytest.raises(ValueError, match="gaps='median' is not known"):
        fq.scenario_from(path, gaps="median")  # type: ignore[arg-type]


def test_a_value_has_the_same_column_in_all_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("colour,size,label\n" + "red,1,0\nblue,2,1\n" * 10)
    (tmp_path / "b.csv").write_text("size,colour,label\n" + "1,blue,0\n2,white,1\n" * 10)
    made = fq.scenario_from(tmp_path, one_hot="colour")
    a, b = (client.train.x for client in made.clients)
    assert a.shape[1:] == b.shape[1:] == (4,)  # blue, red, white, size
    assert set(map(tuple, a.tolist())) == {(0, 1, 0, 1), (1, 0, 0, 2)}
    assert set(map(tuple, b.tolist())) == {(1, 0, 0, 1), (0, 0, 1, 2)}
    (tmp_path / "c.csv").write_text("colour,label\nred,0\n")
    with pytest.raises(ValueError, match="unlike columns, such as 'size'"):
        fq.scenario_from(tmp_path, one_hot="colour")


def test_a_card_says_how_a_row_becomes_a_sample(tmp_path: Path) -> None:
    """A model that left the house is of use only with the columns and scales of its client."""
    path, how = clinics(tmp_path / "a.csv"), {"one_hot": ("sex",), "leave_out": ("patient",), "gaps": "mean"}
    scenario = own.from_data(path, label=("answer",), client="clinic", standardise=True, **how)  # type: ignore[arg-type]
    fq.run(scenario, "fedavg", rounds=1, alone=False, engine="sequential", out=tmp_path / "run")
    place = fq.export(tmp_path / "run", tmp_path / "out", ["clinic 1"], ["safetensors"])[0]
    columns = json.loads((place / "card.json").read_text())["input"]["columns"]
    assert [column["name"] for column in columns] == ["sex=f", "sex=m", "age"]
    rows = [line.split(",") for line in path.read_text().splitlines()[1:] if ",clinic 1," in line]
    made = set()
    for _, _, sex, age, _ in rows:
        values = [float(sex == "f"), float(sex == "m"), float(age) if age else columns[2]["filled_with"]]
        made.add(tuple(round((v - c["mean"]) / c["deviation"], 4) for v, c in zip(values, columns, strict=True)))
    client = scenario.clients[1]
    held = torch.cat([client.train.x, client.validation.x, client.test.x]).tolist()
    assert {tuple(round(value, 4) for value in sample) for sample in held} == made
    told = (place / "card.md").read_text()
    assert "(value - mean) / deviation" in told
    assert "| number | column | filled with | mean | deviation |" in told
    assert (
        f"| 3 | `age` | {columns[2]['filled_with']:g} | {columns[2]['mean']:g} | {columns[2]['deviation']:g} |" in told
    )


def said_of(path: Path, text: str, **how: Any) -> str:
    """What is said of a table that cannot be read."""
    path.write_text(text)
    with pytest.raises(ValueError, match="t\\.csv") as caught:
        fq.scenario_from(path, **how)
    return str(caught.value)


def test_all_that_is_in_the_way_is_said_at_once(tmp_path: Path) -> None:
    rows = [
        f"P{i},2024-01-{i % 28 + 1:02d},{'fm'[i % 2]},{i if i % 5 else ''},{i % 7 or '<1'},{i % 2}" for i in range(60)
    ]
    text = "\n".join(["name,day,sex,age,crp,label", *rows])
    told = said_of(tmp_path / "t.csv", text, leave_out=["name"])
    assert "column 'crp' has numbers, but for entries such as '<1'" in told
    assert "Column 'sex' is no numbers; make a column of each of its values by one_hot=sex" in told
    assert "leave it out by leave_out=name,day, or make numbers of it first" in told
    assert "Column 'age' has gaps; fill them by gaps=mean" in told
    assert "one_hot=sex,name" not in said_of(tmp_path / "t.csv", text), "a column for each patient is no help"


def test_two_columns_of_one_heading_are_refused_and_one_without_has_a_name(tmp_path: Path) -> None:
    assert "has two columns 'a'" in said_of(tmp_path / "t.csv", "a,a,label\n1,2,0\n2,3,1\n")
    path = tmp_path / "index.csv"
    path.write_text(",a,label\n" + "".join(f"{i},{i % 5},{i % 2}\n" for i in range(30)))  # as pandas writes its index
    made = fq.scenario_from(path, leave_out="column-1", clients=2)
    assert made.clients[0].train.x.shape[1:] == (1,)


@pytest.mark.parametrize(("apart", "half"), [(";", "0,5"), ("\t", "0.5"), (";", "0.5")])
def test_a_table_may_have_semicolons_or_tabs_and_then_decimal_commas(tmp_path: Path, apart: str, half: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join(apart.join(row) for row in [("a", "label"), (half, "yes"), ("2", "no")] * 1))
    found = read_samples(path)
    assert found.x.tolist() == [[0.5], [2.0]]
    assert found.label_names == ("no", "yes")


def test_what_a_spreadsheet_may_have_done_to_a_table_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("a,label\n1,M\u00fcnster\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"t.csv' is not in UTF-8 \(there is a byte 0xfc\); save it so"):
        fq.scenario_from(path)
    assert "entries such as '0,5'; write a number such as 1234.5" in said_of(path, 'a,label\n"0,5",x\n"1,25",y\n')
    assert "'1,234.5'" in said_of(path, 'a,label\n"1,234.5",x\n"2,000.5",y\n')
    assert "column 'a' has inf in line 4" in said_of(path, "a,label\n1,x\n\ninf,y\n", gaps="mean")
    assert "2 rows have no client in column 'who', the first in line 3" in said_of(
        path, "a,who,label\n1,n,x\n2,,y\n3,,y\n", client="who"
    )


def test_names_that_look_alike_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,who,label\n" + "1,North,ill\n2,north,well\n" * 9)
    with pytest.warns(UserWarning, match="the clients 'North' and 'north' differ by capitals or spaces alone"):
        fq.scenario_from(path, client="who")
    with pytest.warns(UserWarning, match="the labels 'Ill' and 'ill'"):
        read_samples(([[1], [2]], ["ill", "Ill"]))


def test_a_dict_of_columns_is_a_table() -> None:
    columns = {"age": X[:, 0], "height": X[:, 1], "weight": X[:, 2], "answer": NAMES, "town": WHOSE}
    check_towns(fq.scenario_from(columns, label="answer", client="town"))
    with pytest.raises(ValueError, match="unlike lengths: a 2, label 1"):
        fq.scenario_from({"a": [1, 2], "label": [0]})
