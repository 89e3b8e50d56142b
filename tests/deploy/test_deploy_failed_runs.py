"""A run that failed: the terminal says why, and how to go on."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedquilt._util.addresses import load_file
from fedquilt.cli import deploy_runs
from fedquilt.deploy.ops import runs
from fedquilt.deploy.ops.create import create
from fedquilt.deploy.ops.processes import Failed
from fedquilt.deploy.server.app import in_words


def test_a_failed_run_says_why_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice once, also where the reason has it, and where the disk was too full for a reason."""
    project = create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2)
    folder = project.runs / "r"
    (folder / "checkpoint").mkdir(parents=True)
    spec, again = {"run": "r", "folder": str(folder)}, f"fedquilt deploy run --resume r --dir {project.folder}"
    for error in ("the boiler is cold", f"the disk is full; free some space and go on with: {again}"):
        (folder / "status.json").write_text(json.dumps({"state": "failed", "error": error}))
        with pytest.raises(Failed, match=f"the run r failed: {re.escape(error)}") as failed:
            runs.follow(project, spec, 0)
        assert str(failed.value).count(again) == 1

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runs, "start_run", full)
    with pytest.raises(
        Failed, match=r"the disk is full, so free some space; go on with `fedquilt deploy run --resume r"
    ):
        runs._go_on_with(project, spec)


def test_a_run_that_learnt_nothing_says_so_in_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2)
    told = {"trouble": "Nothing was learnt: try lr=0.1.", "alarms": ["'a' fell"]}
    summary = {"readout": "received", "split": "test", "accuracy_mean": 0.25, **told}
    monkeypatch.setattr(runs, "see_through", lambda *_, **__: summary)
    deploy_runs.watch(project, {"folder": tmp_path / "r", "run": "r"}, 0, stop=True)
    said = capsys.readouterr().out
    assert "Nothing was learnt: try lr=0.1." in said
    assert "Look at: 'a' fell." in said


def test_an_error_in_code_of_ones_own_is_said_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def learn():\n    raise RuntimeError('the boiler is cold')\n")
    with pytest.raises(RuntimeError) as raised:
        load_file(tmp_path / "mine.py").learn()
    assert in_words(raised.value) == "mine.py, line 2, in learn: RuntimeError: the boiler is cold"
