"""A client's machine: its worker and its SuperNode, started again when one of them ends, until somebody ends us."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedquilt.deploy.ops.keys import write_private
from fedquilt.deploy.ops.processes import Service, environment, free_port
from fedquilt.deploy.project import Node

BEAT, WHY = "node.beat", "node.why"  # files by which a node's process says how it is
_LONGEST_PAUSE = 240.0  # seconds
_HUNG = 300.0  # seconds without a beat after which a node is ended from outside


@dataclass
class NodeProcesses:
    """The two processes of a client."""

    worker: Service
    supernode: Service

    @property
    def alive(self) -> bool:
        """Whether both run."""
        return self.worker.alive and self.supernode.alive

    def stop(self) -> None:
        """Ends both, the node first, which says goodbye to the server."""
        self.supernode.stop()
        self.worker.stop()

    def kill(self) -> None:
        """Ends both at once, as a power cut would."""
        self.supernode.kill()
        self.worker.kill()


def start_node(node: Node, data: Path) -> NodeProcesses:
    """Starts a client. All that its two processes say to each other stays on the loopback address, and a secret in a
    file that only its owner can read keeps other processes of the device out."""
    port = free_port()
    secret = node.folder / "runtime.secret"
    secret.unlink(missing_ok=True)
    write_private(secret, secrets.token_bytes(32))
    command = [sys.executable, "-m", "fedquilt.deploy.device.node", str(node.folder)]
    command += ["--superlink", f"{node.host}:{node.port}"]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if node.tls:
        command += ["--root-certificates", str(node.folder / "ca.crt")]
    else:
        command += ["--insecure"]
    if node.authentication:
        command += ["--auth-supernode-private-key", str(node.folder / "node.key")]
    env = environment(node.folder / "flower")
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    log = node.folder / "node.log"
    work = [
        sys.executable,
        "-m",
        "fedquilt.deploy.device.task_worker",
        str(node.folder),
        str(data.resolve()),
        f"127.0.0.1:{port}",
    ]
    worker = Service.start(f"worker of client '{node.name}'", work, log, env)
    return NodeProcesses(worker, Service.start(f"client '{node.name}'", command, log, env))


def check(node: Node, data: Path) -> str:
    """One line about the client, or what is wrong with its data or model as an error.

    It is found out in a process of its own, so that the one that watches over the client stays small.
    """
    command = [
        sys.executable,
        "-m",
        "fedquilt.deploy.device.task_worker",
        str(node.folder),
        str(data.resolve()),
        "--check",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["the client cannot be started"]
        raise ValueError(said[-1])
    return done.stdout.strip()


@dataclass
class Care:
    """What happens to a client: a sentence for each thing that its owner should know."""

    node: Node
    data: Path
    pause: float = 5.0
    processes: NodeProcesses | None = None

    def keep_running(self) -> Iterator[str]:
        """Starts the client again whenever one of its processes has ended or does nothing any more, and says so.

        A node that was killed is refused until the server has noticed that it was gone (about a minute), so a few
        refusals in a row are normal. The pauses grow to some minutes, and are short again once the server was reached.
        """
        pause = self.pause
        while True:
            (self.node.folder / BEAT).unlink(missing_ok=True)
            self.processes = start_node(self.node, self.data)
            try:
                yield "started"
                yield from self._watch(self.processes)
                pause = self.pause if (self.node.folder / BEAT).exists() else min(2 * pause, _LONGEST_PAUSE)
            finally:
                self.processes.stop()
            yield f"{self._why() or 'one of its processes ended; node.log says why'}; trying again in {pause:.0f} s"
            time.sleep(pause)

    def _watch(self, processes: NodeProcesses) -> Iterator[str]:
        """Until a process ends or does nothing any more: that the server is there, and why it is not."""
        start, known, there = time.time(), "", False
        while processes.alive:
            beat = self.node.folder / BEAT
            last = beat.stat().st_mtime if beat.exists() else start
            why = self._why()
            if why and why != known:
                yield why
            if beat.exists() and not why and (known or not there):
                yield "the server is there"
                there = True
            known = why
            if time.time() - last > _HUNG and not why:
                return
            time.sleep(0.5)

    def _why(self) -> str:
        path = self.node.folder / WHY
        try:
            return path.read_text()
        except FileNotFoundError:
            return ""
