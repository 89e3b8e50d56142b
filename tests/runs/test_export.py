"""Personal models leave the house: what others load computes what the client's model does, and cards tell the truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from run_help import build
from safetensors.torch import load_file

import fedquilt as fq
from fedquilt.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fq.Run:
    return fq.run(build(), "modfl", 3, engine="sequential", out=tmp_path_factory.mktemp("run") / "kept")


def test_what_is_exported_computes_what_the_model_does(run: fq.Run, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    assert run.folder is not None
    made = fq.export(run.folder, tmp_path, ["c3"], ["safetensors", "pt2", "onnx"])
    assert made == [tmp_path / "c3"]
    x = torch.randn(5, 6)
    model = run.model("c3").eval()
    wanted = model(x).detach()
    program = torch.export.load(tmp_path / "c3" / "model.pt2").module()
    torch.testing.assert_close(program(x), wanted)
    session = onnxruntime.InferenceSession(tmp_path / "c3" / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-5)
    weights = load_file(tmp_path / "c3" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_card_says_what_was_measured_and_with_whom_it_shared(run: fq.Run, tmp_path: Path) -> None:
    assert run.folder is not None
    places = fq.export(run.folder, tmp_path, formats=["safetensors"])
    assert [place.name for place in places] == ["c0", "c1", "c2", "c3", "c4"]
    card = json.loads((tmp_path / "c1" / "card.json").read_text())
    last = next(row for row in run.last_rows("received") if row["client"] == "c1")
    assert card["accuracy"]["received"]["test"] == {"accuracy": last["accuracy"], "samples": 7, "round": 3}
    assert card["trained_on"]["samples"] == 17
    assert card["trained_on"]["traits"] == {"device": "d1", "cohort": "k0"}
    assert card["shared_with"]["configuration"] == ["c3"]  # the other client of the device
    assert card["shared_with"]["operation"] == ["c0", "c4"]  # those of the cohort
    assert run.alone is not None
    alone = next(row for row in run.alone.last_rows("received") if row["client"] == "c1")
    assert card["accuracy_alone"]["test"]["accuracy"] == alone["accuracy"]
    text = (tmp_path / "c1" / "card.md").read_text()
    assert "# Model of c1" in text
    assert "| `configuration` | c3 |" in text
    assert f"| received | test | {100 * last['accuracy']:.1f} | 7 | 3 |" in text


def test_what_never_left_is_said_and_so_is_a_model_that_is_not_all(tmp_path: Path) -> None:
    fq.run(build(), "fedper", 1, engine="sequential", alone=False, out=tmp_path / "home")
    fq.export(tmp_path / "home", tmp_path / "a", ["c0"], ["safetensors"])
    assert "| `operation` | nobody: it never left the client |" in (tmp_path / "a" / "c0" / "card.md").read_text()
    fq.run(build(), "apfl", 1, settings={"mix": "logits"}, engine="sequential", alone=False, out=tmp_path / "two")
    fq.export(tmp_path / "two", tmp_path / "b", ["c0"], ["safetensors"])
    assert "predicts with more than the model here" in (tmp_path / "b" / "c0" / "card.md").read_text()


def test_on_the_command_line(run: fq.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run.folder)
    assert (
        main(["export", folder, "--out", str(tmp_path), "--client", "c2", "--formats", "safetensors", "--trust"]) == 0
    )
    assert "1 model in" in capsys.readouterr().out
    for words, told in (
        (["--client", "c9"], "there is no client in"),
        (["--formats", "tflite"], "there is no format of models 'tflite'"),
    ):
        assert main(["export", folder, *words]) == 2
        assert told in capsys.readouterr().err


def test_a_model_of_numbers_has_a_card_too(tmp_path: Path) -> None:
    scenario = fq.scenarios.build("diabetes")
    made = fq.run(scenario, "fedavg", rounds=1, engine="sequential", out=tmp_path / "run")
    (place,) = fq.export(tmp_path / "run", tmp_path / "out", [scenario.clients[0].name], ["safetensors"])
    card = json.loads((place / "card.json").read_text())
    row = made.last_rows("received")[0]
    assert card["rmse"]["received"]["test"]["rmse"] == row["rmse"]
    assert "| split | rmse |" in (place / "card.md").read_text()
