"""What a client's device asks of the server, over Flower's fleet interface: to be let in, for letters, to take answers.

Flower's own node leaves its loop at any answer that it does not know, sleeps three seconds between two questions, and
has the work done by further processes. Here are its requests alone; what becomes of a failure is the caller's affair
(`node.py`), and `reason` says it in a sentence for the device's owner.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
import uuid
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.supercore.constant import (
    FLWR_COMPONENT_NAME_METADATA_KEY,
    FLWR_PACKAGE_NAME_METADATA_KEY,
    FLWR_PACKAGE_VERSION_METADATA_KEY,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.version import package_name, package_version
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedquilt._util.files import write_text
from fedquilt.deploy.project import UNKNOWN_KEY, Node
from fedquilt.deploy.transport.flower_records import read_record, to_record

SESSION = "node.session"
_VERSION_HEADERS = (FLWR_PACKAGE_NAME_METADATA_KEY, FLWR_PACKAGE_VERSION_METADATA_KEY, FLWR_COMPONENT_NAME_METADATA_KEY)
BEAT_EVERY, _INTERVAL = 10.0, 15.0  # seconds; the server takes a client for gone after twice the interval
_ARRIVAL = 30.0  # seconds that the pieces of a letter may take: a server that died while sending never will complete it
_BUSY = (502, 503, 504)
RUN_OVER = 2007  # what Flower says to an answer whose run has ended; its table of such codes brings a web server along
_PATIENCE = 60.0  # seconds that an answer which is made already may take to be sent
Answer = TypeVar("Answer")


class Incomplete(OSError):
    """A letter whose pieces did not all come."""


class Taken(OSError):
    """The server takes this client for one that is there already."""


@dataclass(frozen=True)
class Letter:
    """A letter as it came: its bytes, and Flower's message, which an answer replies to."""

    content: bytes
    message: Any


