"""Where a deployed round's seconds go: `python benchmarks/deployed_round.py --clients 8` on one machine.

A federation of digits' clients over real processes, nginx and TLS. For the rounds after the first two, when everything
is warm, it prints the median seconds from one round to the next, of which the exchange of letters is a part, and the
processor time that each kind of process takes in a round. `--together` runs all clients in one process, as a site with
many devices would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
FEDQUILT = [sys.executable, "-m", "fedquilt", "deploy"]


def processes() -> dict[int, tuple[int, str, float, int]]:
    """Every process: its parent, command, processor seconds so far, and private memory in KiB."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            stat = (place / "stat").read_text().rpartition(")")[2].split()
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            rollup = (place / "smaps_rollup").read_text()
        except OSError:
            continue
        memory = next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
        found[int(place.name)] = (int(stat[1]), words, (int(stat[11]) + int(stat[12])) / TICK, memory)
    return found


def kind(words: str) -> str:
    """What a process of the federation is."""
    for mark, name in (("deploy.device.node", "clients"), ("server.door", "Flower's server"), ("nginx", "gate"),
                       ("serverapp", "leader"), ("superexec", "starter of leaders")):  # fmt: skip
        if mark in words:
            return name
    return "watchers"


def taken(roots: list[int]) -> tuple[dict[str, float], dict[str, int]]:
    """Processor seconds and memory by kind, of some processes and all that they started."""
    known, mine = processes(), set(roots)
    while more := {pid for pid, (parent, *_) in known.items() if parent in mine and pid not in mine}:
        mine |= more
    seconds, memory = dict[str, float](), dict[str, int]()
    for pid in mine & known.keys():
        _, words, used, size = known[pid]
        seconds[kind(words)] = seconds.get(kind(words), 0.0) + used
        memory[kind(words)] = memory.get(kind(words), 0) + size
    return seconds, memory


def rounds_done(folder: Path) -> int:
    """How many rounds the only run of a federation has completed."""
    found = list(folder.glob("runs/*/status.json"))
    return int(json.loads(found[0].read_text()).get("round", 0)) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--together", action="store_true", help="all clients in one process")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then, too
    with tempfile.TemporaryDirectory() as place:
        folder, started = Path(place) / "fed", list[subprocess.Popen[bytes]]()
        init = ["--scenario", "digits", "--set", f"clients={told.clients}", "--port", "0"]
        subprocess.run([*FEDQUILT, "init", str(folder), *init], check=True, stdout=subprocess.DEVNULL)
        homes = [str(home) for home in sorted((folder / "clients").iterdir())]
        groups = [homes] if told.together else [[home] for home in homes]
        try:
            for words in (["server", str(folder)], *(["client", *group] for group in groups)):
                started.append(subprocess.Popen([*FEDQUILT, *words], stdout=subprocess.DEVNULL))
            while told.clients > _online(folder):
                time.sleep(1)
            run = [*FEDQUILT, "run", "digits", told.method, "--dir", str(folder), "--rounds", str(told.rounds)]
            started.append(subprocess.Popen(run, stdout=subprocess.DEVNULL))
            _measure(folder, told.rounds, [process.pid for process in started[:-1]], told.clients)
            started[-1].wait(300)
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(60)


def _online(folder: Path) -> int:
    told = subprocess.run([*FEDQUILT, "status", "--dir", str(folder)], capture_output=True, text=True, check=True)
    return told.stdout.count(" online")


def _requests(folder: Path) -> Counter[str]:
    """How often clients asked the server for what, so far, and the bytes each way."""
    lines = [line.split() for line in (folder / "server" / "nginx" / "access.log").read_text().splitlines()]
    found = Counter(words[2].rpartition("/")[2] for words in lines)
    for number, way in ((3, "bytes up"), (4, "bytes down")):
        found[way] = sum(int(words[number]) for words in lines)
    return found


def _measure(folder: Path, rounds: int, roots: list[int], clients: int) -> None:
    times, at = dict[int, float](), list[tuple[int, dict[str, float]]]()
    memory, asked = dict[str, int](), list[Counter[str]]()
    while (done := rounds_done(folder)) < rounds:
        if done not in times:
            times[done] = time.monotonic()
            if done >= 2:
                seconds, memory = taken(roots)
                at.append((done, seconds))
                asked.append(_requests(folder))
        time.sleep(0.02)
    warm = sorted(done for done in times if done >= 2)
    (run,) = folder.glob("runs/*")
    letters = [json.loads(line) for line in (run / "letters.jsonl").read_text().splitlines()]
    exchanges = [line["seconds"] for line in letters if line["what"] == "round"][2:]
    between = [times[b] - times[a] for a, b in itertools.pairwise(warm) if b == a + 1]
    (first, before), (last, after) = at[0], at[-1]
    print(f"{clients} clients, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"from round to round  {statistics.median(between):.2f} s (median), least {min(between):.2f}")
    print(f"exchange of letters  {statistics.median(exchanges):.2f} s (median), least {min(exchanges):.2f}")
    for name in sorted(after, key=lambda name: before.get(name, 0.0) - after[name]):
        used = (after[name] - before.get(name, 0.0)) / (last - first)
        print(f"processor in a round, {name:<18} {used:.2f} s; memory {memory[name] / 1024:.0f} MiB (PSS)")
    for path, count in (asked[-1] - asked[0]).most_common():
        print(f"at the gate in a round, {path:<26} {count / (last - first):.1f}")
    told = {way: sum(sum(line[way].values()) for line in letters[2:]) for way in ("bytes_up", "bytes_down")}
    print(
        "bytes of messages in a round: "
        + ", ".join(f"{way} {count / len(letters[2:]):.0f}" for way, count in told.items())
    )


if __name__ == "__main__":
    main()
