"""What can be taken from a server by sending: memory, connections, time, and the disk under its database.

Each test says what is seen where the protection it is about is taken away, as it was measured then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
if shutil.which("nginx") is None:
    pytest.skip("nginx is not installed", allow_module_level=True)

import httpx
from flwr.app import ConfigRecord
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.auth import create_superexec_auth_metadata, derive_auth_secret
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from test_deploy_layers import end_of, headers, post, trusting

from fedquilt.deploy.ops.create import create
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.server_processes import ServerSide
from fedquilt.deploy.project import Address

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("limits"),
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux"),
]
MB = 1 << 20
PROTOBUF = {"content-type": "application/protobuf"}
CLIENTS = list("abcdefghijklmnopq")
EMPTY = b"\x12\x00" * (32 << 10)  # 64 KiB of messages without anything in them: unpacked they are thirty times as much


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSide]:
    folder = tmp_path_factory.mktemp("limits") / "fed"
    with ServerSide(create(folder, CLIENTS, "torch.nn:Linear", 2, Address(port=free_port()))) as running:
        yield running


@pytest.fixture(params=["gate", "loopback"])
def way(request: pytest.FixtureRequest, server: ServerSide) -> Callable[[], ssl.SSLSocket]:
    """A new connection: as the network has it, and past nginx, as other accounts of the server's machine have it."""
    if request.param == "gate":
        return lambda: connected(server.project.server.port, trusting(server.project))
    inside = ssl.create_default_context(cafile=str(server.inner / "ca.crt"))
    return lambda: connected(server.inner_port, inside)


def connected(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10), server_hostname="localhost")


def memory(server: ServerSide) -> int:
    """Bytes of SuperLink and nginx together, shared pages counted once."""
    groups, total = {server.services[name].process.pid for name in ("superlink", "gate")}, 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) in groups:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def head(path: str, length: int, shown: dict[str, str] | None = None) -> bytes:
    """The beginning of a request, up to its body."""
    lines = [f"{key}: {value}" for key, value in (shown or {}).items()]
    first = [f"POST /v1/fleet/{path} HTTP/1.1", "Host: localhost", *lines, f"Content-Length: {length}"]
    return "\r\n".join([*first, "", ""]).encode()


def question(server: ServerSide, name: str) -> bytes:
    number = next(number for number, known in server.project.nodes().items() if known == name)
    content: bytes = PullMessagesRequest(node=FlowerNode(node_id=number)).SerializeToString()
    return content


def is_answered(server: ServerSide, name: str = "a", patience: float = 5.0) -> bool:
    """Whether a registered client is heard within seconds, whatever else goes on."""
    start = time.monotonic()
    answer = post(server.project, "pull-messages", question(server, name), headers(server.project, name))
    return answer.status_code == 200 and time.monotonic() - start < patience


