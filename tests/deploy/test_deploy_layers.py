"""Rubbish at each layer of a federation's door, TLS, nginx and Flower: it ends where it came, and the next comes in."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
if shutil.which("nginx") is None:
    pytest.skip("nginx is not installed", allow_module_level=True)

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedquilt.deploy.ops.create import create
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.server_processes import ServerSide
from fedquilt.deploy.ops.superlink import SuperLink
from fedquilt.deploy.project import Address, Project

pytestmark = pytest.mark.slow
HELLO = bytes.fromhex("16030100")  # a TLS record that promises more
POST = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\n"
INNER = b"POST /v1/control/start-run HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSide]:
    folder = tmp_path_factory.mktemp("layers") / "fed"
    with ServerSide(create(folder, ["a", "b"], "torch.nn:Linear", 2, Address(port=free_port()))) as running:
        yield running


def plain(project: Project) -> socket.socket:
    return socket.create_connection(("localhost", project.server.port), timeout=10)


def trusting(project: Project) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=(project.client_folder("a") / "ca.crt").read_text())


def secured(project: Project) -> ssl.SSLSocket:
    return trusting(project).wrap_socket(plain(project), server_hostname="localhost")


def end_of(connection: socket.socket) -> bytes:
    """What is answered before the connection is closed by the other side."""
    answered = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := connection.recv(65536):
            answered += part
    return answered


def headers(project: Project, name: str = "a") -> dict[str, str]:
    """Those of a registered client's own request."""
    key: Any = load_ssh_private_key((project.client_folder(name) / "node.key").read_bytes(), password=None)
    stamp = now().isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        TIMESTAMP_HEADER: stamp,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, stamp.encode())).decode(),
        "content-type": "application/protobuf",
    }


def post(project: Project, path: str, content: bytes, shown: dict[str, str] | None = None) -> httpx.Response:
    where = f"https://localhost:{project.server.port}/v1/fleet/{path}"
    return httpx.post(where, headers=shown or headers(project), content=content, verify=trusting(project), timeout=20)


def public_key(project: Project, name: str) -> bytes:
    key: Any = load_ssh_private_key((project.client_folder(name) / "node.key").read_bytes(), password=None)
    return public_key_to_bytes(key.public_key())


def comes_in(project: Project) -> bool:
    """Whether the registered client is heard as if nothing had been."""
    number = next(number for number, name in project.nodes().items() if name == "a")
    request = PullMessagesRequest(node=FlowerNode(node_id=number))
    return post(project, "pull-messages", request.SerializeToString()).status_code == 200


def log(server: ServerSide) -> str:
    return (server.project.server_folder / "logs" / "superlink.log").read_text(errors="replace")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 64,
        b"GET / HTTP/1.1\r\n\r\n\xff\xfe" * 9,
        HELLO + b"\x7f" + b"\x01" * 20,  # a hello that is cut short
        HELLO + b"\x20" + b"\xee" * 4096,  # and one that is none
        bytes.fromhex("1503010002022a"),  # an alert at once
    ],
    ids=["zeros", "http", "cut", "noise", "alert"],
)
def test_tls_that_is_none_ends_with_its_connection(server: ServerSide, sent: bytes) -> None:
    before = log(server).count("\n")
    with plain(server.project) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        answered = end_of(stranger)
    assert len(answered) < 1000
    assert b" 200 " not in answered
    assert log(server).count("\n") == before  # nothing came further than nginx
    assert comes_in(server.project)


def test_an_old_tls_is_refused(server: ServerSide) -> None:
    context = trusting(server.project)
    context.set_ciphers("ALL:@SECLEVEL=0")  # on this side it is allowed
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with plain(server.project) as connection, pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        context.wrap_socket(connection, server_hostname="localhost")
    assert comes_in(server.project)


@pytest.mark.parametrize(
    ("request_", "codes"),
    [
        (b"\x00\x01\x02\x03\r\n\r\n", (400,)),
        (b"POST /v1/fleet/pull-messages\r\n\r\n", (400,)),  # no version
        (POST + b"Content-Length: -1\r\n\r\n", (400,)),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", (400,)),
        # two lengths: what one server takes for a body, another takes for a second request
        (POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + INNER, (400, 401)),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", (400, 401)),
        (POST + b"x-a: " + b"y" * 100_000 + b"\r\n\r\n", (400, 414, 431)),
        (POST + b"x: y\r\n" * 5000 + b"\r\n", (400, 401, 431)),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 40, (400, 405, 505)),
    ],
    ids=["noise", "version", "negative", "lengths", "smuggled", "chunks", "header", "headers", "http2"],
)  # fmt: skip
def test_http_that_is_none_is_answered_by_nginx(server: ServerSide, request_: bytes, codes: tuple[int, ...]) -> None:
    before = log(server).count("start-run")
    with secured(server.project) as stranger:
        with contextlib.suppress(OSError):  # it may be sent away in the middle
            stranger.sendall(request_)
        answered = end_of(stranger)
    found = [int(line.split()[1]) for line in answered.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert all(code in codes for code in found), answered[:200]
    assert log(server).count("start-run") == before
    assert comes_in(server.project)


def test_a_body_that_stops_in_the_middle_is_given_up(server: ServerSide) -> None:
    """Of a registered client: the rest of its upload never comes."""
    lines = [f"{key}: {value}" for key, value in headers(server.project).items()]
    head = ["POST /v1/fleet/push-object HTTP/1.1", "Host: localhost", *lines, "Content-Length: 4000", "", ""]
    with secured(server.project) as client:
        client.sendall("\r\n".join(head).encode() + b"x" * 100)
        client.settimeout(5)
    assert comes_in(server.project)


PATHS = [
    "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat", "pull-messages", "push-messages",
    "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"", b"\x08\x01" * 3000],
    ids=["noise", "endless", "empty", "numbers"],
)
def test_what_is_no_message_of_flowers_is_refused_though_it_is_signed(
    server: ServerSide, path: str, content: bytes
) -> None:
    answer = post(server.project, path, content)
    assert answer.status_code in (200, 400, 401, 403, 404, 409, 412, 413, 422, 503), answer.text[:200]
    assert "Traceback" not in answer.text
    assert str(Path.home()) not in answer.text
    assert comes_in(server.project)


def test_a_copied_key_cannot_be_there_twice(server: ServerSide) -> None:
    """The second one with a key is refused for as long as the first one is there, and comes in after it."""
    request = ActivateNodeRequest(public_key=public_key(server.project, "b"), heartbeat_interval=30).SerializeToString()
    shown = headers(server.project, "b")
    first = post(server.project, "activate-node", request, shown)
    assert first.status_code == 200
    assert post(server.project, "activate-node", request, headers(server.project, "b")).status_code == 412
    assert post(server.project, "activate-node", request, shown).status_code == 412  # the same request, sent again
    with SuperLink(server.project) as operator:
        assert sorted(operator.nodes().values()) == ["online", "registered"]
    number = next(number for number, name in server.project.nodes().items() if name == "b")
    left = DeactivateNodeRequest(node_id=number).SerializeToString()
    assert (
        post(server.project, "deactivate-node", left, headers(server.project, "a")).status_code == 401
    )  # not by another
    assert post(server.project, "deactivate-node", left, headers(server.project, "b")).status_code == 200
    assert post(server.project, "activate-node", request, headers(server.project, "b")).status_code == 200
