"""Making a federation's folder: certificates, keys, configuration, and for a named scenario each client's data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt._util.addresses import home_of, taken_apart
from fedquilt.deploy.columns import without_numbers, write_columns
from fedquilt.deploy.held import write_common
from fedquilt.deploy.names import check_names
from fedquilt.deploy.ops import keys
from fedquilt.deploy.ops.own_model import carry, check_model
from fedquilt.deploy.project import Address, FederationSpec, Node, Project, Rounds, Transfer
from fedquilt.families.common import form_for
from fedquilt.tasks import Task

if TYPE_CHECKING:
    from fedquilt.client import Client, Split
    from fedquilt.scenario import Scenario
    from fedquilt.secure import SecureSums


def create(
    folder: Path,
    names: Sequence[str],
    model: str,
    classes: int,
    server: Address | None = None,
    rounds: Rounds | None = None,
    transfer: Transfer | None = None,
    secure: SecureSums | None = None,
) -> Project:
    """A federation of the user's own clients; `model` is `file.py:function` or `package.module:function`.

    A model file is copied into every client's folder. What differs between clients (traits, labels, the model) is
    edited in their `client.toml`.
    """
    check_model(model)
    terms = FederationSpec(classes=classes)
    with _whole_or_not(folder):
        rules = (server or Address(), rounds or Rounds(), transfer or Transfer())
        project = _skeleton(folder, names, Project(folder, *rules, terms, tuple(names), secure=secure))
        models: dict[str, Mapping[str, Any]] = {}
        for name in names:
            models[name] = {"builder": carry(model, project.client_folder(name))}
            client_folder(project, name, {}, None, models[name], {})
        carry(model, project.server_folder)
        return _finish(project, models)


def create_from_scenario(
    folder: Path,
    scenario: Scenario,
    server: Address | None = None,
    rounds: Rounds | None = None,
    transfer: Transfer | None = None,
    secure: SecureSums | None = None,
) -> Project:
    """A federation of a scenario's clients, each with its own part of the data and nobody else's."""
    terms = FederationSpec(
        scenario=scenario.name,
        classes=scenario.classes,
        label_names=scenario.label_names,
        training=asdict(scenario.training),
        common="common.npz" if scenario.common is not None else "",
        public_test="public_test.npz" if scenario.public_test is not None else "",
        origin=dict(scenario.origin),
        task=_task(scenario.task),
    )
    names = [client.name for client in scenario.clients]
    with _whole_or_not(folder):
        rules = (server or Address(), rounds or Rounds(), transfer or Transfer())
        project = _skeleton(folder, names, Project(folder, *rules, terms, tuple(names), secure=secure))
        held = {terms.common: scenario.common, terms.public_test: scenario.public_test}
        for file, samples in held.items():
            if samples is not None:
                write_common(folder / file, samples)
        models: dict[str, Mapping[str, Any]] = {}
        for client in scenario.clients:
            changes: dict[str, dict[str, Any]] = {}
            for start, change in client.changes.items():
                changes[str(start)] = {"labels": list(change.labels)} if change.labels is not None else {}
                if change.model is not None:
                    changes[str(start)]["model"], source = model_reference(change.model, client.name)
                    _take_along(source, project, client.name)
            reference, source = model_reference(client.model, client.name)
            _take_along(source, project, client.name)
            client_folder(project, client.name, client.traits, client.labels, reference, changes)
            models[client.name] = {**reference, "changes": {k: v["model"] for k, v in changes.items() if "model" in v}}
            _write_data(project.client_folder(client.name) / "data.npz", client)
            write_columns(project.client_folder(client.name), client.columns)
            for file, samples in held.items():
                if samples is not None:
                    write_common(project.client_folder(client.name) / file, form_for(samples, client))
        write_columns(project.server_folder, without_numbers(scenario.clients[0].columns))  # for who is added later
        return _finish(project, models)


def model_reference(builder: Any, client: str) -> tuple[dict[str, Any], Path | None]:
    """How a device finds a model builder: the function's name and its plain arguments; and the file to take along
    where the function is in a file of the user's own.

    >>> from functools import partial
    >>> from torch import nn
    >>> model_reference(partial(nn.Linear, 4, out_features=2), "a")
    ({'builder': 'torch.nn.modules.linear:Linear', 'arguments': [4], 'keywords': {'out_features': 2}}, None)
    >>> model_reference(lambda: nn.Linear(4, 2), "a")
    Traceback (most recent call last):
    ...
    ValueError: client 'a': a device cannot find its model builder; make it a function of a file or module, or a
    functools.partial of one with plain arguments
    """
    function, arguments, keywords = taken_apart(builder)
    home = home_of(function)
    try:
        json.dumps([arguments, keywords], allow_nan=False)
    except (TypeError, ValueError):
        home = None
    if home is None:
        raise ValueError(
            f"client '{client}': a device cannot find its model builder; make it a function of a file or module, or a\n"
            "functools.partial of one with plain arguments"
        )
    module, file = home
    reference: dict[str, Any] = {"builder": f"{module if file is None else file.name}:{function.__qualname__}"}
    reference |= {"arguments": list(arguments)} if arguments else {}
    return reference | ({"keywords": keywords} if keywords else {}), file


@contextmanager
def _whole_or_not(folder: Path) -> Iterator[None]:
    """Leaves nothing behind of a federation that cannot be made to its end."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is not empty; a federation is made in a new folder")
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _skeleton(folder: Path, names: Sequence[str], project: Project) -> Project:
    check_names(names)
    project = replace(project, folder=folder.resolve())
    for part in ("authority", "server", "server/keys", "clients", "runs"):
        (project.folder / part).mkdir(parents=True)
    for secret in ("authority", "server", "clients"):
        (project.folder / secret).chmod(0o700)
    if project.server.tls:
        keys.make_authority(project.folder / "authority")
        keys.make_server_certificate(project.folder / "authority", project.server_folder, own_hosts(project.server))
        shutil.copy(project.folder / "authority" / "ca.crt", project.server_folder)
    return project


