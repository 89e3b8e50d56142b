"""Methods of the user's own: from a file, a script, a session or a package; by their address, and from disk again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import fedquilt as fq
from fedquilt._util.trust import Untrusted
from fedquilt.cli import main
from fedquilt.methods import METHODS, FedAvg
from fedquilt.methods.find import HERE_AS, OF_THE_FIELD, address_of, class_at, find, source_of
from fedquilt.readouts import READOUTS
from fedquilt.runs.folder import RunFolder
from fedquilt.runs.rebuilding import make_method
from fedquilt.runs.settings import method_from, method_to

MINE = """
from dataclasses import dataclass
from typing import ClassVar

from own_constants import SLOW

from fedquilt.methods import FedAvg


@dataclass(frozen=True)
class Halfway(FedAvg):
    \"\"\"FedAvg whose server goes only a part of the way.\"\"\"

    name: ClassVar[str] = "halfway"
    part: float = 0.5

    def update(self, unit, held, merged, heard, memory):
        return held + self.part * SLOW * (merged - held), memory
"""
SCRIPT = (
    MINE
    + """
import sys
import fedquilt as fq

def stop(federation, report):
    if report.round == 2:
        raise RuntimeError("gone")

def go(out):
    fq.run(
        fq.scenarios.build("digits", clients=4), Halfway(part=0.75), rounds=3, engine="sequential", alone=False,
        out=out, checkpoint_every=1, callbacks=[stop],
    )
