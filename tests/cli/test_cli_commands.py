"""The command line as a user has it: what it prints, where, and how it ends; bad input above all."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from fedquilt.cli import main, output
from fedquilt.cli.interrupt import patient_ctrl_c
from fedquilt.report.page_content import page_data

SMALL = ("--engine", "sequential", "--device", "cpu", "--set", "clients=8", "epochs=1")
Said = tuple[int, str, str]
Say = Callable[..., Said]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a folder of its own, where the sys.path that commands extend is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("FEDQUILT_DATA", raising=False)


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str]) -> Say:
    """Run a command in this process: its exit code, standard output and standard error."""

    def run(*words: str) -> Said:
        code = main(words)
        told = capfd.readouterr()
        return code, told.out, told.err

    return run


def refused(said: Said) -> str:
    """The one sentence of a command that was refused."""
    code, out, err = said
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    return err.strip()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_lines_that_end_between_words_and_a_program_one_line(terminal: bool) -> None:
    shown, command = io.StringIO(), "fedquilt report runs/compare-digits"
    sentence = f"the runs of {'extraordinarily ' * 9}long names are kept; look at them with: {command}"
    output.say(sentence, Console(file=shown, width=60, force_terminal=terminal))
    lines = shown.getvalue().splitlines()
    assert " ".join(lines) == sentence
    assert len(lines) == (5 if terminal else 1)
    assert not terminal or (lines[-1] == command and max(map(len, lines)) <= 60)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("rn digits fedavg", "Did you mean 'run'"),
        ("run digitz fedavg", "did you mean 'digits'"),
        ("run digits fedavgg", "did you mean 'fedavg'"),
        ("compare digits local modfll", "did you mean 'modfl'"),
        ("compare digits local local", "named twice"),
        ("list metods", "did you mean 'methods'"),
        ("data get mnst", "did you mean 'mnist'"),
        ("run digits fedavg --set clents=8", "did you mean 'clients'"),
        ("run digits fedavg --set clients=many", "whole number"),
        ("run digits fedavg --set clients=0", "at least 1"),
        ("run digits fedavg --set lr=0", "above 0"),
        ("run digits fedavg --set optimiser=adan", "did you mean 'adam'"),
        ("run digits fedavg --set nesterov=true", "momentum above 0"),
        ("run digits fedprox --set mu=0", "fedavg"),
        ("run digits fedavg --rounds 0", "at least 1"),
        ("run digits fedavg --rounds 2 --set rounds=3", "one of them"),
        ("run digits fedavg --seed -1", "from 0 on"),
        ("run digits fedavg --seed x", "not a valid"),
        ("compare digits fedavg local --seeds 0", "at least one"),
        ("compare digits fedavg local --reference modfl", "no method in this comparison"),
        ("compare digits fedavg local --target 80", "at most 1"),
        ("compare digits fedavg local --format tex", "no format"),
        ("run digits fedavg --engine fastest", "there is no engine"),
        ("run digits fedavg --device abacus", "no device 'abacus'"),
        ("run digits fedavg --merge krumm", "did you mean 'krum'"),
        ("run digits fedavg --readouts recieved", "did you mean 'received'"),
        ("run digits fedavg --evaluate-every 0", "at least 1"),
        ("run digits fedavg --clients-at-once 0", "at least 1"),
        ("run nowhere.py:build fedavg", "no file nowhere.py"),
        ("run digits", "name the method to run on 'digits'"),
        ("resume nowhere", "run.toml"),
        ("report nowhere", "run.toml"),
    ],
)
def test_bad_input_is_one_sentence(say: Say, words: str, sentence: str) -> None:
    assert sentence in refused(say(*words.split()))
    assert not Path("runs").exists()  # refused before any work


def test_debug_shows_the_traceback_wherever_it_stands(say: Say) -> None:
    code, _, err = say("run", "digits", "fedavgg", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.strip().endswith("did you mean 'fedavg'?")


# --- scenarios of the user's own ------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn
import fedquilt as fq
from beside import WIDTH

def net():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2))

def build(seed=0, people=3):
    made = torch.Generator().manual_seed(seed)
    def split(n):
        x = torch.randn(n, WIDTH, generator=made)
        return x, (x.sum(1) > 0).long()
    return fq.Scenario("mine", [fq.Client(f"p{i}", net, split(12), split(6), split(6)) for i in range(people)])

def nothing():
    return 3

def broken():
    return undefined

WORD = "not a function"
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("WIDTH = 4\n")
    (tmp_path / "mine.py").write_text(OWN)
    return str(tmp_path / "mine.py")


def test_a_file_of_ones_own(say: Say, own: str) -> None:
    words = ("--set", "people=4", "--rounds", "2", "--engine", "sequential", "--no-keep", "--json")
    code, out, err = say("run", f"{own}:build", "fedper", *words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["summary"]["scenario"] == "mine"
    assert {row["client"] for row in found["clients"]} == {"p0", "p1", "p2", "p3"}


def test_the_function_is_called_build_unless_said(say: Say, own: str) -> None:
    assert say("run", own, "local", "--rounds", "1", "--engine", "sequential", "--no-keep")[0] == 0


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("biuld", "did you mean 'build'"),
        ("WORD", "no function 'WORD'"),
        ("nothing", "gave a int; it must give a fedquilt.Scenario"),
        ("broken", "NameError"),
    ],
)
def test_a_file_that_does_not_do(say: Say, own: str, function: str, sentence: str) -> None:
    assert sentence in refused(say("run", f"{own}:{function}", "fedavg"))


def test_a_file_that_cannot_be_read(say: Say, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def build(:\n")
    assert "SyntaxError" in refused(say("run", str(tmp_path / "bad.py"), "fedavg"))


# --- what commands give ---------------------------------------------------------------------------------------------


def test_run_as_json_is_one_clean_line(say: Say) -> None:
    words = ("--rounds", "2", "--json", "--no-keep", *SMALL, "mu=0.5", "lr=0.05")
    code, out, err = say("run", "digits", "fedprox", *words)
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["finished"] is True
    assert found["folder"] is None
    summary = found["summary"]
    assert (summary["method"], summary["rounds"], summary["clients"]) == ("fedprox", 2, 8)
    assert summary["gain_over_alone"] == pytest.approx(summary["accuracy_mean"] - summary["alone_mean"])
    assert {row["round"] for row in found["clients"]} == {2}
    assert set(found["plan"]["units"]) == {"configuration", "operation"}


def test_a_run_is_kept_and_reported(say: Say) -> None:
    code, out, _ = say("run", "digits", "modfl", "--rounds", "1", "--no-alone", "--quilt", *SMALL)
    assert code == 0
    assert "gen1-north-1" in out  # the quilt
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"digits-modfl-\d{8}-\d{6}", folder.name)
    assert str(folder) in out
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{100 * summary['accuracy_mean']:.1f}" in out
    assert "finished" in refused(say("resume", str(folder)))
    pytest.importorskip("plotly")
    code, out, _ = say("report", str(folder), "--out", "page.html")
    assert code == 0
    assert Path("page.html").stat().st_size > 10_000


def test_where_auto_splits_nothing_the_terminal_and_the_page_say_why_and_what_to_ask_next(say: Say) -> None:
    code, out, _ = say("run", "digits", "auto", "--rounds", "1", "--no-alone", *SMALL)
    assert code == 0
    (folder,) = Path("runs").iterdir()
    ((quilt,),) = (scenario["quilts"] for scenario in page_data([folder])["scenarios"])
    for said in (" ".join(out.split()), quilt["unsplit"]):
        assert "Nothing was split: the run was too short to look. fedquilt advise says" in said


def test_a_folder_in_use_is_left_alone(say: Say) -> None:
    Path("full").mkdir()
    Path("full/note.txt").write_text("mine")
    assert "not empty" in refused(say("run", "digits", "local", "--out", "full", "--rounds", "1", *SMALL))
    assert [path.name for path in Path("full").iterdir()] == ["note.txt"]


def test_compare_reuses_local_as_alone(say: Say) -> None:
    words = ("compare", "digits", "local", "fedavg", "--seeds", "2", "--rounds", "2", "--target", "0.05", *SMALL)
    code, out, err = say(*words, "--json")
    assert (code, err) == (0, "")
    local, fedavg = json.loads(out)["methods"]
    assert (local["gain"], local["seeds"], local["clients"]) == (0.0, 2, 8)
    assert fedavg["gain"] == pytest.approx(fedavg["accuracy"] - local["accuracy"])
    assert fedavg["reference"] == "fedavg"
    assert fedavg["rounds_to_target"] >= 1
    assert fedavg["megabytes"] > 0


FORMS = [("text", "method"), ("markdown", "| method |"), ("csv", "method,"), ("latex", "tabular")]


@pytest.mark.parametrize(("form", "sign"), FORMS)
def test_compare_prints_in_every_form(say: Say, form: str, sign: str) -> None:
    code, out, _ = say("compare", "digits", "local", "fedper", "--rounds", "1", "--format", form, *SMALL)
    assert code == 0
    assert sign in out
    assert "fedper" in out


@pytest.mark.parametrize("kind", ["methods", "scenarios", "models", "readouts", "merges", "data"])
def test_lists(say: Say, kind: str) -> None:
    code, out, err = say("list", kind)
    assert (code, err) == (0, "")
    first = json.loads(say("list", kind, "--json")[1])
    assert len(first) > 1
    for entry in first:
        assert entry["name"] in out
        assert entry.get("about", entry.get("title"))


def test_data_is_listed_and_what_is_bundled_need_not_be_fetched(say: Say) -> None:
    assert "bundled" in say("data", "list", "--data-dir", "caches")[1]
    assert "nothing to fetch" in say("data", "get", "digits")[1]


def test_the_version(say: Say) -> None:
    written = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert say("--version")[1] == f"fedquilt {written['project']['version']}\n"


def test_the_demo_shows_five_methods_and_ends_with_what_auto_found(say: Say) -> None:
    code, out, err = say("demo", "--rounds", "1", "--engine", "sequential", "--picture", "demo.svg")
    assert (code, err) == (0, "")
    for word in ("local", "fedavg", "fedper", "modfl", "auto", "gen2-west-3", "A 12 clients, B 12, C 6"):
        assert word in out, word
    planted, found = out.index("Planted and declared: modfl"), out.index("Found, nothing declared: auto")
    assert planted < out.index("A 12 clients, B 12, C 6") < found < out.index("What you are looking at")
    assert "What you are looking at" in out
    assert "What to try next" in out
    picture = Path("demo.svg").read_text()
    assert "modfl" in picture
    assert "@font-face" not in picture  # opening it asks nobody for anything


# --- as a process of its own ----------------------------------------------------------------------------------------

COMMAND = (sys.executable, "-m", "fedquilt")


def test_help_waits_for_nothing_heavy() -> None:
    script = """if True:
        import sys
        from fedquilt.cli import main
        for words in ["--help"], ["run", "--help"], ["data", "list"], ["deploy", "--help"]:
            main(words)
        heavy = {"torch", "sklearn", "scipy", "flwr", "plotly"} & set(sys.modules)
        sys.exit(f"imported {heavy}" if heavy else 0)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fedquilt demo" in done.stdout


