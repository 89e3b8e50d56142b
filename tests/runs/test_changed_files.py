"""What was changed behind a run's back is noticed, and nothing is run that the user did not mean to run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_help
import torch
from run_help import build, contents
from torch import Tensor, nn

import fedquilt as fq
from fedquilt._util.checksums import Damaged, digest
from fedquilt._util.trust import Untrusted
from fedquilt.cli import main
from fedquilt.report.read_runs import read_run
from fedquilt.runs.settings import method_from, method_to
from fedquilt.scenarios.own import from_file

QUICK: dict[str, Any] = {"engine": "sequential", "alone": False, "checkpoint_every": 2}


def stop(federation: fq.Federation, report: fq.RoundReport) -> None:
    if report.round == 3:
        raise RuntimeError("gone")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    fq.run(build(), "fedper", rounds=4, out=folder, **{**QUICK, "alone": True})
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def damage(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def older(folder: Path) -> Path:
    """The run as it would be had it been written before there were checksums."""
    toml = (folder / "run.toml").read_text()
    start = toml.index("\n[model_code]")
    end = toml.index("\n[versions]")
    (folder / "run.toml").write_text(toml.replace(toml[start:end], "").replace("format = 2", "format = 1"))
    (folder / "checksums.json").unlink(missing_ok=True)
    state = json.loads((folder / "checkpoint" / "state.json").read_text())
    inside = json.loads(state["state"])
    del inside["checksums"]
    text = json.dumps(inside)
    (folder / "checkpoint" / "state.json").write_text(json.dumps({"check": digest(text.encode()), "state": text}))
    if (folder / "models" / "models.json").is_file():
        known = json.loads((folder / "models" / "models.json").read_text())
        del known["read_by"]
        for entry in known["clients"].values():
            del entry["sha256"], entry["code"]
        (folder / "models" / "models.json").write_text(json.dumps(known))
    return folder


# --- finished runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "traffic.jsonl", "plans.jsonl", "summary.json", "confusion.json", "run.toml", "checksums.json",
     "alone/metrics.jsonl"],
)  # fmt: skip
def test_a_report_notices_every_file_that_was_changed(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    before = read_run(run)
    assert len(before.series["received", "test"].rounds) == 4
    (run / name).write_bytes((run / name).read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(ValueError, match=f"'{run / name}'"):
        read_run(run)
    assert main(["report", str(run), "--format", "csv"]) == 2
    assert str(run / name) in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checksums.json"])
def test_a_report_notices_what_is_cut_short_or_gone(name: str, run: Path) -> None:
    lines = (run / name).read_text().splitlines(keepends=True)
    (run / name).write_text("".join(lines[: len(lines) // 2]))
    with pytest.raises(ValueError, match=name):
        read_run(run)
    (run / name).unlink()
    with pytest.raises(ValueError, match=f"{name}' is gone"):
        read_run(run)


def test_a_model_that_was_changed_is_not_loaded(run: Path) -> None:
    path = run / "models" / "00000.safetensors"
    damage(path, 0.9)
    with pytest.raises(Damaged, match=r"00000.safetensors was changed since it was written"):
        fq.load_model(run, "c0")
    fq.load_model(run, "c1")
    known = (run / "models" / "models.json").read_text()
    (run / "models" / "models.json").write_text(known.replace("00001.safetensors", "00002.safetensors"))
    with pytest.raises(Damaged, match=r"models.json' was changed or cut short"):
        fq.load_model(run, "c1")


def test_runs_without_checksums_are_read_as_before(run: Path) -> None:
    x = torch.randn(4, 6)
    expected = fq.load_model(run, "c0")(x)
    older(run)
    older(run / "alone")
    assert torch.equal(fq.load_model(run, "c0")(x), expected)
    assert len(read_run(run).series["received", "test"].rounds) == 4
    damage(run / "models" / "00000.safetensors", 0.0)
    with pytest.raises(Damaged, match=r"00000.safetensors cannot be read"):  # a header of nonsense is no traceback
        fq.load_model(run, "c0")


# --- runs that were interrupted --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halves") / "run"
    with pytest.raises(RuntimeError, match="gone"):
        fq.run(build(), "fedavg", rounds=4, out=folder, callbacks=[stop], **QUICK)
    return folder


@pytest.fixture
def half(half_made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half_made, tmp_path / "run"))


def test_an_older_run_is_gone_on_with(half: Path, tmp_path: Path) -> None:
    fq.resume(older(half), build())
    fq.run(build(), "fedavg", rounds=4, out=tmp_path / "whole", **QUICK)
    assert contents(half) == contents(tmp_path / "whole")


@pytest.mark.parametrize(("name", "old", "new"), [("plans", "circle", "cibcle"), ("traffic", '"up"', '"pu"')])
def test_nothing_is_cut_before_every_line_was_read(name: str, old: str, new: str, half: Path) -> None:
    older(half)
    (half / f"{name}.jsonl").write_text((half / f"{name}.jsonl").read_text().replace(old, new))
    before = {path: path.read_bytes() for path in half.rglob("*.jsonl")}
    with pytest.raises(Damaged, match=f"a line of 'plans.jsonl' or 'traffic.jsonl' in '{half}' does not say"):
        fq.resume(half, build())
    assert {path: path.read_bytes() for path in half.rglob("*.jsonl")} == before


def test_a_run_of_a_method_that_remembers_more_by_now_is_not_gone_on_with(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun by an earlier version of the library, and failed with the name of what is missing, nothing else."""
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(fq.methods.FedAvg, "begin", lambda self, roster: {"asked": torch.zeros(5)})
        with pytest.raises(Damaged, match=r"by another version of the method 'fedavg', which remembered no 'asked'"):
            fq.resume(half, build())
    assert {path: path.read_bytes() for path in half.rglob("*") if path.is_file()} == before
    fq.resume(half, build())


