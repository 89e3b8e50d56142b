"""Who is registered: keys of clients come, change and go while the server runs."""

from __future__ import annotations

from pathlib import Path

from fedquilt.deploy.ops.superlink import SuperLink
from fedquilt.deploy.project import Project


def register_clients(project: Project) -> None:
    """Makes SuperLink know the project's clients by the keys they have now, and nobody else."""
    if not project.server.authentication:
        return
    nodes = project.nodes()
    keys = {number: key for number, key in project.registered().items() if number in nodes}
    with SuperLink(project) as operator:
        for number, name in list(nodes.items()):
            gone = name not in project.clients
            if gone or keys.get(number, "") not in ("", _text(project.public_key(name))):
                operator.unregister(number)
                del nodes[number]
        for name in project.clients:
            if name not in nodes.values():
                nodes[operator.register(project.public_key(name))] = name
    project.write_nodes(nodes, {number: _text(project.public_key(name)) for number, name in nodes.items()})


def _text(path: Path) -> str:
    return path.read_text().strip()
