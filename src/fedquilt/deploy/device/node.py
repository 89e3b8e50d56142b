"""A client's node: Flower's SuperNode, which takes letters from the server, with a heart that can be heard.

By itself SuperNode leaves its loop at any answer that it does not know, and its process stays, alive and idle, for
ever. Here each time that the server was asked for letters is a beat. When none came for a while, the server is asked by
another way what is wrong: that is written down for the device's owner, and if nothing is, the process ends, so that
whoever started it starts it again. It also asks more often while a run is on, and waits less for the worker.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedquilt._util.files import write_text
from fedquilt.deploy.ops.client_processes import BEAT, WHY
from fedquilt.deploy.project import Node

_SILENT, _LOST = 15.0, 45.0  # seconds without a beat after which the server is asked why, and the node ends
_BUSY, _OFTEN, _SELDOM = 60.0, 0.5, 3.0  # so long after a letter the server is asked often


class Heart:
    """When the server was last asked for letters with success, and when there was one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last, self.letter = time.monotonic(), 0.0

    def beat(self, letter: bool = False) -> None:
        """The server has answered."""
        self.last = time.monotonic()
        self.letter = self.last if letter else self.letter
        (self.folder / BEAT).touch()
        if (self.folder / WHY).exists():
            (self.folder / WHY).unlink(missing_ok=True)

    @property
    def silent(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self.last

    def sleep(self, seconds: float) -> None:
        """The pauses of SuperNode's loop: a long one between two questions, short ones while the worker is at work."""
        if seconds >= 1:
            seconds = _OFTEN if time.monotonic() - self.letter < _BUSY else _SELDOM
        else:
            self.beat()
            seconds = min(seconds, 0.1)
        time.sleep(seconds)


def what_is_wrong(node: Node) -> str:
    """Why the server cannot be talked to, as a sentence for the device's owner; empty where nothing is wrong."""
    where = f"{node.host}:{node.port}"
    context = ssl.create_default_context(cafile=str(node.folder / "ca.crt")) if node.tls else None
    url = f"{'https' if node.tls else 'http'}://{where}/v1/fleet/pull-messages"
    headers = signed(node.folder / "node.key") if node.authentication else {}
    request = urllib.request.Request(url, data=b"", headers={"content-type": "application/protobuf", **headers})
    try:
        urllib.request.urlopen(request, context=context, timeout=10).close()
    except urllib.error.HTTPError as error:
        return _said(error) if error.code in (401, 403, 413) else "" if error.code < 500 else f"{where} is busy"
    except urllib.error.URLError as error:
        reason = error.reason
        if isinstance(reason, ssl.SSLCertVerificationError):
            return f"the certificate of {where} is not accepted: {reason.verify_message}"
        if isinstance(reason, socket.gaierror):
            return f"the name {node.host} is not known; look at host in client.toml and at this device's network"
        return f"{where} cannot be reached: {reason}"
    except OSError as error:
        return f"{where} cannot be reached: {error}"
    return ""


def signed(key: Path) -> dict[str, str]:
    """The headers by which a request shows whose it is."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private: Any = load_ssh_private_key(key.read_bytes(), password=None)
    stamp = datetime.now(UTC).isoformat()
    return {
        "flwr-public-key": b64encode(public_key_to_bytes(private.public_key())).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": b64encode(sign_message(private, stamp.encode())).decode(),
    }


def _said(error: urllib.error.HTTPError) -> str:
    """Why the server sends this client away; the gate in front of it knows registered keys only, and says nothing."""
    try:
        detail = json.loads(error.read()).get("detail", "")
    except (ValueError, AttributeError, OSError):
        detail = ""
    return f"the server sends this client away: {detail or 'its key is not registered there'}"


def listen(heart: Heart, node: Node) -> None:
    """A thread's work: asks what is wrong when the heart is silent, and ends the process when nothing is."""
    while True:
        time.sleep(5)
        if heart.silent > _SILENT:
            why = what_is_wrong(node)
            if heart.silent > _SILENT:
                write_text(node.folder / WHY, why or "the node was idle although the server is there")
            if not why and heart.silent > _LOST:
                os._exit(75)


def main() -> None:
    """`python -m fedquilt.deploy.device.node FOLDER ...`: the other words are those of flower-supernode."""
    from types import SimpleNamespace

    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    node = Node.read(Path(sys.argv.pop(1)))
    heart = Heart(node.folder)
    pull: Any = vars(loop)["_pull_and_store_message"]

    def beating(*args: Any, **kwargs: Any) -> Any:
        found = pull(*args, **kwargs)
        heart.beat(found is not None)
        return found

    vars(loop).update(_pull_and_store_message=beating, time=SimpleNamespace(sleep=heart.sleep, time=time.time))
    threading.Thread(target=listen, args=(heart, node), daemon=True).start()
    try:
        flower_supernode()
    except BaseException as error:
        why = what_is_wrong(node)
        again = "another process uses its key, or it was ended less than a minute ago"
        write_text(node.folder / WHY, why or (again if isinstance(error, SystemExit) else f"{type(error).__name__}"))
        print(f"{datetime.now().isoformat(' ', 'seconds')} the node ended: {error!r}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
