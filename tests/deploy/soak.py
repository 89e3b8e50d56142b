"""An endurance run: a federation of real processes under faults that are drawn at random from a seed.

    python tests/deploy/soak.py --seed 1 --minutes 30

Runs follow one another while faults come. Each must have every round once, and every client's scores after every round
must be those of a simulation in which the same clients took part in each round: nothing was lost, doubled or spoilt.
(In a run that somebody joined after its first round, until then.)
When the time is over, every client must be online; a last run, in which nothing happens, must be the simulation's,
round by round; and once everything was ended, no process may be left. A line for each fault and run, and a summary; the
exit status says whether it held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deploy_help import lines, processes_of, row_key
from hostile import WAYS
from test_deploy_endurance import Machines, cut_power, descendants
from test_deploy_heals import _CLOSER, pids_of, stranger

from fedquilt.core.federation import Federation
from fedquilt.deploy.ops import keys, membership
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Address, Rounds
from fedquilt.deploy.server.coordinator import DEFAULT_READOUTS
from fedquilt.runs.rebuilding import make_method, make_readouts
from fedquilt.scenarios import build

CLIENTS, ROUNDS = 5, 25
FAULTS_A_MINUTE = 100 / 30  # at least; where a machine is too busy for that, it takes longer
METHODS = ("modfl", "fedper", "fedavg")
HARMLESS = {"no-answer", "failed"}  # what an honest client may be left out for
HERE = Path(__file__).parent


class Wrong(AssertionError):
    """What must not happen."""


class Soak:
    """The machines, the operator's runs, and the faults."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.begun = random.Random(seed), time.monotonic()
        scenario = build("digits", clients=CLIENTS)
        rules = Rounds(timeout=25, quorum=0.5, attempts=40, grace=6)
        self.machines = Machines(create_from_scenario(folder, scenario, Address(port=free_port()), rules))
        self.project = self.machines.project
        self.faults: Counter[str] = Counter()
        self.runs: list[dict[str, Any]] = []
        self.bad: dict[str, set[str]] = {}  # by run: who lied in it
        self.follower: subprocess.Popen[bytes] | None = None
        self.run = ""
        self.resumed = self.given_up = 0

    def say(self, line: str) -> None:
        passed = int(time.monotonic() - self.begun)
        print(f"{passed // 60:3d}:{passed % 60:02d}  {line}", flush=True)

    # --- the operator -------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """What an operator does: starts the server that gave up, the next run, or goes on with one that was cut off."""
        server = self.machines.running["server"]
        if server.poll() is not None:
            self.given_up += 1
            self.say("the server's command has ended; it is typed again")
            self.machines.server()
        if self.follower is not None and self.follower.poll() is None:
            return
        if self.follower is not None and self.follower.returncode == 0:
            self.finish()
        if self.run:
            self.resumed += 1
            led = "is being led already" in self.machines.said("run").replace("\n", " ")[-600:]
            words = ["follow", self.run] if led else ["run", "--resume", self.run]
            self.follower = self.type_run(*words)
        else:
            method = METHODS[len(self.runs) % len(METHODS)]
            seed = ["--seed", str(len(self.runs))]
            self.follower = self.type_run("run", "digits", method, "--rounds", str(ROUNDS), *seed)
            self.name_run()

    def type_run(self, *words: str) -> subprocess.Popen[bytes]:
        (self.project.folder / "run.out").unlink(missing_ok=True)
        return self.machines.type("run", *words, "--dir", str(self.project.folder))

    def name_run(self) -> None:
        """Waits until the run that was typed has a name, or was refused because the server is away."""
        assert self.follower is not None
        before = {path.parent.name for path in self.project.runs.glob("*/deploy.json")} - {r["run"] for r in self.runs}
        end = time.monotonic() + 60
        while self.follower.poll() is None and time.monotonic() < end and not before:
            found = {path.parent.name for path in self.project.runs.glob("*/deploy.json")}
            before = found - {known["run"] for known in self.runs}
            time.sleep(0.2)
        self.run = max(before, default="")
        self.bad.setdefault(self.run, set())

    def finish(self) -> None:
        """Checks a run that has ended."""
        folder = self.project.runs / self.run
        summary = json.loads((folder / "summary.json").read_text())
        took = {line["round"]: set(line["up"]) for line in lines(folder / "traffic.jsonl")}
        if [line["round"] for line in lines(folder / "traffic.jsonl")] != list(range(1, summary["rounds"] + 1)):
            raise Wrong(f"the run {self.run} does not have every round once")
        late = joined_late(folder)
        mine = {row_key(row): row["accuracy"] for row in lines(folder / "metrics.jsonl") if before_all(late, row)}
        theirs = replay(summary["method"], summary["seed"], took)
        off = [key for key, accuracy in mine.items() if abs(accuracy - theirs[key]) > 1e-6]
        seen = {(row["round"], row["client"]) for row in lines(folder / "metrics.jsonl")}
        silent = [(round_ - 1, name) for round_ in took for name in took[round_] if round_ > 1]
        silent = [missing for missing in silent if missing not in seen]  # whoever trains says how good it was before
        if silent:
            raise Wrong(f"the run {self.run} has no scores of {silent[:3]}, who took part in the next round")
        share = sum(map(len, took.values())) / (CLIENTS * len(took))
        self.runs.append({"run": self.run, "accuracy": summary["accuracy_mean"], "took part": share, "rows": len(mine)})
        told = f"accuracy {summary['accuracy_mean']:.3f}, {share:.0%} took part, {len(mine)} scores"
        told += f" until {' and '.join(late)} joined" if late else ""
        self.say(f"run {self.run}: {told}, {len(off)} unlike the simulation")
        if off:
            raise Wrong(f"the run {self.run} is not its simulation: {off[:3]}")
        for name, codes in summary["left_out"].items():
            if name not in self.bad[self.run] and set(codes) - HARMLESS:
                raise Wrong(f"the honest client {name} was left out of {self.run} for {codes}")
        self.run, self.follower = "", None

    # --- faults -------------------------------------------------------------------------------------------------------

    def all_faults(self) -> dict[str, tuple[int, Callable[[], str]]]:
        """Each fault by its name, with how often it comes against the others."""
        return {
            "kill client": (4, self.kill_client), "kill node": (4, self.kill_node), "stall node": (3, self.stall_node),
            "kill server": (2, self.kill_server), "kill superlink": (2, self.kill_superlink),
            "kill superexec": (1, self.kill_superexec), "kill nginx": (2, self.kill_nginx),
            "kill leader": (2, self.kill_leader), "stall superlink": (2, self.stall_superlink),
            "lock database": (3, self.lock_database), "full disk": (3, self.full_disk),
            "expired certificate": (2, self.expired_certificate), "stand-in": (1, self.stand_in),
            "strangers": (2, self.strangers), "liar": (5, self.liar), "closed terminal": (1, self.closed_terminal),
            "stopped run": (1, self.stopped_run),
        }  # fmt: skip

    def fault(self) -> None:
        known = self.all_faults()
        (name,) = self.random.choices(list(known), [weight for weight, _ in known.values()])
        self.faults[name] += 1
        start = time.monotonic()
        told = known[name][1]()
        self.say(f"#{self.faults.total():<4} {name:<20} {told} ({time.monotonic() - start:.0f} s)")

    def client(self) -> str:
        return self.random.choice(self.project.clients)

    def seconds(self, least: float, most: float) -> float:
        return self.random.uniform(least, most)

    def pids(self, words: str) -> list[int]:
        return [pid for pid in pids_of(words) if pid != os.getpid()]

    def node_of(self, name: str) -> list[int]:
        return self.pids(f"fedquilt.deploy.device.node {self.project.client_folder(name)} ")

    def superlink_pids(self) -> list[int]:
        return self.pids(f"fedquilt.deploy.server.door {self.project.folder} ")

    def superexec_pids(self) -> list[int]:
        secret = self.project.server_folder / "exec.secret"
        return [pid for pid in self.pids(f"--superexec-auth-secret-file {secret}") if pid not in self.superlink_pids()]

    def leader_pids(self) -> list[int]:
        return [pid for parent in self.superexec_pids() for pid in descendants(parent)[1:]]

    def send(self, pids: list[int], sign: int) -> str:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        return f"process {', '.join(map(str, pids)) or 'none'}"

    def kill_client(self) -> str:
        name = self.client()
        cut_power(self.machines.running[name])
        time.sleep(self.seconds(0, 4))
        self.machines.client(name)
        return name

    def kill_node(self) -> str:
        name = self.client()
        return f"{name}, {self.send(self.node_of(name), signal.SIGKILL)}"

    def stall_node(self) -> str:
        name, seconds = self.client(), self.seconds(4, 15)
        with self.stopped(self.node_of(name)):
            time.sleep(seconds)
        return f"{name} for {seconds:.0f} s"

    def stall_superlink(self) -> str:
        seconds = self.seconds(3, 12)
        with self.stopped(self.superlink_pids()):
            time.sleep(seconds)
        return f"for {seconds:.0f} s"

    @contextmanager
    def stopped(self, pids: list[int]) -> Iterator[None]:
        self.send(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(pids, signal.SIGCONT)

    def kill_server(self) -> str:
        cut_power(self.machines.running["server"])
        time.sleep(self.seconds(0, 5))
        self.machines.server()
        return "all of its processes"

    def kill_superlink(self) -> str:
        return self.send(self.superlink_pids(), signal.SIGKILL)

    def kill_superexec(self) -> str:
        return self.send(self.superexec_pids(), signal.SIGKILL)

    def kill_nginx(self) -> str:
        pid = self.project.server_folder / "nginx" / "nginx.pid"
        return self.send([int(pid.read_text())] if pid.is_file() else [], signal.SIGKILL)

    def kill_leader(self) -> str:
        return self.send(self.leader_pids(), signal.SIGKILL)

    def lock_database(self) -> str:
        seconds = self.seconds(3, 11)
        database = sqlite3.connect(self.project.server_folder / "superlink.db", isolation_level=None, timeout=20)
        with contextlib.suppress(sqlite3.OperationalError):
            database.execute("BEGIN EXCLUSIVE")
            time.sleep(seconds)
            database.execute("ROLLBACK")
        database.close()
        return f"for {seconds:.0f} s"

    def full_disk(self) -> str:
        """A process that cannot write one more byte to any file, for a while."""
        who, name = self.random.choice(("superlink", "leader", "client")), self.client()
        found = {"superlink": self.superlink_pids(), "leader": self.leader_pids(), "client": self.node_of(name)}[who]
        seconds = self.seconds(2, 8)
        for pid in found:
            self._room(pid, 0)
        time.sleep(seconds)
        for pid in found:
            self._room(pid, resource.RLIM_INFINITY)
        return f"of {name if who == 'client' else 'the ' + who} for {seconds:.0f} s"

    def _room(self, pid: int, size: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def expired_certificate(self) -> str:
        seconds, days = self.seconds(6, 14), keys._SERVER_DAYS
        keys._SERVER_DAYS = 0
        try:
            self._renew()
        finally:
            keys._SERVER_DAYS = days
        time.sleep(seconds)
        self._renew()
        return f"for {seconds:.0f} s"

    def _renew(self) -> None:
        """`fedquilt deploy renew`, again while the server is being started."""
        end = time.monotonic() + 60
        while True:
            try:
                return membership.renew(self.project)
            except Exception:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def stand_in(self) -> str:
        seconds = self.seconds(4, 12)
        server = self.machines.running["server"]
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        cut_power(server)
        port = str(self.project.server.port)
        subprocess.run([sys.executable, "-c", _CLOSER, port, str(seconds)], check=False, timeout=60)
        self.machines.server()
        return f"something that accepts and closes, for {seconds:.0f} s"

    def strangers(self) -> str:
        crowd = []
        for _ in range(60):
            with contextlib.suppress(OSError):
                crowd.append(stranger(self.machines))
        end = time.monotonic() + self.seconds(3, 8)
        while time.monotonic() < end:
            for one in crowd:
                with contextlib.suppress(OSError):
                    one.sendall(b"x" * 4096)
            time.sleep(0.5)
        for one in crowd:
            one.close()
        return f"{len(crowd)} with slow bodies"

    def liar(self) -> str:
        """Somebody has a client's key for a while."""
        name, way, seconds = self.client(), self.random.choice(WAYS), self.seconds(8, 16)
        self.bad[self.run].add(name)
        process = self.machines.running[name]
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        cut_power(process)
        command = [sys.executable, str(HERE / "hostile.py"), str(self.project.folder), name, way, str(seconds)]
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        self.machines.client(name)
        return f"{name}: {way}, {told.stdout.strip() or 'no'} letters"

    def closed_terminal(self) -> str:
        if self.follower is not None and self.follower.poll() is None:
            self.follower.send_signal(signal.SIGHUP)
            self.follower.wait(30)
            if self.run:
                self.follower = self.type_run("follow", self.run)
        return "of the run, which is followed"

    def stopped_run(self) -> str:
        if self.follower is not None and self.follower.poll() is None:
            self.follower.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.follower.wait(60)
        return "by Ctrl-C"

    # --- beginning and end --------------------------------------------------------------------------------------------

    def online(self) -> int:
        return list((who_is_there(self.project) or {}).values()).count("online")

    def until(self, ready: Callable[[], bool], patience: float, what: str) -> float:
        start = time.monotonic()
        while not ready():
            if time.monotonic() - start > patience:
                raise Wrong(f"{what}: not within {patience:.0f} s")
            self.tend()
            time.sleep(0.5)
        return time.monotonic() - start

    def last(self) -> None:
        """Nothing goes wrong any more: the run that is going on ends well, everybody is there, and one run more is as
        if nothing had ever happened."""
        done = len(self.runs)
        self.until(lambda: len(self.runs) > done, 600, "the end of the run")
        self.say(f"no more faults; everybody was online after {self.everybody():.0f} s")
        self.until(lambda: len(self.runs) > done + 1, 600, "the last run")
        if self.runs[done + 1]["took part"] < 1:
            raise Wrong("somebody was missing in the last run, in which nothing happened")
        self.everybody()

    def everybody(self) -> float:
        return self.until(lambda: self.online() == CLIENTS, 120, "every client online")

    def soak(self, minutes: float) -> None:
        self.machines.server()
        for name in self.project.clients:
            self.machines.client(name)
        self.say(f"{CLIENTS} clients online after {self.everybody():.0f} s; faults begin")
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end or self.faults.total() < FAULTS_A_MINUTE * minutes:
            self.tend()
            self.fault()
            gap = time.monotonic() + self.seconds(1, 7)
            while time.monotonic() < gap:
                self.tend()
                time.sleep(0.3)
        self.last()

    def end(self) -> list[str]:
        """Ends everything; what is left afterwards."""
        self.machines.end()
        gone = time.monotonic() + 20
        while processes_of(self.project.folder) and time.monotonic() < gone:
            time.sleep(0.2)
        return processes_of(self.project.folder)

    def summary(self, minutes: float, wrong: str) -> dict[str, Any]:
        server = self.project.server_folder
        return {
            "minutes": round(minutes, 1), "faults": self.faults.total(), "by kind": dict(self.faults),
            "runs": len(self.runs), "resumed": self.resumed, "server gave up": self.given_up,
            "accuracy": [round(known["accuracy"], 3) for known in self.runs],
            "took part": [round(known["took part"], 2) for known in self.runs],
            "scores as simulated": sum(known["rows"] for known in self.runs),
            "database MB": round(sum(file.stat().st_size for file in server.glob("superlink.db*")) / 1e6, 1),
            "wrong": wrong,
        }  # fmt: skip


def joined_late(folder: Path) -> dict[str, int]:
    """Who joined a run after its first round, and after which."""
    log = folder / "leader.log"
    found = re.findall(r"client '(.+)' joined after round (\d+)", log.read_text()) if log.is_file() else []
    return {name: int(round_) for name, round_ in found if int(round_) > 0}


def before_all(late: dict[str, int], row: dict[str, Any]) -> bool:
    """Whether a score is from before anybody joined late: in a simulation nobody does, and all have circles at once."""
    first = min(late.values(), default=ROUNDS)
    return bool(row["round"] < first or (row["round"] == first and row["client"] not in late))


def replay(method: str, seed: int, took: dict[int, set[str]]) -> dict[tuple[int, str, str, str], float]:
    """Every client's accuracies in a simulation in which these clients take part in each round."""
    torch.set_num_threads(1)  # as devices have: with more, products are added up in another order
    scenario = build("digits", clients=CLIENTS)
    numbers = {client.name: number for number, client in enumerate(scenario.clients)}
    training = scenario.training.but({"rounds": len(took)})
    readouts = make_readouts(DEFAULT_READOUTS)
    federation = Federation(scenario, make_method(method, {}), training, seed, "cpu", "sequential", readouts=readouts)
    chosen = {round_: tuple(sorted(numbers[name] for name in names)) for round_, names in took.items()}
    federation.sample_clients = lambda round_, *_: chosen[round_]  # type: ignore[method-assign]
    return {
        row_key(row): row["accuracy"]
        for _ in took
        for evaluation in federation.step().evaluations
        for row in evaluation.rows()
    }


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--minutes", type=float, default=30)
    words.add_argument("--keep", action="store_true", help="leave the federation's folder where it is")
    told = words.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a closed terminal ends what was typed there, also under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and Ctrl-C, also where all this is in the background
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder / "fed", told.seed)
    soak.say(f"seed {told.seed}, {told.minutes:g} minutes, in {folder}")
    wrong, start = "", time.monotonic()
    try:
        soak.soak(told.minutes)
    except (Exception, KeyboardInterrupt) as error:
        wrong = f"{type(error).__name__}: {error}"
    left = soak.end()
    wrong = wrong or (f"{len(left)} processes were left" if left else "")
    print(json.dumps(soak.summary((time.monotonic() - start) / 60, wrong), indent=1), flush=True)
    if not wrong and not told.keep:
        shutil.rmtree(folder)
    print("it held" if not wrong else f"it did not hold: {wrong}; see {folder}", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
