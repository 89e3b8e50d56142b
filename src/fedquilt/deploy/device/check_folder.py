"""Whether a client's folder, data and model go together: found out before the server hears of it."""

from __future__ import annotations

from pathlib import Path

import torch

from fedquilt.client import Client
from fedquilt.deploy.device.client_folder import allowed_methods, load_client
from fedquilt.deploy.project import Node
from fedquilt.engines.check_models import check_model
from fedquilt.families.kinds import Kinds, families
from fedquilt.families.units import cut


def check_client(client: Client, classes: int) -> None:
    """Refuses labels that the federation does not have, and a model that does not go with the samples."""
    if classes and max(client.labels) >= classes:
        raise ValueError(
            f"client '{client.name}' has label {max(client.labels)}, but the labels of this federation go from 0 to "
            f"{classes - 1}; look for a slip in its data file"
        )
    family = families({0: Kinds().of(client.model(), cut, client.train)})[0]
    check_model(family, [client], classes or 10**9, torch.device("cpu"))


def check(folder: Path, data: Path) -> str | None:
    """What is wrong with a client's data or model, as a sentence; None, and a line printed, when nothing is."""
    try:
        node = Node.read(folder)
        client = load_client(node, data)
        check_client(client, node.classes)
        allowed_methods(node)
    except Exception as error:
        return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    print(
        f"client '{client.name}': {client.samples} training samples, labels {', '.join(map(str, client.labels))}",
        flush=True,
    )
    return None
