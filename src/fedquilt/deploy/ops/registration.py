"""Who is registered: keys of clients come, change and go while the server runs."""

from __future__ import annotations

import json
from pathlib import Path

from fedquilt._util.files import write_text
from fedquilt.deploy.ops.superlink import SuperLink
from fedquilt.deploy.project import Project

_FORMER = "former.json"


def register_clients(project: Project) -> None:
    """Makes SuperLink know the project's clients by the keys they have now, and nobody else."""
    if not project.server.authentication:
        return
    nodes, former = project.nodes(), former_keys(project)
    keys = {number: key for number, key in project.registered().items() if number in nodes}
    with SuperLink(project) as operator:
        for number, name in list(nodes.items()):
            gone = name not in project.clients
            if gone or keys.get(number, "") not in ("", _text(project.public_key(name))):
                operator.unregister(number)
                former[keys.get(number, "")] = name
                del nodes[number]
        for name in project.clients:
            if name not in nodes.values():
                nodes[operator.register(project.public_key(name))] = name
    write_text(project.server_folder / _FORMER, json.dumps(former))
    project.write_nodes(nodes, {number: _text(project.public_key(name)) for number, name in nodes.items()})


def former_keys(project: Project) -> dict[str, str]:
    """Public keys that were replaced or taken away, and whose they were."""
    path = project.server_folder / _FORMER
    found: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _text(path: Path) -> str:
    return path.read_text().strip()