def test_a_reader_that_goes_away_is_no_error() -> None:
    words = f"{sys.executable} -m fedquilt list scenarios | head -1"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def interrupted(*words: str, when: Callable[[], bool]) -> Any:
    """A command that gets a Ctrl-C as soon as `when` holds."""
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        patience = time.monotonic() + 60
        while not when() and process.poll() is None and time.monotonic() < patience:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_ctrl_c_ends_with_what_was_reached_and_resume_goes_on(say: Say) -> None:
    rows = Path("kept/metrics.jsonl")
    words = ("run", "digits", "fedavg", "--rounds", "3000", "--out", "kept", "--json", "--no-alone", *SMALL)
    code, out, err = interrupted(*words, when=lambda: rows.is_file() and rows.stat().st_size > 0)
    assert code == 130, err
    assert "Traceback" not in err
    assert "fedquilt resume kept" in err
    found = json.loads(out)
    assert found["finished"] is False
    reached = found["summary"]["rounds"]
    assert 1 <= reached < 3000
    known = 32 * (reached + 1)  # 8 clients, 2 read-outs, 2 splits
    code, out, err = interrupted("resume", "kept", "--json", when=lambda: len(rows.read_text().splitlines()) > known)
    assert code == 130, err
    assert json.loads(out)["summary"]["rounds"] > reached