def own_hosts(server: Address) -> list[str]:
    """The names and addresses that the server's certificate is for."""
    return list(dict.fromkeys([*server.hosts, "localhost", "127.0.0.1"]))


def _finish(project: Project, models: Mapping[str, Mapping[str, Any]]) -> Project:
    project = replace(project, models=models)
    project.write()
    return project


def client_folder(
    project: Project,
    name: str,
    traits: Mapping[str, str],
    labels: Sequence[int] | None,
    model: Mapping[str, Any],
    changes: Mapping[str, Mapping[str, Any]],
) -> None:
    """A client's folder: the authority's certificate, a new key, and what it is."""
    folder = project.client_folder(name)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    server = project.server
    if server.tls:
        shutil.copy(project.server_folder / "ca.crt", folder)
    if server.authentication:
        keys.make_node_key(folder)
        shutil.copy(folder / "node.pub", project.public_key(name))
    own = None if labels is None else tuple(labels)
    Node(
        folder,
        name,
        server.hosts[0],
        server.port,
        server.tls,
        server.authentication,
        traits,
        own,
        model,
        changes,
        classes=project.spec.classes,
        task=project.spec.task,
        secure=project.secure is not None,
    ).write()


def _task(task: Task) -> Mapping[str, Any]:
    """A task as text; devices run no loss or metric that is not in their library."""
    if not task.usual:
        raise ValueError(
            f"the task {task.kind} has a loss or metrics of your own, which devices would have to be sent as code; "
            f"deploy with one of the library's losses: {', '.join(task.known_losses)}"
        )
    return dict(task.stated.get("task", {}))


def _take_along(file: Path | None, project: Project, client: str) -> None:
    """Copies a model file to a client's folder and to the server's."""
    if file is not None:
        for folder in (project.client_folder(client), project.server_folder):
            folder.mkdir(exist_ok=True)
            shutil.copy(file, folder)


def _write_data(path: Path, client: Client) -> None:
    arrays: dict[str, Any] = {}

    def add(name: str, split: Split) -> None:
        if len(split):
            arrays[f"x_{name}"], arrays[f"y_{name}"] = split.x.numpy(), split.y.numpy()

    for name in ("train", "validation", "test"):
        add(name, getattr(client, name))
    for start, change in client.changes.items():
        if change.train is not None:
            add(f"train_{start}", client.at(start).train)
    with path.open("wb") as file:
        np.savez(file, **arrays)
    path.chmod(0o600)