def test_a_model_whose_code_has_changed_is_not_gone_on_with(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: run_help.Net, x: Tensor) -> Tensor:
        y: Tensor = self.operation(self.configuration(x)).tanh()
        return y

    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(run_help.Net, "forward", forward)
        with pytest.raises(Damaged, match=r"the code of the model of client 'c0' is not that which .* begun with"):
            fq.resume(half, build())
    with monkeypatch.context() as patch:
        patch.setattr(nn, "ReLU", nn.Tanh)  # the same shapes, the same names
        with pytest.raises(Damaged, match=r"the code of the model of client 'c0'"):
            fq.resume(half, build())
    assert {path: path.read_bytes() for path in half.rglob("*") if path.is_file()} == before
    fq.resume(half, build())
    with monkeypatch.context() as patch:
        patch.setattr(run_help.Net, "forward", forward)
        with pytest.warns(UserWarning, match=r"the code of the model of client 'c1' was changed"):
            fq.load_model(half, "c1")


# --- code ------------------------------------------------------------------------------------------------------------

OWN = """
from pathlib import Path
import torch
from torch import nn
import fedquilt as fq

with Path(__file__).with_name("log").open("a") as log:
    log.write("ran ")

def net() -> nn.Module:
    return nn.Linear(2, 2)

def build(seed=0):
    x, y = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed)), torch.arange(8) % 2
    made = [fq.Client(n, net, (x, y), test=(x, y)) for n in "ab"]
    return fq.Scenario("own", made, fq.Training(rounds=4, batch=4))
"""


class Own:
    """A scenario in a file of the user's own, which notes that it was run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self.file, self.log, self.patch = folder / "own_clients.py", folder / "log", monkeypatch
        self.file.write_text(OWN)

    def scenario(self) -> fq.Scenario:
        return from_file(f"{self.file}:build", 0, {})

    def times_run(self) -> int:
        return len(self.log.read_text().split())

    def in_another_process(self) -> None:
        sys.modules.pop("own_clients", None)

    def on_another_machine(self, folder: Path) -> None:
        self.in_another_process()
        self.patch.setenv("FEDQUILT_STATE", str(folder))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FEDQUILT_STATE", str(tmp_path / "mine"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Own(tmp_path / "code", monkeypatch)
    sys.modules.pop("own_clients", None)


def refused(what: Any) -> None:
    with pytest.raises(Untrusted, match=r"names code of its own, '.*own_clients.py', .* none of it was run.*--trust"):
        what()


def test_code_that_a_directory_names_is_run_if_it_is_the_users(own: Own, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        fq.run(own.scenario(), "fedavg", out=tmp_path / "run", callbacks=[stop], **QUICK)
    foreign = Path(shutil.copytree(tmp_path / "run", tmp_path / "foreign"))
    own.in_another_process()
    fq.resume(tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=np.ones((9, 2), np.float32), y=np.arange(9) % 2)
    own.in_another_process()
    fq.onboard(tmp_path / "run", tmp_path / "new.npz", visits=1)
    own.in_another_process()
    fq.load_model(tmp_path / "run", "a")
    assert own.times_run() == 4

    own.on_another_machine(tmp_path / "theirs")
    for what in (
        lambda: fq.resume(foreign),
        lambda: fq.onboard(tmp_path / "run", tmp_path / "new.npz", visits=1),
        lambda: fq.load_model(tmp_path / "run", "a"),
    ):
        refused(what)
    assert main(["resume", str(foreign)]) == 2
    assert main(["onboard", str(tmp_path / "run"), str(tmp_path / "new.npz")]) == 2
    assert own.times_run() == 4
    fq.load_model(tmp_path / "run", "a", trust=True)
    own.in_another_process()
    assert main(["onboard", str(tmp_path / "run"), str(tmp_path / "new.npz"), "--visits", "1", "--trust"]) == 0
    own.in_another_process()
    assert main(["resume", str(foreign), "--trust", "--json"]) == 0
    assert own.times_run() == 7


def test_a_file_that_was_changed_is_another_file(own: Own, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        fq.run(own.scenario(), "fedavg", out=tmp_path / "run", callbacks=[stop], **QUICK)
    own.in_another_process()
    own.file.write_text(OWN + "\nprint('and something else')\n")
    refused(lambda: fq.resume(tmp_path / "run"))
    assert own.times_run() == 1


def test_modules_are_imported_only_if_they_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "theirs_all_along"
    package.mkdir()
    (package / "__init__.py").write_text("import fedquilt\nfedquilt.seen = True\n")
    (package / "method.py").write_text("from fedquilt.methods import FedAvg\nclass Mine(FedAvg):\n    name = 'mine'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDQUILT_STATE", str(tmp_path / "state"))
    text = {"name": "mine", "settings": {}, "class": "theirs_all_along.method:Mine"}
    with pytest.raises(Untrusted, match=r"theirs_all_along.__init__.py"):
        method_from(text)
    assert not hasattr(fq, "seen")
    assert method_to(method_from(text, trust=True)) == text
    del fq.seen
    for name in [name for name in sys.modules if name.startswith("theirs_all_along")]:
        del sys.modules[name]
    with pytest.raises(Damaged, match="is no method"):
        method_from({**text, "class": ":Mine"})
