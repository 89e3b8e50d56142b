"""`fedquilt deploy` without a network: what it makes, what it refuses, what it warns of, what it imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from fedquilt.cli import main
from fedquilt.deploy.ops import nginx, runs
from fedquilt.deploy.ops.create import create
from fedquilt.deploy.ops.processes import Failed
from fedquilt.deploy.ops.server_processes import ServerSide
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Address, Node, Project


def test_init_of_a_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fed"
    assert main(["deploy", "init", str(folder), "--scenario", "digits", "--set", "clients=3", "--port", "0"]) == 0
    project = Project.read(folder)
    assert len(project.clients) == 3
    assert project.server.port > 0
    said = capsys.readouterr()
    assert f"fedquilt deploy server {folder}" in said.out
    assert "WARNING" not in said.err
    for name in project.clients:
        assert Node.read(project.client_folder(name)).port == project.server.port


def test_init_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("from torch import nn\n\n\ndef small():\n    return nn.Linear(2, 4)\n")
    words = ["--client", "a", "--client", "b", "--model", f"{tmp_path}/nets.py:small", "--classes", "4"]
    hosts = ["--host", "federation.example.org", "--listen", "0.0.0.0"]
    assert main(["deploy", "init", str(tmp_path / "fed"), *words, *hosts]) == 0
    project = Project.read(tmp_path / "fed")
    assert project.server.hosts == ("federation.example.org",)
    assert (project.client_folder("b") / "nets.py").is_file()
    assert Node.read(project.client_folder("a")).host == "federation.example.org"


def test_a_scenario_of_ones_own_file(tmp_path: Path) -> None:
    (tmp_path / "hospital.py").write_text(
        "from functools import partial\n\nfrom torch import nn\n\nimport fedquilt as fq\n\n\n"
        "def net(width):\n    return nn.Linear(2, width)\n\n\n"
        "def wards(beds: int = 2):\n    data = ([[0.0, 1.0], [1.0, 0.0]], [0, 1])\n"
        "    return fq.Scenario('wards', [fq.Client(f'w{i}', partial(net, 2), data) for i in range(beds)])\n"
    )
    where = f"{tmp_path}/hospital.py:wards"
    assert main(["deploy", "init", str(tmp_path / "fed"), "--scenario", where, "--set", "beds=3"]) == 0
    project = Project.read(tmp_path / "fed")
    assert project.clients == ("w0", "w1", "w2")
    assert Node.read(project.client_folder("w1")).model == {"builder": "hospital.py:net", "arguments": [2]}
    assert (project.client_folder("w1") / "hospital.py").is_file()
    assert (project.server_folder / "hospital.py").is_file()


@pytest.mark.parametrize(
    ("flags", "warning"),
    [(["--no-tls"], "TLS and node authentication are OFF"), (["--no-authentication"], "Node authentication is OFF")],
)
def test_switching_protection_off_is_said_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], warning: str
) -> None:
    folder = tmp_path / "fed"
    assert main(["deploy", "init", str(folder), "--client", "a", "--model", "torch.nn:Linear", *flags]) == 0
    assert f"WARNING: {warning}" in capsys.readouterr().err
    project = Project.read(folder)
    assert not project.server.authentication
    assert not (project.client_folder("a") / "node.key").exists()
    assert Node.read(project.client_folder("a")).warning is not None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["init", "{tmp}/x"], "give --scenario NAME, or your own clients"),
        (["init", "{tmp}/x", "--scenario", "digitz"], "did you mean 'digits'?"),
        (["init", "{tmp}/x", "--client", "a", "--model", "nowhere"], "names no model"),
        (["init", "{tmp}/x", "--client", "a/b", "--model", "torch.nn:Linear"], "cannot be a folder"),
        (["server", "{tmp}"], "make a project with"),
        (["client", "{tmp}"], "folder of one client"),
        (["client", "{fed}/clients/a"], "data.npz does not exist"),
        (["run", "--dir", "{fed}"], "name the scenario and the method, or give --resume"),
        (["run", "other", "fedavg", "--dir", "{fed}"], "is a federation of the scenario 'own', not 'other'"),
        (["run", "own", "fedavgg", "--dir", "{fed}"], "did you mean 'fedavg'?"),
        (["run", "own", "fedavg", "--dir", "{fed}", "--set", "lr=-1"], "lr"),
        (["run", "own", "fedavg", "--dir", "{fed}"], "is not running; start it with `fedquilt deploy server {fed}`"),
        (["run", "--resume", "--dir", "{fed}"], "no unfinished run"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2)
    assert main(["deploy", *(word.format(tmp=tmp_path, fed=tmp_path / "fed") for word in words)]) == 2
    said = capsys.readouterr().err
    assert sentence.format(fed=tmp_path / "fed") in said.replace("\n", " ")
    assert "Traceback" not in said


def test_status_of_a_federation_at_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = create(tmp_path / "fed", ["a", "b"], "torch.nn:Identity", 2)
    run = project.runs / "own-fedavg-0"
    run.mkdir()
    (run / "status.json").write_text(json.dumps({"state": "running", "round": 3, "rounds": 9}))
    letter = {"seconds": 1.0, "bytes_up": {}, "bytes_down": {}, "refused": {"b": "not-finite"}}
    (run / "letters.jsonl").write_text(json.dumps(letter) + "\n")
    assert main(["deploy", "status", "--dir", str(project.folder)]) == 0
    said = capsys.readouterr().out
    assert "not running" in said
    assert "own-fedavg-0" in said
    assert "interrupted; --resume goes on, round 3 of 9; b left out 1x" in said  # its leader is not there


def test_a_server_that_is_being_started_again_is_away_and_no_more(tmp_path: Path) -> None:
    """What a soak found: while what a killed server had left was being replaced, whoever asked it failed."""
    project = create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2)
    control = {"port": 1, "ca": str(project.server_folder / "inner" / "ca.crt")}
    (project.server_folder / "control.json").write_text(json.dumps(control))
    assert who_is_there(project) is None  # no secret yet
    (project.server_folder / "control.secret").write_text("secret")
    assert who_is_there(project) is None  # no certificate yet
    assert runs._asked(project, 1) is None


def test_without_nginx_the_port_stays_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2, Address(listen="0.0.0.0"))
    with pytest.raises(ValueError, match=r"may listen on 127.0.0.1 alone"):
        ServerSide(open_, gate=False).__enter__()
    monkeypatch.setattr(nginx.shutil, "which", lambda *_, **__: None)  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match=r"nginx is not installed, .* install it"):
        ServerSide(open_).__enter__()


def imported(statement: str) -> set[str]:
    """Top-level modules that a fresh process has after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_waits_for_neither_torch_nor_flower() -> None:
    assert not imported("import fedquilt.cli.deploy") & {"torch", "flwr", "numpy", "sklearn"}


