"""Next-character prediction on bundled texts: every client has one document."""

from __future__ import annotations

from functools import partial
from importlib import resources

import numpy as np
import numpy.typing as npt

from fedquilt.client import Client, Pair
from fedquilt.engines.settings import Training
from fedquilt.models.characters import NextCharacter
from fedquilt.scenario import Scenario

LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789.,:;-()'\"/=*`_"
OTHER = "~"  # whatever is not among them
Ints = npt.NDArray[np.int64]


def characters(seed: int = 0, clients: int = 10, length: int = 32, context: int = 6, most: int = 2000) -> Scenario:
    """Texts (bundled): the next character, one client a document: scikit-learn's descriptions of its data sets.

    English prose with tables and references, under scikit-learn's licence (BSD-3-Clause); of some twenty documents the
    `clients` longest are taken, up to `most` characters of each. Texts are in small letters and cut into sequences
    of `length` characters, each with the one that follows as its target; the first 60 % of a document are for
    training, the next 10 % for validation, the rest for tests. A model sees the last `context` characters.
    Everything here was chosen for this library.

    >>> made = characters(clients=4)
    >>> made.task.kind, made.clients[0].train.x.shape[1], made.classes == len(made.label_names)
    ('tokens', 32, True)
    """
    if length < 2 or context < 1:
        raise ValueError(f"scenario 'characters' with length={length}, context={context}: give at least 2 and 1")
    texts = documents()
    if not 1 <= clients <= len(texts):
        raise ValueError(f"scenario 'characters' has {len(texts)} documents for clients={clients}; give fewer")
    longest = sorted(texts, key=lambda name: (-len(texts[name]), name))[:clients]
    symbols = LETTERS + OTHER
    number = {letter: at for at, letter in enumerate(symbols)}
    model = partial(NextCharacter, len(symbols), context)
    made = []
    for name in sorted(longest):
        tokens = np.array([number.get(letter, number[OTHER]) for letter in texts[name][:most]])
        first, second = round(0.6 * len(tokens)), round(0.7 * len(tokens))
        parts = (tokens[:first], tokens[first:second], tokens[second:])
        train, validation, test = (_sequences(part, length) for part in parts)
        made.append(Client(name, model, train, validation, test))
    training = Training(rounds=15, epochs=2, batch=16, optimiser="adam", lr=0.005)
    return Scenario("characters", made, training, label_names=list(symbols), task="tokens")


def documents() -> dict[str, str]:
    """The texts by name, in small letters, with single spaces."""
    folder = resources.files("sklearn.datasets").joinpath("descr")
    files = [file for file in folder.iterdir() if file.name.endswith(".rst")]
    return {
        file.name.removesuffix(".rst").replace("_", "-"): " ".join(file.read_text(encoding="utf-8").lower().split())
        for file in sorted(files, key=lambda file: file.name)
    }


def _sequences(tokens: Ints, length: int) -> Pair:
    """Sequences (n, length) and what follows each of their characters."""
    count = (len(tokens) - 1) // length
    x = tokens[: count * length].reshape(count, length)
    return x, tokens[1 : count * length + 1].reshape(count, length)
