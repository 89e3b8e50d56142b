"""Whom the server sent away, for its operator: by the gate, for an unknown key, and by the door behind it."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from fedquilt.deploy.ops.nginx import STRANGERS
from fedquilt.deploy.ops.registration import former_keys
from fedquilt.deploy.project import Project
from fedquilt.deploy.server.door import REFUSED

_TAIL = 256 << 10  # bytes of a log that are looked at: whoever knocks often cannot make looking slow


def sent_away(project: Project, most: int = 5) -> list[str]:
    """A sentence about each of the last requests that the door refused, and about the last keys unknown to the gate."""
    found = [json.loads(line) for line in _end(project.server_folder / REFUSED).splitlines()[-most:]]
    by_door = [f"{line['time']} {line['client'] or 'a stranger'}: {line['reason']}" for line in found]
    knocks = _end(project.server_folder / "nginx" / STRANGERS)
    return sorted(by_door + by_gate(knocks, former_keys(project))[-most:])


def by_gate(log: str, former: Mapping[str, str]) -> list[str]:
    """A sentence about each key in a log of the gate: when it was shown last, whose it is or was, from
    where, and how often.

    >>> by_gate("2026-11-18T14:02:11 10.0.0.7 -\\n2026-11-18T14:02:13 10.0.0.7 -\\n", {})
    ['2026-11-18 14:02:13 a stranger without a key, from 10.0.0.7, 2 requests']
    """
    count: dict[str, int] = {}
    last: dict[str, tuple[str, str]] = {}
    for line in log.splitlines():
        time, address, key = line.split(" ", 2)
        local = datetime.fromisoformat(time).astimezone().replace(tzinfo=None).isoformat(" ", "seconds")
        count[key] = count.get(key, 0) + 1
        last[key] = (local, address)
    return [
        f"{local} {_who(key, former)}, from {address}" + (f", {count[key]} requests" if count[key] > 1 else "")
        for key, (local, address) in sorted(last.items(), key=lambda item: item[1])
    ]


def _who(key: str, former: Mapping[str, str]) -> str:
    if key == "-":
        return "a stranger without a key"
    try:
        public = load_pem_public_key(b64decode(key, validate=True))
        text = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    except (ValueError, UnsupportedAlgorithm):
        return "a stranger with something that is no key"
    if text in former:
        return f"{former[text]} with a key that was replaced or taken away"
    digest = b64encode(hashlib.sha256(b64decode(text.split()[1])).digest()).decode().rstrip("=")
    return f"a stranger with a key that is not registered (SHA256:{digest}, as `ssh-keygen -lf node.pub` shows it)"


def _end(log: Path) -> str:
    """The last whole lines of a log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        start = max(0, log.stat().st_size - _TAIL)
        file.seek(start)
        text = file.read().decode(errors="replace")
    return text[text.find("\n") + 1 if start else 0 : text.rfind("\n") + 1]
