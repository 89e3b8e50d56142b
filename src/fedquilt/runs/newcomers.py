"""A newcomer's file as a client, and whether a finished run can take it; clients that are held out, to come later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedquilt._util.plain_values import whole
from fedquilt._util.randomness import key_of, some_of
from fedquilt.client import Client, ModelBuilder
from fedquilt.core.federation import Federation
from fedquilt.data.npz import NotArrays, read_arrays
from fedquilt.data.splits import random_split
from fedquilt.interface.readout import SPLITS
from fedquilt.scenario import Scenario

SHARES = (0.6, 0.1, 0.3)  # train, validation, test, where a file does not say


def read_client(path: str | Path, federation: Federation, traits: Mapping[str, str] | None) -> Client:
    """The client of a file, with the model of the run's client that is most like it."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give the newcomer's data as client.npz")
    try:
        arrays = read_arrays(path)
    except (NotArrays, OSError) as error:
        raise ValueError(f"{path} is not an .npz file of plain arrays: {error}") from None
    if {"x", "y"} <= arrays.keys():
        kinds = arrays["y"] if federation.scenario.task.has_classes else np.zeros(len(arrays["y"]), dtype=np.int64)
        parts = random_split(kinds, shares=SHARES, seed=federation.seed)
        splits = {name: (arrays["x"][at], arrays["y"][at]) for name, at in zip(("train", *SPLITS), parts, strict=True)}
    else:
        names = [name for name in ("train", *SPLITS) if {f"x_{name}", f"y_{name}"} <= arrays.keys()]
        splits = {name: (arrays[f"x_{name}"], arrays[f"y_{name}"]) for name in names}
    if "train" not in splits or "test" not in splits:
        raise ValueError(f"{path} holds {', '.join(arrays)}; give x_train, y_train, x_test and y_test, or x and y")
    shape = tuple(splits["train"][0].shape[1:])
    model = model_for(shape, traits or {}, federation, path.stem)
    return Client(path.stem, model, splits["train"], splits.get("validation"), splits["test"], traits)


def model_for(shape: tuple[int, ...], traits: Mapping[str, str], federation: Federation, name: str) -> ModelBuilder:
    """The model of the client that has samples of this shape and the most traits in common."""
    now = [client.at(federation.round) for client in federation.scenario.clients]
    fitting = [client for client in now if tuple(client.train.x.shape[1:]) == shape]
    if not fitting:
        shapes = sorted({tuple(client.train.x.shape[1:]) for client in now})
        raise ValueError(
            f"client '{name}' has samples of shape {shape}, those of the run's clients have {shapes}; give data of "
            "such a shape, or in Python a client with a model of its own"
        )
    return max(fitting, key=lambda client: len(set(client.traits.items()) & set(traits.items()))).model


def check(client: Client, federation: Federation) -> None:
    """Refuse a newcomer that the run cannot take."""
    if client.name in federation.server.roster.names:
        raise ValueError(f"the run already has a client '{client.name}'; give the newcomer another name")
    classes = federation.scenario.classes
    if max(client.labels, default=0) >= classes:
        raise ValueError(
            f"client '{client.name}' has label {max(client.labels)}, but the run knows labels up to {classes - 1}; "
            "leave these samples out, or run again with all clients"
        )
    if len(client.test) == 0:
        raise ValueError(f"client '{client.name}' has no test data, so nobody can say whether joining is better")
    everybody = [set(member.traits) for member in federation.server.roster.members]
    missing = sorted(set.intersection(*everybody) - client.traits.keys())
    if missing:
        raise ValueError(
            f"client '{client.name}' declares no trait '{missing[0]}', as all clients of the run do; give it: "
            f"--traits {missing[0]}=..."
        )


def hold_out(scenario: Scenario, number: int | None) -> tuple[Scenario, tuple[Client, ...]]:
    """The scenario without some of its clients, drawn among those with test samples, and these.

    The draw is the same whatever the seed: comparisons over seeds are of the same clients.

    >>> import fedquilt as fq
    >>> rest, unseen = hold_out(fq.scenarios.build("digits", clients=8), 2)
    >>> len(rest.clients), len(unseen)
    (6, 2)
    """
    number = whole(number or 0, "unseen")
    if not number:
        return scenario, ()
    clients = scenario.clients
    tested = [place for place, client in enumerate(clients) if len(client.test)]
    if number < 0 or number > len(tested) or number > len(clients) - 2:
        told = f"there are {len(clients)} clients, {len(tested)} of them with test samples, and two at least must train"
        raise ValueError(f"unseen={number} clients cannot be held out: {told}")
    drawn = {tested[at] for at in some_of(len(tested), number, key_of("unseen"))}
    rest = replace(scenario, clients=tuple(c for at, c in enumerate(clients) if at not in drawn))
    if rest.classes < scenario.classes:
        raise ValueError(
            f"with unseen={number} nobody of those who train has the label {scenario.classes - 1}; hold out fewer, or "
            "give the scenario label_names"
        )
    return rest, tuple(clients[at] for at in sorted(drawn))
