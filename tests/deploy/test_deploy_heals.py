"""Faults of a server and its network that pass: afterwards everybody is there again, and nobody had to go anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")
if shutil.which("nginx") is None:
    pytest.skip("nginx is not installed", allow_module_level=True)

from deploy_help import lines, processes_of, row_key
from test_deploy_endurance import Machines, cut_power, wait

from fedquilt.deploy.ops import keys, membership
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Address, Rounds
from fedquilt.runs.run import run
from fedquilt.scenarios import build

pytestmark = pytest.mark.deploy
CLIENTS = 2


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("heals") / "fed"
    rules = Rounds(timeout=40, quorum=0.5)
    made = Machines(create_from_scenario(folder, build("digits", clients=CLIENTS), Address(port=free_port()), rules))
    try:
        made.server()
        for name in made.project.clients:
            made.client(name)
        wait(lambda: online(made), 120)
        yield made
    finally:
        made.end()


def online(machines: Machines) -> bool:
    return list((who_is_there(machines.project) or {}).values()).count("online") == CLIENTS


def polls(machines: Machines) -> int:
    """How often clients have asked for letters with success: more than a state that Flower remembers."""
    log = machines.project.server_folder / "nginx" / "access.log"
    return len(re.findall(r" 200 /v1/fleet/pull-messages ", log.read_text()))


def all_back(machines: Machines, patience: float) -> float:
    """Seconds until every client asks for letters again."""
    start = time.monotonic()
    for name in machines.project.clients:
        log = machines.project.server_folder / "nginx" / "access.log"
        pattern = re.compile(rf" 200 /v1/fleet/pull-messages \d+ \d+ {re.escape(name)} ")
        before = len(pattern.findall(log.read_text()))
        wait(lambda: len(pattern.findall(log.read_text())) > before + 1, patience)  # noqa: B023
    wait(lambda: online(machines), patience)
    return time.monotonic() - start


def pids_of(words: str) -> list[int]:
    """Processes of this machine whose command line has these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def test_a_database_that_is_locked_for_a_while(machines: Machines) -> None:
    database = sqlite3.connect(machines.project.server_folder / "superlink.db", isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    time.sleep(12)
    database.execute("ROLLBACK")
    database.close()
    print({"locked database": all_back(machines, 90)})
    assert machines.run("digits", "fedavg", "--rounds", "1").wait(120) == 0


def test_who_starts_leaders_is_started_again(machines: Machines) -> None:
    secret = str(machines.project.server_folder / "exec.secret")
    (old,) = pids_of(f"flower-superexec --runtime-api-address 127.0.0.1:{port(machines)}")
    os.kill(old, signal.SIGKILL)
    wait(lambda: [pid for pid in pids_of(f"superexec-auth-secret-file {secret}") if pid != old], 30)
    assert machines.run("digits", "fedavg", "--rounds", "1").wait(120) == 0
    assert "SuperExec ended by itself, and is started again" in machines.said("server")


def port(machines: Machines) -> int:
    return int(json.loads((machines.project.server_folder / "control.json").read_text())["port"])


def test_something_that_accepts_and_closes_stands_in_for_the_server(machines: Machines) -> None:
    machines.running["server"].terminate()
    machines.running["server"].wait(30)
    closer = subprocess.Popen([sys.executable, "-c", _CLOSER, str(machines.project.server.port), "25"])
    closer.wait(60)
    machines.server()
    print({"accepts and closes": all_back(machines, 150)})
    said = machines.said(machines.project.clients[0])
    assert "cannot be reached" in said or "not accepted" in said  # the owner was told
    assert "the server is there" in said.rpartition("cannot be reached")[2]


_CLOSER = """
import socket, sys, time
end = time.monotonic() + float(sys.argv[2])
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen()
listener.settimeout(0.5)
while time.monotonic() < end:
    try:
        listener.accept()[0].close()
    except TimeoutError:
        pass
"""


def test_a_certificate_that_runs_out_and_is_renewed(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(keys, "_SERVER_DAYS", 0)
        membership.renew(machines.project)
    wait(lambda: all("certificate has expired" in machines.said(name) for name in machines.project.clients), 60)
    membership.renew(machines.project)
    print({"expired certificate": all_back(machines, 90)})


def test_a_client_that_is_killed_is_back_at_once(machines: Machines) -> None:
    name = machines.project.clients[0]
    cut_power(machines.running[name])
    machines.client(name)
    wait(lambda: "training samples" in machines.said(name).rpartition("talking to")[2], 60)  # torch is there
    seconds = all_back(machines, 60)
    print({"killed client": seconds})
    assert seconds < 25  # Flower alone would keep it out for a minute


def test_one_process_serves_many_clients_and_a_newcomer_joins(machines: Machines) -> None:
    project, first = machines.project, machines.project.clients[0]
    where = ["--dir", str(project.folder)]
    follower = machines.run("digits", "fedavg", "--rounds", "25", "--seed", "3")
    wait(lambda: list(project.runs.glob("*fedavg-3*/letters.jsonl")), 90)
    (folder,) = project.runs.glob("*fedavg-3*")
    for name in ("late-1", "late-2"):
        assert machines.type("members", "add", name, *where).wait(30) == 0
        shutil.copy(project.client_folder(first) / "data.npz", project.client_folder(name))
    machines.type("late", "client", str(project.client_folder("late-1")), str(project.client_folder("late-2")))
    assert follower.wait(240) == 0
    log = (folder / "leader.log").read_text()
    assert "client 'late-1' joined after round" in log
    assert "client 'late-2' joined after round" in log
    traffic = lines(folder / "traffic.jsonl")
    assert len(traffic) == 25
    assert set(traffic[-1]["up"]) == {*project.clients, "late-1", "late-2"}
    machines.running["late"].terminate()
    assert machines.running["late"].wait(30) == 0
    for name in ("late-1", "late-2"):
        assert machines.type("members", "remove", name, *where).wait(30) == 0


def test_a_closed_terminal_leaves_one_leader_and_the_simulations_numbers(machines: Machines) -> None:
    project = machines.project
    # Forty rounds still go on when the second leader has started, on a slow machine too.
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the command would ignore it
    follower = machines.run("digits", "fedper", "--rounds", "40")
    signal.signal(signal.SIGHUP, kept)
    wait(lambda: list(project.runs.glob("*fedper*/letters.jsonl")), 120)
    wait(lambda: len(lines(next(project.runs.glob("*fedper*/letters.jsonl")))) >= 2, 60)
    follower.send_signal(signal.SIGHUP)
    follower.wait(20)
    second = machines.run("--resume")
    assert second.wait(60) == 2
    assert "is being led already; look at it with `fedquilt deploy follow" in machines.said("run").replace("\n", " ")
    assert machines.type("follow", "follow", "--dir", str(project.folder)).wait(150) == 0
    (folder,) = project.runs.glob("*fedper*")
    rows = lines(folder / "metrics.jsonl")
    assert len({row_key(row) for row in rows}) == len(rows)  # every round once
    expected = run(build("digits", clients=CLIENTS), "fedper", 40, device="cpu", engine="sequential", alone=False)
    theirs = {row_key(row): row["accuracy"] for row in expected.rows}
    assert all(abs(row["accuracy"] - theirs[row_key(row)]) < 1e-6 for row in rows)
    seconds = sorted(line["seconds"] for line in lines(folder / "letters.jsonl") if line["what"] == "round")
    print({"median round of 2 clients": seconds[len(seconds) // 2]})


def test_a_stopped_run_goes_on_at_once_by_its_name(machines: Machines) -> None:
    follower = machines.run("digits", "fedavg", "--rounds", "6", "--seed", "5")
    wait(lambda: list(machines.project.runs.glob("*fedavg-5*/letters.jsonl")), 90)
    (folder,) = machines.project.runs.glob("*fedavg-5*")
    wait(lambda: len(lines(folder / "letters.jsonl")) >= 2, 60)
    follower.send_signal(signal.SIGINT)
    assert follower.wait(60) == 130
    assert machines.run("--resume", folder.name, "--from-round", "1").wait(150) == 0
    assert [line["round"] for line in lines(folder / "traffic.jsonl")] == list(range(1, 7))


def test_strangers_neither_fill_memory_nor_use_up_connections(machines: Machines) -> None:
    (superlink,) = pids_of(f"fedquilt.deploy.server.door {machines.project.folder}")
    before = memory(superlink)
    crowd = [stranger(machines) for _ in range(300)]
    for _ in range(20):
        for one in crowd:
            with contextlib.suppress(OSError):
                one.sendall(b"x" * 4096)
        time.sleep(1)
    assert all_back(machines, 20) < 20
    for one in crowd:
        one.close()
    assert memory(superlink) < before + (50 << 20)


def stranger(machines: Machines) -> socket.socket:
    """Somebody without a key, in the middle of a long upload."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("localhost", machines.project.server.port), timeout=10)
    secure = context.wrap_socket(plain)
    secure.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: 7000000\r\n\r\n")
    return secure


def memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_keys_are_replaced_and_taken_away_while_it_runs(machines: Machines) -> None:
    project, name = machines.project, machines.project.clients[0]
    old = (project.client_folder(name) / "node.key").read_bytes()
    where = ["--dir", str(project.folder)]
    assert machines.type("members", "renew", *where).wait(30) == 0
    assert machines.type("members", "rekey", name, *where).wait(30) == 0
    machines.running[name].terminate()
    machines.running[name].wait(30)
    machines.client(name)
    all_back(machines, 120)  # by its new key, and past a new certificate
    (project.client_folder(name) / "node.key").write_bytes(old)
    machines.running[name].terminate()
    machines.running[name].wait(30)
    machines.client(name)
    wait(lambda: "the server sends this client away" in machines.said(name), 60)
    assert machines.type("status", "status", *where).wait(30) == 0
    assert f"{name} with a key that was replaced or taken away, from 127.0.0.1" in machines.said("status")
    assert machines.type("members", "remove", name, *where).wait(30) == 0
    assert set(who_is_there(project) or {}) == set(project.clients) - {name}
    assert machines.type("members", "add", "newcomer", *where).wait(30) == 0
    like = project.clients[1]  # the first that is left, whose model it has
    shutil.copy(project.client_folder(like) / "data.npz", project.client_folder("newcomer"))
    machines.client("newcomer")
    wait(lambda: (who_is_there(project) or {}).get("newcomer") == "online", 60)


def test_nothing_stays_behind(machines: Machines) -> None:
    machines.end()
    wait(lambda: not processes_of(machines.project.folder), 20)
