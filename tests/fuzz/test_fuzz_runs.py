"""A run directory that was damaged is refused by name, or the run goes on to the same bits; never to others."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_help import attempt, damaged, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import fedquilt as fq
from fedquilt.report.read_runs import read_run

QUICK: dict[str, Any] = {"engine": "sequential", "alone": False, "checkpoint_every": 2, "device": "cpu"}


def small() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def build() -> fq.Scenario:
    draw = torch.Generator().manual_seed(0)
    clients = []
    for i in range(3):
        x, y = torch.randn(18, 3, generator=draw), torch.arange(18) % 2
        clients.append(fq.Client(f"c{i}", small, (x[:8], y[:8]), (x[8:12], y[8:12]), (x[12:], y[12:])))
    return fq.Scenario("tiny", clients, fq.Training(rounds=4, epochs=1, batch=4, lr=0.1))


def contents(folder: Path) -> dict[str, Any]:
    """All that a finished run says, but for times and for how often it was kept."""
    names = ("metrics.jsonl", "plans.jsonl", "traffic.jsonl", "confusion.json")
    found: dict[str, Any] = {name: (folder / name).read_text() for name in names}
    summary = json.loads((folder / "summary.json").read_text())
    kept = ("accuracy_mean", "accuracy_worst_decile", "megabytes_up", "rounds", "refused_updates", "seed", "method")
    found["summary"] = {key: summary[key] for key in kept}
    for path in sorted((folder / "models").glob("*.safetensors")):
        found[path.name] = {name: value.numpy().tobytes() for name, value in load_file(path).items()}
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A finished run, the same one interrupted, and what the finished one says."""
    home = tmp_path_factory.mktemp("runs")

    def stop(federation: fq.Federation, report: object) -> None:
        if federation.round == 3:
            raise RuntimeError("gone")

    fq.run(build(), "fedavg", out=home / "whole", **QUICK)
    with pytest.raises(RuntimeError, match="gone"):
        fq.run(build(), "fedavg", out=home / "half", callbacks=[stop], **QUICK)
    return home / "whole", home / "half", contents(home / "whole")


def files_of(folder: Path) -> list[str]:
    there = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(str(path.relative_to(folder)) for path in there)


@fuzzed(40)
@given(data=st.data())
def test_an_interrupted_run_is_refused_or_goes_on_to_the_same_bits(
    data: st.DataObject, made: tuple[Path, Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, half, expected = made
    folder = Path(shutil.copytree(half, tmp_path_factory.mktemp("fuzz") / "run"))
    name = data.draw(st.sampled_from(files_of(half)))
    (folder / name).write_bytes(data.draw(damaged((folder / name).read_bytes())))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gone_on, refused = attempt(lambda: fq.resume(folder, build()))
    if gone_on is not None:
        assert contents(folder) == expected
    elif str(folder) in refused:  # by name, and then nothing was touched
        left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert {path: data for path, data in left.items() if path.name != ".lock"} == before
    else:
        assert name == "run.toml", f"the file is not named: {refused}"
    shutil.rmtree(folder.parent)


@fuzzed(40)
@given(data=st.data())
def test_a_finished_run_is_read_as_it_was_or_refused(
    data: st.DataObject, made: tuple[Path, Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole, _, _ = made
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("fuzz") / "run"))
    name = data.draw(st.sampled_from(files_of(whole)))
    (folder / name).write_bytes(data.draw(damaged((folder / name).read_bytes())))
    changed = (folder / name).read_bytes() != (whole / name).read_bytes()
    found, refused = attempt(lambda: read_run(folder))
    if found is None:
        assert str(folder) in refused
    else:
        there = read_run(whole)
        assert all((found.series[key].score == there.series[key].score).all() for key in there.series)
        assert found.summary == there.summary
        if name == "checksums.json":  # blanks in it say nothing
            changed = json.loads((folder / name).read_text()) != json.loads((whole / name).read_text())
        assert not changed or name.startswith(("checkpoint", "models")), f"a change of {name} was not noticed"
    model, refused = attempt(lambda: fq.load_model(folder, "c1"))
    if model is None:
        assert str(folder) in refused
    else:
        kept = fq.load_model(whole, "c1").state_dict()
        assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    shutil.rmtree(folder.parent)


@pytest.mark.parametrize(
    ("old", "new"),
    [("checkpoint_every = 2", "checkpoint_every = 0"), ("checkpoint_every = 2", "checkpoint_every = []"),
     ("checkpoint_every = 2", ""), ("alone = false", "alome = false"),
     ("alone = false", "alone = {}"), ("threads = ", "threads = -"), ("threads = ", 'threads = "a" # '),
     ("seed = 0", "seed = 1e9"), ('engine = "sequential"', "engine = 3"), ("rounds = 4", "rounds = nan"),
     ("[training]", "[training]\nx = " + "[" * 3000)],
)  # fmt: skip
def test_a_setting_of_nonsense_is_refused_before_any_round(
    old: str, new: str, made: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made[1], tmp_path / "run"))
    text = (folder / "run.toml").read_text()
    assert old in text
    (folder / "run.toml").write_text(text.replace(old, new))
    before = {path: path.read_bytes() for path in folder.rglob("*.jsonl")}
    gone_on, refused = attempt(lambda: fq.resume(folder, build()))
    assert gone_on is None
    assert refused
    assert {path: path.read_bytes() for path in folder.rglob("*.jsonl")} == before


def test_a_run_from_before_a_setting_was_there_goes_on(made: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made[1], tmp_path / "run"))
    text = (folder / "run.toml").read_text()
    assert "unseen = 0\n" in text
    (folder / "run.toml").write_text(text.replace("unseen = 0\n", ""))
    fq.resume(folder, build())
    assert contents(folder) == made[2]
