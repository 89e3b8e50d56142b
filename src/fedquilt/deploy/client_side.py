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

from fedquilt.deploy.keys import write_private
from fedquilt.deploy.processes import Service, environment, free_port, program
from fedquilt.deploy.project import Node


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
    command = [program("flower-supernode"), "--superlink", f"{node.host}:{node.port}"]
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
    work = [sys.executable, "-m", "fedquilt.deploy.worker", str(node.folder), str(data.resolve()), f"127.0.0.1:{port}"]
    worker = Service.start(f"worker of client '{node.name}'", work, log, env)
    return NodeProcesses(worker, Service.start(f"client '{node.name}'", command, log, env))


def check(node: Node, data: Path) -> str:
    """One line about the client, or what is wrong with its data or model as an error.

    It is found out in a process of its own, so that the one that watches over the client stays small.
    """
    command = [sys.executable, "-m", "fedquilt.deploy.worker", str(node.folder), str(data.resolve()), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["the client cannot be started"]
        raise ValueError(said[-1])
    return done.stdout.strip()


def keep_running(node: Node, data: Path, pause: float = 5.0) -> Iterator[NodeProcesses]:
    """Starts the client again whenever one of its processes has ended, and yields each start.

    A node that was killed is refused until the server has noticed that it was gone (about a minute), so a few refusals
    in a row are normal.
    """
    while True:
        processes = start_node(node, data)
        try:
            yield processes
            while processes.alive:
                time.sleep(0.5)
        finally:
            processes.stop()
        time.sleep(pause)
