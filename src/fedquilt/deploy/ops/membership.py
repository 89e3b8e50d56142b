"""Clients that come, go, or change their keys, and a new certificate for the server: while it runs, too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedquilt.deploy.columns import COLUMNS
from fedquilt.deploy.names import check_names
from fedquilt.deploy.ops import keys
from fedquilt.deploy.ops.create import client_folder, own_hosts
from fedquilt.deploy.ops.own_model import carry, check_model
from fedquilt.deploy.ops.registration import register_clients
from fedquilt.deploy.ops.server_processes import write_gate
from fedquilt.deploy.project import Project


def add(project: Project, name: str, model: str = "") -> Project:
    """One client more: its folder, its key, its place in `federation.toml`. Without a model it has the first one's."""
    check_names([*project.clients, name])
    folder = project.client_folder(name)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; move it away, or take another name")
    reference: Mapping[str, Any]
    if model:
        check_model(model)
        reference = {"builder": carry(model, folder)}
        carry(model, project.server_folder)
    else:
        reference = {k: v for k, v in project.models[project.clients[0]].items() if k != "changes"}
        source = reference["builder"].rpartition(":")[0]
        if source.endswith(".py"):
            folder.mkdir()
            shutil.copy(project.server_folder / source, folder)
    client_folder(project, name, {}, None, reference, {})
    for file in filter(None, (project.spec.common, project.spec.public_test)):
        shutil.copy(project.folder / file, folder)
    if (project.server_folder / COLUMNS).is_file():
        shutil.copy(project.server_folder / COLUMNS, folder)
    changed = replace(project, clients=(*project.clients, name), models={**project.models, name: reference})
    changed.write()
    refresh(changed)
    return changed


def remove(project: Project, name: str) -> Project:
    """Takes a client's key away; from now on nobody comes in with it. Its folder, its results, and its model in
    `federation.toml` stay: a run that it was in goes on without it, and must know what it was."""
    _check_known(project, name)
    changed = replace(project, clients=tuple(other for other in project.clients if other != name))
    changed.write()
    refresh(changed)
    return changed


def rekey(project: Project, name: str, public: Path | None = None) -> Path:
    """A new key for a client; the old one is worth nothing from now on. Gives the folder that the new one lies in, for
    its device; a device that made its own key sends its `public` half only."""
    _check_known(project, name)
    if not project.server.authentication:
        raise ValueError("this federation was made without keys")
    folder = project.client_folder(name)
    if public is None:
        folder.mkdir(mode=0o700, exist_ok=True)
        for file in ("node.key", "node.pub"):
            (folder / file).unlink(missing_ok=True)
        keys.make_node_key(folder)
    shutil.copy(public or folder / "node.pub", project.public_key(name))
    refresh(project)
    return folder


def renew(project: Project, authority: Path | None = None) -> None:
    """A new certificate for the server, by the authority that clients know."""
    place = authority or project.folder / "authority"
    if not (place / "ca.key").is_file():
        raise FileNotFoundError(f"{place} holds no ca.key; name the folder of the authority with --authority")
    if (place / "ca.crt").read_bytes() != (project.server_folder / "ca.crt").read_bytes():
        raise ValueError(f"{place} is not the authority that the clients of {project.folder} know")
    new = project.server_folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    keys.make_server_certificate(place, new, own_hosts(project.server))
    for file in ("server.key", "server.crt"):
        (new / file).replace(project.server_folder / file)
    new.rmdir()
    refresh(project)


def refresh(project: Project) -> None:
    """Tells a server that runs who is registered now, and lets nginx read its configuration and certificate anew."""
    control = project.server_folder / "control.json"
    if not control.is_file():
        return
    register_clients(project)
    pid = project.server_folder / "nginx" / "nginx.pid"
    if pid.is_file():
        write_gate(project, json.loads(control.read_text())["port"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGHUP)


def _check_known(project: Project, name: str) -> None:
    if name not in project.clients:
        raise ValueError(f"'{name}' is no client of {project.folder}; it has {', '.join(project.clients)}")
