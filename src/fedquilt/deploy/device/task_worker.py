"""A client's worker: the process on a device that has torch, the data and the model at hand, and runs the ClientApp.

By itself Flower starts a new Python process for every message, in which it runs the app that the server sent: two or
three seconds of imports each time, and whatever code the server likes. Here SuperNode is told that apps are run by
somebody else (`--isolation process`), and that is this process: it takes each task as it comes and answers it with the
library that is installed on the device. What the server sent along as an app is not looked at.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

if TYPE_CHECKING:
    from fedquilt.client import Client

_POLL = 0.2
_ARRIVAL = 30.0  # seconds until the worker looks for other tasks while a message is still arriving
_PROTECTED = ("/flwr.proto.Runtime/AcquireTask",)


def serve(address: str, secret: bytes, app: ClientApp) -> None:
    """Takes tasks from the SuperNode at a loopback address, and answers them, until the process is ended."""
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_PROTECTED)
    silent = False
    with RuntimeHttpClient.from_server_address(address, True, None, [version, signed]) as client:
        while True:
            try:
                task = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
                silent = False
                if task.token:
                    answer_or_leave(address, task.token, app)
                    continue
            except (httpx.HTTPError, OSError, RuntimeError) as error:
                if not silent:
                    print(f"SuperNode does not answer ({type(error).__name__}); trying on", file=sys.stderr, flush=True)
                silent = True
            time.sleep(_POLL)


def answer_or_leave(address: str, token: str, app: ClientApp) -> None:
    """Answers a task. One whose message does not arrive is left behind: a server that died while it sent it never will
    complete it, and Flower would wait for two hours."""
    arrived = threading.Event()
    thread = threading.Thread(target=_answer_quietly, args=(address, token, app, arrived), daemon=True)
    thread.start()
    end = time.monotonic() + _ARRIVAL
    while thread.is_alive() and (arrived.is_set() or time.monotonic() < end):
        thread.join(0.05)


def _answer_quietly(address: str, token: str, app: ClientApp, arrived: threading.Event) -> None:
    """A thread's work: what goes wrong with one task is no reason to end, and no text for the server."""
    try:
        answer(address, token, app, arrived)
    except Exception as error:
        print(f"a task came to nothing ({type(error).__name__})", file=sys.stderr, flush=True)


def answer(address: str, token: str, app: ClientApp, arrived: threading.Event) -> None:
    """One task: its message, the app's answer, and its end."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    known = RuntimeTokenHttpInterceptor(token)
    with RuntimeHttpClient.from_server_address(address, True, None, [version, known]) as client, heartbeat(client):
        message, context, _, _ = pull_task_input(client)
        arrived.set()
        push_message(client, app(message=message, context=context), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")


@contextmanager
def heartbeat(client: RuntimeHttpClient) -> Iterator[None]:
    """Tells SuperNode, while the task lasts, that somebody is working on it."""
    sender = HeartbeatSender(make_task_heartbeat_fn_http(client))
    sender.start()
    try:
        yield
    finally:
        if sender.is_running:
            sender.stop()


def check_client(client: Client, classes: int) -> None:
    """Refuses labels that the federation does not have, and a model that does not go with the samples."""
    import torch

    from fedquilt.engines.check_models import check_model
    from fedquilt.families.kinds import Kinds, families
    from fedquilt.families.units import cut

    if classes and max(client.labels) >= classes:
        raise ValueError(
            f"client '{client.name}' has label {max(client.labels)}, but the labels of this federation go from 0 to "
            f"{classes - 1}; look for a slip in its data file"
        )
    family = families({0: Kinds().of(client.model(), cut, client.train)})[0]
    check_model(family, [client], classes or 10**9, torch.device("cpu"))


def check(folder: Path, data: Path) -> str | None:
    """What is wrong with a client's data or model, as a sentence; None, and a line printed, when nothing is."""
    from fedquilt.deploy.device.client_folder import allowed_methods, load_client
    from fedquilt.deploy.project import Node

    try:
        node = Node.read(folder)
        client = load_client(node, data)
        check_client(client, node.classes)
        allowed_methods(node)
    except Exception as error:
        return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    print(f"client '{client.name}': {client.samples} training samples, labels {', '.join(map(str, client.labels))}")
    return None


def main() -> None:
    """`python -m fedquilt.deploy.device.task_worker FOLDER DATA ADDRESS`; with `--check` it only checks."""
    folder, data, address = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if address == "--check":
        sys.exit(check(folder, data))
    from fedquilt.deploy.device.app import make_app
    from fedquilt.deploy.device.device import Device

    serve(address, (folder / "runtime.secret").read_bytes(), make_app(Device(folder, data).handle))


if __name__ == "__main__":
    main()
