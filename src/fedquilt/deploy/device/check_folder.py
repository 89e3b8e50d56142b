"""Whether a client's folder, data and model go together: found out before the server hears of it."""

from __future__ import annotations

from pathlib import Path

import torch

from fedquilt.client import Client
from fedquilt.deploy.columns import check_scales
from fedquilt.deploy.device.client_folder import allowed_methods, load_client
from fedquilt.deploy.project import Node
from fedquilt.engines.check_models import check_model
from fedquilt.families.kinds import Kinds, families
from fedquilt.families.units import cut
from fedquilt.tasks import Task, task_from


def check_client(client: Client, classes: int, task: Task) -> None:
    """Refuses targets that the federation does not have, and a model that does not go with the samples."""
    client = task.take(client)
    if task.has_classes and classes and max(client.labels) >= classes:
        raise ValueError(
            f"client '{client.name}' has label {max(client.labels)}, but the labels of this federation go from 0 to "
            f"{classes - 1}; look for a slip in its data file"
        )
    family = families({0: Kinds().of(client.model(), cut, client.train)})[0]
    check_model(family, [client], classes or 10**9, torch.device("cpu"), task)


def check(folder: Path, data: Path) -> str | None:
    """What is wrong with a client's data or model, as a sentence; None, and a line printed, when nothing is."""
    try:
        node = Node.read(folder)
        client = load_client(node, data)
        task = task_from(node.task)
        check_client(client, node.classes, task)
        check_scales(node.folder, client)
        allowed_methods(node)
    except Exception as error:
        return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    told = f"labels {', '.join(map(str, client.labels))}" if task.has_classes else task.kind
    print(f"client '{client.name}': {client.samples} training samples, {told}", flush=True)
    return None
