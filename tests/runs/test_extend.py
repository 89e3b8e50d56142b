"""A finished run that is made longer ends with the same bits as one that was so long from the start."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_help import SETTINGS, SUITED, build, contents, dies, kill_me

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.methods import METHODS
from fedquilt.runs.folder import RunFolder

READOUTS = ("received", "adapted", "best-of-last-2")
SOME = [name for name in SUITED if METHODS[name].depends_on_rounds or name in (
    "fedavg", "scaffold", "fedbabu", "fedamp", "modfl", "feddl")]  # fmt: skip


def run(method: str, folder: Path, rounds: int, **more: Any) -> fq.Run:
    options: dict[str, Any] = {"alone": False, "readouts": READOUTS, "engine": "sequential", **more}
    return fq.run(build(), method, rounds, out=folder, settings=SETTINGS.get(method), **options)


@pytest.mark.parametrize("method", SOME)
def test_same_bits_or_a_warning(method: str, tmp_path: Path) -> None:
    run(method, tmp_path / "short", 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        longer = fq.extend(tmp_path / "short", 4, build())
    assert longer.federation.round == 4
    whole = run(method, tmp_path / "whole", 4)
    once = {readout.name for readout in longer.federation.readouts if readout.needs_last_round}
    assert once == ({"fine-tuned"} if method == "fedbabu" else set())
    if METHODS[method].depends_on_rounds:
        assert len(told) == 1
        assert f"the method '{method}' depends" in str(told[0].message)
        return
    assert not told
    found, wanted = contents(tmp_path / "short"), contents(tmp_path / "whole")
    lines = found.pop("metrics.jsonl").splitlines()  # what was measured at the end before is kept
    more = [line for line in lines if line not in wanted["metrics.jsonl"].splitlines()]
    assert {(json.loads(line)["round"], json.loads(line)["readout"]) for line in more} == {(2, name) for name in once}
    assert [line for line in lines if line not in more] == wanted.pop("metrics.jsonl").splitlines()
    assert found == wanted
    assert longer.summary["accuracy_mean"] == whole.summary["accuracy_mean"]
    settings = RunFolder(tmp_path / "short").read_settings()
    assert (settings["training"]["rounds"], settings["extended"]) == (4, [2])


def test_no_other_method_reads_how_many_rounds_there_are() -> None:
    """Names that functions of a method look up; those of fedfomo are asked for by newcomers alone."""
    readers = {
        name
        for name, kind in METHODS.items()
        for function in vars(kind).values()
        if "rounds" in getattr(getattr(function, "__code__", None), "co_names", ())
    }
    assert readers - {"fedfomo"} == {name for name, kind in METHODS.items() if kind.depends_on_rounds}


def test_clients_alone_go_on_too(tmp_path: Path) -> None:
    run("fedper", tmp_path / "short", 2, alone=True)
    longer, whole = fq.extend(tmp_path / "short", 3, build()), run("fedper", tmp_path / "whole", 3, alone=True)
    assert longer.summary["gain_over_alone"] == whole.summary["gain_over_alone"]
    assert RunFolder(tmp_path / "short" / "alone").read_settings()["training"]["rounds"] == 3


def test_extended_twice_and_killed_at_any_moment(tmp_path: Path) -> None:
    run("fedavg", tmp_path / "whole", 5)
    run("fedavg", tmp_path / "start", 2)
    fq.extend(tmp_path / "start", 3, build())
    for moment in range(12):
        folder = shutil.copytree(tmp_path / "start", tmp_path / f"killed-{moment}")
        if dies(partial(extended_and_killed, folder, moment)) == 0:
            break
        if RunFolder(folder).finished:  # killed before the first byte was changed, or after the last
            if RunFolder(folder).read_settings()["training"]["rounds"] == 3:
                fq.extend(folder, 5, build())
        elif fq.resume(folder, build()).federation.round == 3:  # it was as long as before, and no longer finished
            fq.extend(folder, 5, build())
        assert contents(folder) == contents(tmp_path / "whole"), moment
    assert moment > 4


def extended_and_killed(folder: Path, moment: int) -> None:
    left = iter(range(moment))
    for owner, name in ((Path, "unlink"), (Path, "replace"), (os, "fsync")):
        setattr(owner, name, after(left, getattr(owner, name)))
    fq.extend(folder, 5, build())


def after(left: Iterator[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kills the process in the place of what it does, when nothing is left."""

    def counting(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            kill_me()
        return function(*args, **kwargs)

    return counting


def test_refused_before_work(tmp_path: Path) -> None:
    run("fedavg", tmp_path / "run", 2)
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match="has 2 rounds already; say how many in all"):
        fq.extend(tmp_path / "run", 2, build())
    with pytest.raises(ValueError, match="data of scenario 'tiny' are not those"):
        fq.extend(tmp_path / "run", 3, build(seed=1))
    (tmp_path / "comparison.json").write_text('{"runs": ["run"]}')
    with pytest.raises(ValueError, match="a run of a comparison"):
        fq.extend(tmp_path / "run", 3, build())
    assert contents(tmp_path / "run") == before
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ValueError, match="is not finished; go on with it first"):
        fq.extend(tmp_path / "run", 3, build())


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "first")
    words = [
        "run",
        "digits",
        "fedper",
        "--rounds",
        "1",
        "--set",
        "clients=4",
        "--engine",
        "sequential",
        "--out",
        folder,
    ]
    assert main(words) == 0
    assert main(["extend", folder, "--rounds", "2"]) == 0
    assert "after round 2" in capsys.readouterr().out
    assert main(["extend", folder, "--rounds", "2"]) == 2
    assert "has 2 rounds already" in capsys.readouterr().err
