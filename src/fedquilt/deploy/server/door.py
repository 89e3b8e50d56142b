"""The door of SuperLink: who may come in is settled by a request's headers, before a byte of its body is read.

Flower reads and unpacks a request before it asks who sent it, answers its operator without a password, and says 500
when its database is busy, at which nodes give up for good. So everything passes here first:

* A client's request must bear a key that is registered now, and a signature of the present time. What is wrong is said
  to the client, and noted for the operator.
* An operator's request must bear the secret that lies in a file which only the operator can read.
* An upload may not be larger than the run expects of that client.
* A failure inside is told as "busy, try again".
"""

from __future__ import annotations

import binascii
import hmac
import json
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from fedquilt.deploy.project import UNKNOWN_KEY, Project

SECRET_HEADER = "x-fedquilt-operator"
REFUSED = "refused.jsonl"
AHEAD, BEHIND = 60.0, 300.0  # seconds that a client's clock may be off
_LARGEST_BODY = 8 << 20  # arrays travel in pieces of 5 MiB
_LARGEST_QUESTION = 128 << 10  # all but these pieces: unpacked, such a request can take thirty times its bytes
_LARGEST_ANSWER = 16 << 20  # of a client that no run has said more about
_AGAIN = 60.0  # seconds after which the same refusal is noted once more

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Closed(Exception):
    """A request that does not come in: the status of the answer, and a sentence for whoever sent it."""

    def __init__(self, status: int, reason: str, client: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason, self.client = status, reason, client


class Door:
    """Stands in front of SuperLink's app; see the head of this file."""

    def __init__(self, app: App, folder: Path, secret: str) -> None:
        self.app, self.folder, self.secret = app, folder, secret
        self.keys = Keys(folder)
        self.limits = Limits(folder / "server" / "limits")
        self._noted: dict[tuple[str, str], float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        try:
            self.check(scope["path"], headers)
        except Closed as closed:
            self._note(closed)
            await _answer(send, closed.status, closed.reason)
            return

        async def tell(message: MutableMapping[str, Any]) -> None:
            inside = scope["path"].startswith(("/v1/fleet/", "/v1/runtime/"))
            if message["type"] == "http.response.start" and message["status"] == 500 and inside:
                message = {**message, "status": 503}
            await send(message)

        await self.app(scope, receive, tell)

    def check(self, path: str, headers: dict[str, str]) -> None:
        """Raises `Closed` for a request that must not come in."""
        length = headers.get("content-length", "0")
        size = int(length) if length.isdigit() else _LARGEST_BODY + 1
        if path.startswith("/v1/control/"):
            if not hmac.compare_digest(headers.get(SECRET_HEADER, "").encode(), self.secret.encode()):
                raise Closed(401, "only the operator of this federation may ask that")
        elif path.startswith("/v1/fleet/"):
            largest = _LARGEST_BODY if path.endswith("/push-object") else _LARGEST_QUESTION
            if size > largest or "transfer-encoding" in headers:
                raise Closed(413, f"such a request has at most {largest} bytes, and says how many")
            client = self.keys.client_of(headers)
            if client and path.endswith("/push-object"):  # without authentication nobody can be told from another
                self.limits.take(client, size)

    def _note(self, closed: Closed) -> None:
        """Notes a refusal for the operator, each once a minute; of strangers only that there was one."""
        which = (closed.client, closed.reason if closed.client else str(closed.status))
        now = time.monotonic()
        if now - self._noted.get(which, -_AGAIN) < _AGAIN:
            return
        self._noted[which] = now
        line = {"time": datetime.now().isoformat(" ", "seconds"), "client": closed.client, "reason": closed.reason}
        with suppress(OSError), (self.folder / "server" / REFUSED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Keys:
    """The clients' public keys as they are registered now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = -1
        self._names: dict[bytes, str] = {}
        self._needed = Project.read(folder).server.authentication

    def client_of(self, headers: dict[str, str]) -> str:
        """Whose request it is; `Closed` where nobody's."""
        if not self._needed:
            return ""
        try:
            key = b64decode(headers["flwr-public-key"], validate=True)
            signature = b64decode(headers["flwr-signature"], validate=True)
            stamp = headers["flwr-timestamp"]
            ahead = datetime.fromisoformat(stamp).timestamp() - time.time()
        except (KeyError, ValueError, TypeError, binascii.Error):
            raise Closed(401, "the request is not signed") from None
        name = self._known().get(key)
        if name is None:
            raise Closed(401, UNKNOWN_KEY)
        if not verify_signature(bytes_to_public_key(key), stamp.encode("ascii", "replace"), signature):
            raise Closed(401, "the signature is wrong", name)
        if not -BEHIND < ahead < AHEAD:
            which = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
            raise Closed(401, f"the device's clock is {which} the server's; set it right", name)
        return name

    def _known(self) -> dict[bytes, str]:
        nodes = self.folder / "server" / "nodes.json"
        changed = nodes.stat().st_mtime_ns if nodes.is_file() else 0
        if changed != self._seen:
            project = Project.read(self.folder)
            self._names = {key_bytes(project.public_key(name)): name for name in project.nodes().values()}
            self._seen = changed
        return self._names


class Limits:
    """Bytes that each client may still upload: what the runs' leaders wrote down, anew in every round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = -1
        self._largest: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def take(self, client: str, size: int) -> None:
        """Counts an upload; `Closed` where it is too much."""
        changed = self.folder.stat().st_mtime_ns if self.folder.is_dir() else 0
        if changed != self._seen:
            self._seen, self._taken, self._largest = changed, {}, {}
            for file in self.folder.glob("*.json"):
                for name, largest in json.loads(file.read_text()).items():
                    self._largest[name] = self._largest.get(name, 0) + int(largest)
        self._taken[client] = self._taken.get(client, 0) + size
        if self._taken[client] > self._largest.get(client, _LARGEST_ANSWER):
            raise Closed(413, "the answer has many times the bytes that were expected", client)


def key_bytes(path: Path) -> bytes:
    """A public key as requests bear it."""
    return load_ssh_public_key(path.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """`python -m fedquilt.deploy.server.door FOLDER ...`: SuperLink behind its door; the other words are Flower's."""
    import sys

    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from flwr.superlink.routers.fleet import node_auth
    from starlette.middleware import Middleware

    from fedquilt.deploy.server.lighter import lighten

    folder = Path(sys.argv.pop(1))
    secret = (folder / "server" / "control.secret").read_text()
    extensions.get_middleware = lambda: (Middleware(Door, folder=folder, secret=secret),)
    vars(node_auth).update(SYSTEM_TIME_TOLERANCE=AHEAD, TIMESTAMP_TOLERANCE=BEHIND)
    lighten()
    flower_superlink()


if __name__ == "__main__":
    main()