def test_ctrl_c_at_once_is_quiet() -> None:
    start = time.monotonic()
    words = ("run", "digits", "fedavg", "--rounds", "3000")
    code, out, err = interrupted(*words, when=lambda: time.monotonic() > start + 0.5)
    assert code in (2, 130, -signal.SIGINT)
    assert out == ""
    assert "Traceback" not in err or code == -signal.SIGINT  # Python itself had not started yet


def test_ctrl_c_waits_for_libraries_that_are_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ModuleType("torch")
    half.__spec__ = ModuleSpec("torch", None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]  # as the import system marks it
    monkeypatch.setitem(sys.modules, "torch", half)
    with patient_ctrl_c():
        signal.raise_signal(signal.SIGINT)  # inside the import: nothing yet
        time.sleep(0.3)
        half.__spec__._initializing = False  # type: ignore[attr-defined]
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)
        assert time.monotonic() - start < 20  # woken from its sleep
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_module_ends_with_the_exit_code_of_the_command() -> None:
    done = subprocess.run([*COMMAND, "run", "digitz", "fedavg"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'digits'?" in done.stderr


def test_a_list_of_nothing_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for kind in ("methods", "scenarios", "models", "readouts", "merges", "data"):
        assert f"fedquilt list {kind} " in shown
    assert main(["list", "--json"]) == 0
    counts = {entry["name"]: entry["number"] for entry in json.loads(capsys.readouterr().out)}
    assert counts["methods"] >= 28


# --- advice -----------------------------------------------------------------------------------------------------------

ADVISE = ("advise", "digits", "--methods", "fedavg,fedper", "--seeds", "2", "--rounds", "2", "--jobs", "1", *SMALL)


def test_advice_is_written_and_a_race_goes_on_where_it_was(say: Say) -> None:
    code, out, err = say(*ADVISE)
    assert code == 0, err
    folder = Path("runs/advise-digits")
    assert "What to try next" in out
    told = json.loads((folder / "advice.json").read_text())
    assert told["method"] in ("fedavg", "fedper", "local")
    assert set(told["validation"]) | set(told["stopped"]) == {"fedavg", "fedper", "local"}  # alone always races
    assert told["sentences"][0] in " ".join(out.split())
    assert all(" --rounds 2 --set clients=8 epochs=1   # " in command for command in told["next"])  # as typed here
    page = (folder / "advice.html").read_text(encoding="utf-8")
    assert told["sentences"][1] in page
    summaries = sorted(folder.glob("*/summary.json"))
    written = {path: path.stat().st_mtime_ns for path in summaries}
    lost = next(path for path in summaries if path.parent.name.startswith("local"))
    lost.unlink()  # as if it had been killed before the end of that run
    code, out, _ = say(*ADVISE, "--json")
    assert code == 0
    assert json.loads(out)["sentences"] == told["sentences"]
    again = {path for path, at in written.items() if path.stat().st_mtime_ns != at}
    assert again == {lost}  # nothing else was run


def test_advice_needs_validation_samples(say: Say) -> None:
    Path("mine.py").write_text(
        "import numpy as np\nfrom torch import nn\nimport fedquilt as fq\n\n\n"
        "def build(seed: int = 0) -> fq.Scenario:\n"
        "    draw = np.random.default_rng(seed)\n"
        "    data = lambda: (draw.normal(size=(8, 3)), draw.integers(0, 2, 8))\n"
        "    clients = [fq.Client(f'c{i}', lambda: nn.Linear(3, 2), data(), test=data()) for i in range(3)]\n"
        "    return fq.Scenario('mine', clients, fq.Training(rounds=1))\n"
    )
    words = ("advise", "mine.py:build", "--methods", "fedavg", "--engine", "sequential", "--jobs", "1")
    code, _, err = say(*words)
    assert code == 2
    assert "no client has any" in err