def test_unfinished_uploads_of_strangers_take_no_memory(server: ServerSide, way: Callable[[], ssl.SSLSocket]) -> None:
    """Sixty of 7 MB each, none of which ends."""
    assert is_answered(server)
    before = most = memory(server)
    crowd, piece = [way() for _ in range(60)], b"x" * (MB // 4)
    for one in crowd:
        one.sendall(head("push-object", 7 * MB + 1, PROTOBUF))
    for _ in range(28):
        for one in list(crowd):
            try:
                one.sendall(piece)
            except OSError:  # sent away
                one.close()
                crowd.remove(one)
        most = max(most, memory(server))
    assert is_answered(server)
    for one in crowd:
        one.close()
    assert most < before + 60 * MB


@pytest.mark.parametrize("who", ["stranger", "client"])
def test_one_large_request_is_refused_unread(server: ServerSide, way: Callable[[], ssl.SSLSocket], who: str) -> None:
    """60 MB of empty messages."""
    assert is_answered(server)
    before = memory(server)
    shown = headers(server.project, "b") if who == "client" else PROTOBUF
    first = head("push-messages", 60 * MB, shown)
    with way() as one:
        sender = threading.Thread(target=send_all, args=(one, first))
        sender.start()
        assert is_answered(server)
        most = memory(server)
        sender.join(60)
    assert max(most, memory(server)) < before + 60 * MB
    assert is_answered(server)
    with way() as one:
        one.sendall(first)
        answer = one.recv(4096)  # before there is a body
    assert int(answer.split()[1]) in ((413,) if who == "client" else (401, 413))


def send_all(connection: socket.socket, first: bytes) -> None:
    """Sends a request with its body, as far as that is let happen, and waits for an answer."""
    with contextlib.suppress(OSError):
        connection.sendall(first)
        for _ in range(60 * MB // len(EMPTY)):
            connection.sendall(EMPTY)
        end_of(connection)


@pytest.mark.parametrize("path", ["push-messages", "pull-messages"])
def test_a_registered_client_cannot_take_memory_by_questions(server: ServerSide, path: str) -> None:
    """As large as what a piece of an array may be."""
    assert is_answered(server)
    before = memory(server)
    told = [post(server.project, path, EMPTY * 128, headers(server.project, "b")).status_code for _ in range(6)]
    assert memory(server) < before + 60 * MB
    assert told == [413] * 6
    assert is_answered(server)


def test_withheld_headers_are_given_up(server: ServerSide) -> None:
    """Three hundred connections that send half of a request's head."""
    context = trusting(server.project)
    crowd, start = [connected(server.project.server.port, context) for _ in range(300)], time.monotonic()
    for one in crowd:
        one.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: localhost\r\nX-A: b")
    assert is_answered(server)
    for one in crowd:
        one.settimeout(20)
        assert end_of(one) == b""  # raises TimeoutError where it is still open
        one.close()
    assert time.monotonic() - start < 20
    assert is_answered(server)


def test_connections_are_counted_by_client_and_by_address(server: ServerSide) -> None:
    """Uploads that do not end, by keys that are registered: sixteen of a client, 256 of an address."""
    project, context = server.project, trusting(server.project)
    crowd: dict[str, list[ssl.SSLSocket]] = {}
    for name in CLIENTS[:-1]:
        first = head("push-object", 4000, headers(project, name)) + b"x"
        crowd[name] = [connected(project.server.port, context) for _ in range(16)]
        for one in crowd[name]:
            one.sendall(first)
        if name == CLIENTS[0]:
            assert wait(lambda: status(server, CLIENTS[0]) == 503)  # it has its sixteen
            assert is_answered(server, CLIENTS[1])  # the others of its site have theirs
    assert wait(lambda: status(server, CLIENTS[-1]) == 503)  # the address has its 256
    assert status(server, CLIENTS[-1], "127.0.0.2") == 200  # another has its own
    for ones in crowd.values():
        for one in ones:
            one.close()
    assert wait(lambda: all(status(server, name) == 200 for name in CLIENTS))


def status(server: ServerSide, name: str, address: str = "127.0.0.1") -> int:
    """What a client's question is answered with that comes from an address of this machine."""
    line = httpx.HTTPTransport(verify=trusting(server.project), local_address=address)
    with httpx.Client(transport=line, timeout=10) as client:
        where = f"https://localhost:{server.project.server.port}/v1/fleet/pull-messages"
        shown = headers(server.project, name)
        return client.post(where, headers=shown, content=question(server, name)).status_code


def wait(ready: Callable[[], bool], patience: float = 5.0) -> bool:
    end = time.monotonic() + patience
    while not ready() and time.monotonic() < end:
        time.sleep(0.05)
    return ready()


def test_what_leaders_of_runs_ask_needs_their_secrets(server: ServerSide) -> None:
    """On the loopback port, where every account of the machine can knock: each path that Flower's server has there."""
    inside = ssl.create_default_context(cafile=str(server.inner / "ca.crt"))
    requests = {path: kind() for (_, path), kind in PROTOBUF_REQUEST_TYPES.items() if path.startswith("/v1/runtime/")}
    assert {"/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/v1/runtime/create-task"} < set(requests)
    acquire = AcquireTaskRequest()

    def signed(secret: bytes) -> dict[str, str]:
        return create_superexec_auth_metadata(
            auth_secret=derive_auth_secret(secret), method="/flwr.proto.Runtime/AcquireTask", request=acquire
        )

    with httpx.Client(base_url=f"https://127.0.0.1:{server.inner_port}", verify=inside) as neighbour:

        def told(path: str, message: Any, shown: dict[str, str]) -> int:
            return neighbour.post(path, content=message.SerializeToString(), headers=PROTOBUF | shown).status_code

        for path, message in requests.items():
            for shown in ({}, {TASK_TOKEN_HEADER: ""}, {TASK_TOKEN_HEADER: "a" * 64}, signed(b"guess")):
                assert told(path, message, shown) == 401, path
        asked = {"model": "m", "input": "i"}
        assert neighbour.post("/v1/runtime/responses", json=asked).status_code == 401
        secret = (server.project.server_folder / "exec.secret").read_bytes()
        assert told("/v1/runtime/acquire-task", acquire, signed(secret)) == 200  # whoever has it is heard


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # of what Flower's store is made with
def test_the_database_gives_back_what_was_deleted(server: ServerSide) -> None:
    """Stored and deleted by Flower's own store, beside the server that has the database open."""
    file = server.project.server_folder / "superlink.db"

    def size() -> int:
        return sum(part.stat().st_size for part in file.parent.glob("superlink.db*"))

    def keep(run: int) -> None:
        content = ConfigRecord({"bytes": os.urandom(4 * MB)}).deflate()
        name = hashlib.sha256(content).hexdigest()
        store.preregister(run, ObjectTree(object_id=name))
        store.put(name, content)

    before, store = size(), SqlObjectStore(f"sqlite:///{file}")
    store.initialize()
    for _ in range(10):
        keep(7)
    assert size() > before + 35 * MB
    store.delete_objects_in_run(7)
    keep(8)  # SQLite cuts the file when its log has some thousand pages, so with the next message
    assert is_answered(server)
    assert size() < before + 15 * MB
