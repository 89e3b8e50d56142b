"""Somebody who holds the CA certificate, and only that, at the port the federation shows to the network."""

from __future__ import annotations

import hashlib
import shutil
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")
if shutil.which("nginx") is None:
    pytest.skip("nginx is not installed", allow_module_level=True)

import httpx
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, RegisterNodeFleetRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedquilt.deploy.ops.create import create
from fedquilt.deploy.ops.processes import free_port
from fedquilt.deploy.ops.sent_away import sent_away
from fedquilt.deploy.ops.server_processes import ServerSide
from fedquilt.deploy.ops.superlink import SuperLink
from fedquilt.deploy.project import Address, Project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSide]:
    project = create(
        tmp_path_factory.mktemp("gate") / "fed", ["a", "b"], "torch.nn:Linear", 2, Address(port=free_port())
    )
    with ServerSide(project) as running:
        yield running


def address(project: Project) -> tuple[str, bytes]:
    """What a stranger has: where the server is, and the certificate it may be known by."""
    return f"localhost:{project.server.port}", (project.client_folder("a") / "ca.crt").read_bytes()


def test_the_control_interface_is_not_there(server: ServerSide) -> None:
    where, certificate = address(server.project)
    _, public = generate_key_pairs()
    with ControlHttpClient.from_server_address(where, False, certificate, interceptors=[]) as stranger:
        for attempt in (
            lambda: stranger.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(public))),
            lambda: stranger.StartRun(StartRunRequest()),
            lambda: stranger.ListRuns(ListRunsRequest()),
        ):
            with pytest.raises(httpx.HTTPStatusError) as refusal:
                attempt()
            assert refusal.value.response.status_code == 404


def test_the_operator_reaches_it_on_the_server_machine(server: ServerSide) -> None:
    with SuperLink(server.project) as operator:
        assert sorted(operator.nodes()) == sorted(server.project.nodes())
        assert set(operator.nodes().values()) == {"registered"}


def test_other_accounts_of_the_machine_need_the_operators_secret(server: ServerSide) -> None:
    _, public = generate_key_pairs()
    inside, certificate = f"127.0.0.1:{server.inner_port}", (server.inner / "ca.crt").read_bytes()
    with ControlHttpClient.from_server_address(inside, False, certificate, interceptors=[]) as neighbour:
        for attempt in (
            lambda: neighbour.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(public))),
            lambda: neighbour.StartRun(StartRunRequest()),
            lambda: neighbour.ListRuns(ListRunsRequest()),
        ):
            with pytest.raises(httpx.HTTPStatusError) as refusal:
                attempt()
            assert refusal.value.response.status_code == 401
    for name in ("control.secret", "exec.secret", "superlink.db"):
        assert oct((server.project.server_folder / name).stat().st_mode)[-3:] == "600"


def test_an_unknown_key_neither_registers_nor_joins(server: ServerSide) -> None:
    where, certificate = address(server.project)
    private, public = generate_key_pairs()
    mine = public_key_to_bytes(public)
    signer = NodeAuthHttpInterceptor(private, public)
    with FleetHttpClient.from_server_address(where, False, certificate, interceptors=[signer]) as stranger:
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            stranger.RegisterNode(RegisterNodeFleetRequest(public_key=mine))
        assert refusal.value.response.status_code == 404
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            stranger.ActivateNode(ActivateNodeRequest(public_key=mine, heartbeat_interval=30))
        assert refusal.value.response.status_code in (400, 401, 403, 404, 409, 412)
        victim = next(iter(server.project.nodes()))
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            stranger.PullMessages(PullMessagesRequest(node=FlowerNode(node_id=victim)))
        assert refusal.value.response.status_code == 401
    with SuperLink(server.project) as operator:
        assert set(operator.nodes().values()) == {"registered"}
    shown = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    digest = b64encode(hashlib.sha256(b64decode(shown.split()[1])).digest()).decode().rstrip("=")
    (told,) = [line for line in sent_away(server.project) if digest in line]  # the operator can tell which key it was
    assert told.endswith("from 127.0.0.1, 2 requests")  # the first was for a path that is not there


def test_a_clients_public_key_alone_is_worth_nothing(server: ServerSide) -> None:
    where, certificate = address(server.project)
    private, _ = generate_key_pairs()
    known = load_ssh_public_key(server.project.public_key("a").read_bytes())
    signer = NodeAuthHttpInterceptor(private, known)  # type: ignore[arg-type]
    request = ActivateNodeRequest(public_key=public_key_to_bytes(known), heartbeat_interval=30)  # type: ignore[arg-type]
    with FleetHttpClient.from_server_address(where, False, certificate, interceptors=[signer]) as stranger:
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            stranger.ActivateNode(request)
        assert refusal.value.response.status_code == 401