"""
)
QUICK = ("--set", "clients=4", "epochs=1", "--rounds", "2", "--engine", "sequential", "--no-alone")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a method in it, which is also where commands are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("FEDQUILT_STATE", str(tmp_path / "state"))
    (tmp_path / "own_constants.py").write_text("SLOW = 1.0\n")
    (tmp_path / "own_halfway.py").write_text(MINE)
    yield tmp_path
    forget()


def forget() -> None:
    """As in a process that has not loaded any of it."""
    for name in [name for name in sys.modules if "own_halfway" in name or name == "own_constants"]:
        del sys.modules[name]


def stop(federation: Any, report: Any) -> None:
    if report.round == 1:
        raise RuntimeError("gone")


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False)


# --- by its address -------------------------------------------------------------------------------------------------


def test_it_is_run_by_its_address_and_its_settings_reach_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("run", "digits", "own_halfway.py:Halfway", *QUICK, "--set", "part=0.75", "-o", "kept", "--json")
    assert main(words) == 0
    said = json.loads(capfd.readouterr().out)
    scenario = fq.scenarios.build("digits", clients=4)
    method = make_method("own_halfway.py", {"part": 0.75})  # its only method
    same = fq.run(scenario, method, rounds=2, training={"epochs": 1}, engine="sequential", alone=False)
    assert said["summary"]["method"] == "halfway"
    assert said["summary"]["accuracy_mean"] == same.summary["accuracy_mean"]
    forget()
    assert repr(method_from(RunFolder("kept").read_settings()["method"])) == "Halfway(part=0.75)"


def test_a_run_of_it_goes_on_in_another_process_but_not_on_another_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = make_method("own_halfway.py:Halfway", {"part": 0.75})
    scenario = fq.scenarios.build("digits", clients=4)
    with pytest.raises(RuntimeError, match="gone"):
        fq.run(
            scenario, method, rounds=2, engine="sequential", alone=False, out="kept", checkpoint_every=1,
            callbacks=[stop],
        )  # fmt: skip
    shutil.copytree("kept", "foreign")
    np.savez("new.npz", x=scenario.clients[0].train.x[:20].numpy(), y=scenario.clients[0].train.y[:20].numpy())
    name = scenario.clients[0].name

    def onboard(place: str, **more: Any) -> None:
        fq.onboard(place, "new.npz", traits={"device": "gen1", "cohort": "north"}, visits=1, **more)

    forget()
    assert fq.resume("kept").federation.round == 2
    for use in (lambda: fq.load_model("kept", name), lambda: onboard("kept")):
        forget()
        use()
    monkeypatch.setenv("FEDQUILT_STATE", str(folder / "theirs"))
    for refused in (lambda: fq.resume("foreign"), lambda: fq.load_model("kept", name), lambda: onboard("kept")):
        forget()
        with pytest.raises(Untrusted, match=r"own_halfway.py.*--trust"):
            refused()
        assert "own_halfway" not in sys.modules
    fq.load_model("kept", name, trust=True)
    forget()
    assert fq.resume("foreign", trust=True).federation.round == 2


def test_it_is_compared_and_another_code_is_another_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("compare", "digits", "local", "./own_halfway.py:Halfway", *QUICK[:-1], "--out", "both", "--json")
    assert main(words) == 0
    assert {line["method"] for line in json.loads(capfd.readouterr().out)["methods"]} == {"local", "halfway"}
    first = {path.name for path in Path("both").iterdir()}
    forget()
    Path("own_halfway.py").write_text(MINE.replace("FedAvg whose server", "Its server"))  # a docstring does not count
    assert main(words) == 0
    assert {path.name for path in Path("both").iterdir()} == first
    forget()
    Path("own_halfway.py").write_text(MINE.replace("self.part * SLOW", "self.part"))
    assert main(words) == 0
    (new,) = {path.name for path in Path("both").iterdir()} - first
    assert new.startswith("halfway-")


def test_it_goes_on_only_by_the_code_that_it_began_with(folder: Path) -> None:
    scenario = fq.scenarios.build("digits", clients=4)
    with pytest.raises(RuntimeError, match="gone"):
        fq.run(
            scenario, "own_halfway.py:Halfway", rounds=2, engine="sequential", alone=False, out="kept",
            checkpoint_every=1, callbacks=[stop],
        )  # fmt: skip
    forget()
    Path("own_constants.py").write_text("SLOW = 0.25\n")
    with pytest.raises(ValueError, match="the code of the method is not that"):
        fq.resume("kept")


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("nowhere.py:Mine", "there is no file nowhere.py"),
        ("own_halfway.py:Halfwy", "there is no method 'Halfwy'; did you mean 'Halfway'?"),
        ("own_constants.py:SLOW", "no subclass of fedquilt.Method"),
        ("own_constants.py", "holds 0 methods"),
        ("nobody.knows.it:Mine", "the module 'nobody' cannot be imported"),
        ("needs.py:Mine", "No module named 'nobody_has_this'"),
        ("nameless.py:Mine", "needs a name of its own, of letters, digits, '-' and '_' ('fedavg' is the library's)"),
        ("plain.py:Mine", "has the setting 'far' but is no dataclass"),
        ("asks.py:Mine", "needs its setting 'far'"),
        (":Mine", "write path/to/file.py:Class"),
    ],
)
def test_what_does_not_do_is_one_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str], address: str, sentence: str
) -> None:
    head = "from dataclasses import dataclass\nfrom fedquilt.methods import FedAvg\n"
    frozen = "@dataclass(frozen=True)\n"
    Path("needs.py").write_text("import nobody_has_this\n")
    Path("nameless.py").write_text(head + "class Mine(FedAvg):\n    pass\n")
    Path("plain.py").write_text(head + "class Mine(FedAvg):\n    name = 'mine'\n    far: float = 1.0\n")
    Path("asks.py").write_text(head + frozen + "class Mine(FedAvg):\n    name = 'mine'\n    far: float\n")
    assert main(["run", "digits", address]) == 2
    told = capfd.readouterr()
    assert sentence in told.err
    assert (told.out, len(told.err.strip().splitlines())) == ("", 1)
    assert not Path("runs").exists()
    for name in ("needs", "nameless", "plain", "asks"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("write", [str, str.upper, lambda name: name.replace("-", "_")])
def test_methods_of_the_field_that_are_not_here_are_known(write: Callable[[str], str]) -> None:
    for name in [write(name) for name in OF_THE_FIELD if name not in METHODS]:
        with pytest.raises(ValueError, match=f"the method '{name}' is known but not here; `fedquilt list methods` has"):
            find(name)


@pytest.mark.parametrize("name", HERE_AS)
def test_what_has_another_name_here_is_told_by_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is here as") as told:
        find(name)
    assert set(re.findall("'([a-z-]+)'", str(told.value))) <= {name, *METHODS, *READOUTS}


# --- in Python ------------------------------------------------------------------------------------------------------


def test_a_class_inside_a_function_is_refused_before_work(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Inner(FedAvg):
        name: ClassVar[str] = "inner"

    scenario = fq.scenarios.build("digits", clients=4)
    with pytest.raises(ValueError, match=r"Inner cannot be found again .* made inside of a function; put the class"):
        fq.run(scenario, Inner(), rounds=1, engine="sequential", alone=False, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    fq.run(scenario, Inner(), rounds=1, engine="sequential", alone=False)


def test_a_run_of_a_script_goes_on_where_the_script_is_left_alone(folder: Path) -> None:
    (folder / "own_script.py").write_text(SCRIPT + "\nif __name__ == '__main__':\n    go(sys.argv[1])\n")
    (folder / "own_hasty.py").write_text(SCRIPT + "\ngo('hasty')\n")
    assert "gone" in python("own_script.py", "kept", cwd=folder).stderr
    assert "gone" in python("own_hasty.py", cwd=folder).stderr
    assert RunFolder(folder / "kept").read_settings()["method"]["class"] == f"{folder / 'own_script.py'}:Halfway"
    gone_on = python("-m", "fedquilt", "resume", str(folder / "kept"), "--json", cwd=Path("/"))
    assert gone_on.returncode == 0, gone_on.stderr
    again = python("-m", "fedquilt", "resume", str(folder / "hasty"), cwd=Path("/"))
    assert again.returncode == 2
    assert "own_hasty.py starts a run while it is loaded for what it defines" in again.stderr


def test_a_method_of_a_session_is_found_where_it_is_defined(folder: Path) -> None:
    lines = SCRIPT + "\ntry:\n    go('kept')\nexcept RuntimeError:\n    print(fq.resume('kept').federation.method)\n"
    said = python("-c", lines, cwd=folder)
    assert said.stdout == "Halfway(part=0.75)\n", said.stderr
    shown = python("-m", "fedquilt", "resume", "kept", cwd=folder)
    assert "is finished" in shown.stderr
    loaded = python("-c", "import fedquilt as fq; fq.load_model('kept', 'gen1-north-1')", cwd=folder)
    assert "was written in a notebook or a session, and is not there in this one" in loaded.stderr


def test_a_digest_is_of_the_source_and_not_of_its_place(folder: Path) -> None:
    def digest(place: str, text: str) -> str:
        Path(place).mkdir()
        (Path(place) / "own_constants.py").write_text("SLOW = 1.0\n")
        (Path(place) / "own_halfway.py").write_text(text)
        return source_of(class_at(f"{place}/own_halfway.py:Halfway"))

    first = digest("a", MINE)
    assert digest("b", MINE) == first
    assert digest("c", MINE.replace("0.5", "0.6")) != first
    kinds = [class_at(f"{place}/own_halfway.py:Halfway") for place in "abc"]
    assert [address_of(kind) for kind in kinds] == [f"{folder / p / 'own_halfway.py'}:Halfway" for p in "abc"]
    assert [method_from(method_to(kind())) for kind in kinds] == [kind() for kind in kinds]
