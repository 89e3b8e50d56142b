"""A client's machine: one SuperNode, restarted when it ends, until somebody ends us."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fedquilt.deploy.processes import Service, environment, free_port, program
from fedquilt.deploy.project import Node

FOLDER_VARIABLE, DATA_VARIABLE = "FEDQUILT_NODE_FOLDER", "FEDQUILT_NODE_DATA"


def start_node(node: Node, data: Path) -> Service:
    """Starts the client's SuperNode. Its port for its own processes is on the loopback address and a free one."""
    command = [program("flower-supernode"), "--superlink", f"{node.host}:{node.port}"]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    if node.tls:
        command += ["--root-certificates", str(node.folder / "ca.crt")]
    else:
        command += ["--insecure"]
    if node.authentication:
        command += ["--auth-supernode-private-key", str(node.folder / "node.key")]
    env = environment(node.folder / "flower") | {
        FOLDER_VARIABLE: str(node.folder),
        DATA_VARIABLE: str(data.resolve()),
        # Flower starts a process a message; one thread each is what a small device and a crowded one both want.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return Service.start(f"client '{node.name}'", command, node.folder / "node.log", env)


def keep_running(node: Node, data: Path, pause: float = 5.0) -> Iterator[Service]:
    """Starts the node again whenever it has ended, and yields each start.

    A node that was killed is refused until the server has noticed that it was gone (about a minute), so a few refusals
    in a row are normal.
    """
    while True:
        service = start_node(node, data)
        try:
            yield service
            while service.alive:
                time.sleep(0.5)
        finally:
            with contextlib.suppress(OSError):
                service.stop()
        time.sleep(pause)
