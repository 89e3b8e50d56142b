"""A run that failed: the terminal says why, and how to go on."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedquilt._util.addresses import load_file
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


def test_a_leader_that_takes_its_time_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2)
    folder, told = project.runs / "r", list[str]()
    folder.mkdir(parents=True)

    def say(sentence: str) -> None:
        told.append(sentence)
        (folder / "summary.json").write_text("{}")
        (folder / "status.json").write_text(json.dumps({"state": "finished"}))

    monkeypatch.setattr(runs, "_GLITCH", 0.0)
    assert runs.follow(project, {"run": "r", "folder": str(folder)}, 0, poll=0.01, say=say) == {}
    assert told == ["its leader is being started"]


def test_an_error_in_code_of_ones_own_is_said_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def learn():\n    raise RuntimeError('the boiler is cold')\n")
    with pytest.raises(RuntimeError) as raised:
        load_file(tmp_path / "mine.py").learn()
    assert in_words(raised.value) == "mine.py, line 2, in learn: RuntimeError: the boiler is cold"