def test_watching_over_a_client_takes_next_to_nothing() -> None:
    heavy = {"torch", "flwr", "sklearn", "scipy", "numpy", "cryptography", "httpx", "typer", "rich", "ssl", "tomllib"}
    assert not imported("import fedquilt.deploy.ops.client_processes") & heavy


KEEPER = """
import sys
from fedquilt.deploy.ops import client_processes as c
from fedquilt.deploy.ops.processes import Service
says = [sys.executable, "-c", sys.argv.pop(1)]
c.start_nodes = lambda folders, _: Service.start("it", says, folders[0] / "log", {}, stdout=-1)
sys.exit(c.main())
"""


@pytest.mark.parametrize(
    ("node", "status", "out", "err"),
    [
        ("print('refused: its data are no data')", 2, "", "its data are no data\n"),
        (
            "import time; print('the server is there', flush=True); time.sleep(60)",
            0,
            "the server is there\nended\n",
            "",
        ),
    ],
)
def test_what_watches_over_a_client_tells_and_ends(tmp_path: Path, node: str, status: int, out: str, err: str) -> None:
    words = [sys.executable, "-c", KEEPER, node, str(tmp_path), str(tmp_path / "data.npz")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
        if not status:
            keeper.terminate()  # as a service manager does
        rest, wrong = keeper.communicate(timeout=30)
    assert (keeper.returncode, (said + rest)[9 if out else 0 :], wrong) == (status, out, err)  # without the time of day


def test_a_clients_process_imports_what_it_needs_and_no_more() -> None:
    statement = "import fedquilt.deploy.device.node"
    assert not imported(statement) & {
        "sklearn",
        "scipy",
        "matplotlib",
        "pandas",
        "plotly",
        "uvicorn",
        "alembic",
        "fastapi",
    }
    code = f"import sys\n{statement}\nprint('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("reached", "ends", "started"),
    # the round that each start reaches; how it ends; how often the run was started again
    [([0] * 9, "over before its end", 4), ([1, 1, 2, 2, 3, 3, 4], "finished", 7), ([], "over before its end", 0)],
)
def test_a_run_whose_leader_was_lost_is_gone_on_with_while_it_gets_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: list[int], ends: str, started: int
) -> None:
    project = create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2)
    folder = project.runs / "r"
    folder.mkdir()
    spec = {"run": "r", "folder": str(folder)}
    if not reached:
        (folder / "stop").touch()  # somebody stopped it
    times = 0

    def start(*_: object) -> int:
        nonlocal times
        state = {"state": "running", "round": reached[times], "rounds": 9}
        times += 1
        (folder / "status.json").write_text(json.dumps({"state": "finished"} if times == 7 else state))
        return times

    (folder / "summary.json").write_text("{}")
    monkeypatch.setattr(runs, "start_run", start)
    monkeypatch.setattr(runs, "_asked", lambda *_: "finished:failed")
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _: None)
    monkeypatch.setattr(runs, "time", clock)
    if ends == "finished":
        assert runs.see_through(project, spec, 0) == {}
    else:
        with pytest.raises(runs.CutOff, match=ends):
            runs.see_through(project, spec, 0)
    assert times == started


@pytest.mark.parametrize(
    ("gone", "told"), [(1, []), (8, ["does not answer", "there again"]), (99, ["does not answer"])]
)
def test_a_server_that_does_not_answer_is_waited_for_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int, told: list[str]
) -> None:
    """So many questions without an answer, 3 s apart; then the run ends well, if there is a then."""
    project = create(tmp_path / "my fed", ["a"], "torch.nn:Identity", 2)
    folder, asked, now, said = project.runs / "r", count(1), 0.0, list[str]()
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    (folder / "status.json").write_text(json.dumps({"state": "running"}))

    def answer(*_: object) -> str | None:
        if (number := next(asked)) == gone + 3:
            (folder / "status.json").write_text(json.dumps({"state": "finished"}))
        return "running" if number == 1 or number > gone + 1 else None

    def sleep(_: float) -> None:
        nonlocal now
        now += 3.0

    monkeypatch.setattr(runs, "_asked", answer)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    spec = {"run": "r", "folder": str(folder)}
    if gone < 20:
        assert runs.follow(project, spec, 0, say=said.append) == {}
    else:
        again = re.escape(f"go on with `fedquilt deploy run --resume r --dir '{project.folder}'`")
        with pytest.raises(Failed, match=f"has not answered for 45 s; start it again .*; {again}"):
            runs.follow(project, spec, 0, say=said.append)
    assert len(said) == len(told)
    assert all(words in line for words, line in zip(told, said, strict=True))