class Signs:
    """Signs requests with a client's key. Flower's own way to do so brings a web server along, and ends the process
    where it likes a version less."""

    def __init__(self, key: Any, public: bytes) -> None:
        self._key, self._public = key, b64encode(public).decode()
        versions = (package_name, package_version, "SuperNode")
        self._version = dict(zip(_VERSION_HEADERS, versions, strict=True))

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Adds the headers by which a request shows whose it is, and when it was made."""
        stamp = datetime.now(UTC).isoformat()
        signature = b64encode(sign_message(self._key, stamp.encode())).decode()
        shown = {"flwr-public-key": self._public, "flwr-timestamp": stamp, "flwr-signature": signature}
        context.request.headers.update({**self._version, **shown})
        return call_next(context)


class Fleet:
    """A client's connection to the server. Many threads may use it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.number = 0  # Flower's name for the client, once it is in
        if node.authentication:
            private: Any = load_ssh_private_key((node.folder / "node.key").read_bytes(), password=None)
            keys = (private, private.public_key())
        else:
            keys = generate_key_pairs()
        self._public = public_key_to_bytes(keys[1])
        certificate = (node.folder / "ca.crt").read_bytes() if node.tls else None
        where, signs = f"{node.host}:{node.port}", Signs(keys[0], self._public)
        self._client = FleetHttpClient.from_server_address(where, not node.tls, certificate, [signs])

    def come_in(self) -> None:
        """Tells the server that this client is there. One that was killed here says first that it had gone, else it
        would be kept out until the server notices; on another device the same key stays out."""
        before = self._session()
        if before:
            self._try(lambda: self._client.DeactivateNode(DeactivateNodeRequest(node_id=before)))
        if not self.node.authentication:
            self._try(lambda: self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public)))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=_INTERVAL)
        try:
            self.number = int(self._client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.PRECONDITION_FAILED:
                raise Taken("another device uses its key, or used it less than a minute ago") from None
            raise
        write_text(self.node.folder / SESSION, json.dumps({"number": self.number, "place": self._place()}))

    def leave(self) -> None:
        """Says goodbye, so that nobody waits for this client."""
        if self.number:
            self._try(lambda: self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.number)))
            (self.node.folder / SESSION).unlink(missing_ok=True)
            self.number = 0

    def beat(self) -> bool:
        """Tells the server that this client is still there; whether the server knows it."""
        request = SendNodeHeartbeatRequest(node=self._flower, heartbeat_interval=_INTERVAL)
        return bool(self._client.SendNodeHeartbeat(request).success)

    def letter(self) -> Letter | None:
        """The next letter for this client, if there is one."""
        found = self._client.PullMessages(PullMessagesRequest(node=self._flower))
        if not found.messages_list:
            return None
        head, end = message_from_proto(found.messages_list[0]), time.monotonic() + _ARRIVAL
        run, name = head.metadata.run_id, head.metadata.message_id
        pieces = {
            piece.object_id: self._piece(run, piece.object_id, end)
            for piece in iterate_object_tree(found.message_object_trees[0])
        }
        confirm = ConfirmMessageReceivedRequest(node=self._flower, run_id=run, message_object_id=name)
        self._client.ConfirmMessageReceived(confirm)
        message: Any = inflate_object_from_contents(name, pieces)
        message.metadata.__dict__["_message_id"] = name
        return Letter(read_record(message), message)

    def _piece(self, run: int, name: str, end: float) -> bytes:
        request, pause = PullObjectRequest(node=self._flower, run_id=run, object_id=name), 0.1
        while time.monotonic() < end:
            found = self._client.PullObject(request)
            if not found.object_found:
                break
            if found.object_available:
                return bytes(found.object_content)
            time.sleep(pause)  # the server is still being given the letters of all clients, and asking it is no help
            pause = min(2 * pause, 0.8)
        raise Incomplete("a letter did not arrive whole")

    def answer(self, letter: Letter, content: bytes, seconds: float) -> None:
        """Sends the answer to a letter, which took some seconds to make; a server that is busy is asked again."""
        reply = Message(to_record(content), reply_to=letter.message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        pieces = {name: piece.deflate() for name, piece in get_all_nested_objects(reply).items()}
        announcement = PushMessagesRequest(
            node=self._flower,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[seconds],
        )
        end = time.monotonic() + _PATIENCE
        told = _until(end, lambda: self._client.PushMessages(announcement))
        for name in told.objects_to_push:
            request = PushObjectRequest(
                node=self._flower,
                run_id=letter.message.metadata.run_id,
                object_id=name,
                object_content=pieces[name],
                session_id=told.session_id,
            )
            _until(end, lambda request=request: self._client.PushObject(request))  # type: ignore[misc]

    @property
    def _flower(self) -> FlowerNode:
        return FlowerNode(node_id=self.number)

    def _session(self) -> int:
        """The number under which a process of this very folder was in and did not say goodbye; 0 where none was."""
        try:
            found = json.loads((self.node.folder / SESSION).read_text())
            return int(found["number"]) if found["place"] == self._place() else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _place(self) -> str:
        """This device and folder: a copy of the folder, here or elsewhere, is another place."""
        return f"{uuid.getnode():x}:{self.node.folder}"

    def _try(self, ask: Callable[[], object]) -> None:
        try:
            ask()
        except httpx.HTTPStatusError:
            pass  # it is so already
        except httpx.HTTPError:
            if self.number == 0:  # coming in; who leaves need not reach anybody
                raise


def _until(end: float, ask: Callable[[], Answer]) -> Answer:
    """Asks again while the server is busy or cannot be reached, until a time."""
    pause = 0.25
    while True:
        try:
            return ask()
        except httpx.HTTPError as error:
            final = isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _BUSY
            if final or time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 4.0)


def reason(error: BaseException, node: Node) -> tuple[str, bool]:
    """What a failure means, as a sentence for the device's owner; and whether waiting alone will not mend it.

    >>> from types import SimpleNamespace
    >>> reason(httpx.ConnectError("[Errno 111] Connection refused"), SimpleNamespace(host="h", port=1))
    ('h:1 cannot be reached: [Errno 111] Connection refused', False)
    """
    where = f"{node.host}:{node.port}"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate of {where} is not accepted: {cause.verify_message}", True
        if isinstance(cause, socket.gaierror):
            told = f"the name {node.host} is not known; look at host in client.toml and at this device's network"
            return told, True
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        if status == 403 and _told(error, "code") == RUN_OVER:
            return "the run that an answer was for has ended", False
        if status in (401, 403, 413):
            return f"the server sends this client away: {_told(error, 'detail') or UNKNOWN_KEY}", True
        return f"{where} is busy" if status >= 500 else f"{where} answered with status {status}", False
    if isinstance(error, httpx.HTTPError):
        return f"{where} cannot be reached: {str(error) or type(error).__name__}", False
    if isinstance(error, Taken):
        return f"the server does not let this client in: {error}", False
    if isinstance(error, Incomplete):
        return str(error), False
    return f"{where} answers what makes no sense ({type(error).__name__})", False


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _told(error: httpx.HTTPStatusError, what: str) -> Any:
    """What the server says of a refusal; the gate in front of it knows registered keys only, and says nothing."""
    try:
        return json.loads(error.response.content).get(what)
    except (ValueError, AttributeError):
        return None