def test_a_client_cannot_speak_for_another(server: ServerSide) -> None:
    where, certificate = address(server.project)
    numbers = {name: number for number, name in server.project.nodes().items()}
    private = load_ssh_private_key((server.project.client_folder("a") / "node.key").read_bytes(), password=None)
    signer = NodeAuthHttpInterceptor(private, private.public_key())  # type: ignore[arg-type]
    with FleetHttpClient.from_server_address(where, False, certificate, interceptors=[signer]) as client:
        client.PullMessages(PullMessagesRequest(node=FlowerNode(node_id=numbers["a"])))
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            client.PullMessages(PullMessagesRequest(node=FlowerNode(node_id=numbers["b"])))
        assert refusal.value.response.status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/docs",
        "/openapi.json",
        "/v1/control/start-run",
        "/v1/control/register-node",
        "//v1/control/start-run",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages/%2e%2e/%2e%2e/control/start-run",
        "/v1/fleet/pull-messages%2f..%2f..%2fcontrol%2fstart-run",
        "/v1/fleet/..;/control/start-run",
        "/V1/CONTROL/START-RUN",
        "/v1/runtime/acquire-task",
        "/v1/runtime/push-messages",
        "/v1/fleet/register-node",
        "https://localhost/v1/control/start-run",
    ],
)
def test_no_spelling_of_a_path_leads_behind_the_gate(server: ServerSide, path: str) -> None:
    log = server.project.server_folder / "logs" / "superlink.log"
    before = log.read_text(errors="replace").count("/v1/control/start-run")
    assert raw_request(server.project, "POST", path) in (400, 404)
    assert log.read_text(errors="replace").count("/v1/control/start-run") == before


def test_only_posts_reach_a_fleet_path(server: ServerSide) -> None:
    assert raw_request(server.project, "GET", "/v1/fleet/pull-messages") == 403
    assert raw_request(server.project, "POST", "/v1/fleet/pull-messages") in (400, 401, 415, 422)


def test_superlink_listens_on_the_loopback_address_alone(server: ServerSide) -> None:
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("needs Linux")
    local = [line.split()[1] for line in table.read_text().splitlines()[1:] if line.split()[3] == "0A"]
    assert f"0100007F:{server.inner_port:04X}" in local
    everywhere = [entry for entry in local if entry.endswith(f":{server.inner_port:04X}")]
    assert everywhere == [f"0100007F:{server.inner_port:04X}"]


def test_plain_http_and_unknown_authorities_are_refused(server: ServerSide) -> None:
    where, _ = address(server.project)
    assert httpx.post(f"http://{where}/v1/fleet/pull-messages").status_code == 400
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"https://{where}/v1/fleet/pull-messages")


def signed_at(server: ServerSide, seconds: float) -> httpx.Response:
    """What a client is told whose clock is that many seconds ahead."""
    where, certificate = address(server.project)
    private = load_ssh_private_key((server.project.client_folder("a") / "node.key").read_bytes(), password=None)
    public = public_key_to_bytes(private.public_key())  # type: ignore[arg-type]
    stamp = (now() + timedelta(seconds=seconds)).isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        TIMESTAMP_HEADER: stamp,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(private, stamp.encode())).decode(),  # type: ignore[arg-type]
        "content-type": "application/protobuf",
    }
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=30)
    context = ssl.create_default_context(cadata=certificate.decode())
    return httpx.post(
        f"https://{where}/v1/fleet/activate-node", headers=headers, content=request.SerializeToString(), verify=context
    )


@pytest.mark.parametrize("seconds", [-365 * 86400, -400, 90], ids=["a year ago", "long ago", "ahead"])
def test_a_stale_signature_is_refused(server: ServerSide, seconds: float) -> None:
    answer = signed_at(server, seconds)
    assert answer.status_code == 401
    assert "the device's clock is" in answer.text


def raw_request(project: Project, method: str, path: str) -> int:
    """The status of a request whose path is sent exactly as written."""
    context = ssl.create_default_context(cafile=str(project.client_folder("a") / "ca.crt"))
    with (
        socket.create_connection(("localhost", project.server.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        secure.sendall(head.encode())
        return int(secure.recv(4096).split()[1])


@pytest.mark.parametrize("seconds", [45, -240], ids=["a little ahead", "behind"])
def test_a_clock_that_is_a_little_off_is_borne_by_flower_too(server: ServerSide, seconds: float) -> None:
    """At the end: afterwards the client counts as being there. Flower itself bears fewer seconds."""
    assert signed_at(server, seconds).status_code in (200, 412)  # let in, or there already
