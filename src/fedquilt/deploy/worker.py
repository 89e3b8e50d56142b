"""A client's worker: the process on a device that has torch, the data and the model at hand, and answers letters.

Flower starts a new process for every message. That process (`relay`) only passes bytes on to the worker, over the
loopback address and with a key from a file that only its owner can read, so it imports neither torch nor the library.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from pathlib import Path

from fedquilt.deploy.keys import write_private
from fedquilt.deploy.relay import WORKER


def serve(folder: Path, handle: Callable[[bytes], bytes]) -> None:
    """Answers letters until the process is ended; one that fails is the business of `handle`."""
    key = secrets.token_bytes(32)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        place, part = folder / WORKER, folder / (WORKER + ".part")
        part.unlink(missing_ok=True)
        write_private(part, json.dumps({"port": listener.address[1], "key": key.hex(), "pid": os.getpid()}).encode())
        part.replace(place)
        while True:
            # A caller that gives up or does not know the key is no reason to end.
            with (
                contextlib.suppress(OSError, EOFError, ConnectionError, AuthenticationError),
                listener.accept() as caller,
            ):
                caller.send_bytes(handle(caller.recv_bytes()))


def main() -> None:
    """`python -m fedquilt.deploy.worker FOLDER DATA [--check]`: serve, or only see whether data and model are right."""
    folder, data = Path(sys.argv[1]), Path(sys.argv[2])
    if "--check" in sys.argv:
        sys.exit(check(folder, data))
    from fedquilt.deploy.device import Device

    serve(folder, Device(folder, data).handle)


def check(folder: Path, data: Path) -> str | None:
    """What is wrong with a client's data or model, as a sentence; None, and a line printed, when nothing is."""
    from fedquilt.deploy.node_client import load_client
    from fedquilt.deploy.project import Node

    try:
        client = load_client(Node.read(folder), data)
        client.model()
    except Exception as error:
        return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    print(f"client '{client.name}': {client.samples} training samples, labels {', '.join(map(str, client.labels))}")
    return None


if __name__ == "__main__":
    main()
