"""The score-sharing paper's federation (Gudur, Balaji, Perepu 2020): unlike labels, unlike models, streams of data."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from fedquilt.client import Change, Client, ModelBuilder
from fedquilt.data import Dataset, load
from fedquilt.data.partition import Ints, by_label_sets, label_streams
from fedquilt.data.splits import random_split
from fedquilt.engines.settings import Training
from fedquilt.models import MLP, SmallCNN
from fedquilt.scenario import Scenario
from fedquilt.scenarios.inputs import centred

USERS = {"user-1": ("cat", "dog"), "user-2": ("dog", "sheep"), "user-3": ("sheep", "elephant")}
FIRST = {"user-1": (16, 32), "user-2": (16, 16, 32), "user-3": (16, 32)}
# Table 2: from which round on a user has which network; "mlp" marks the fully connected one
LATER: dict[str, dict[int, tuple[str, tuple[int, ...]]]] = {
    "user-1": {10: ("mlp", (16, 16, 32)), 14: ("cnn", (16,))},
    "user-2": {6: ("cnn", (16, 16, 32))},
    "user-3": {5: ("cnn", (8, 16, 16, 32))},
}


def animals_labels(
    seed: int = 0,
    per_label: int = 100,
    public: int = 500,
    rounds: int = 15,
    model_changes: bool = True,
    skew: float = 0.0,
    fraction: float = 1.0,
    data_dir: str | None = None,
) -> Scenario:
    """Score sharing's animals: three users with overlapping labels, a stream of photographs, networks that change.

    From the paper: cat, dog, sheep and elephant; users with {cat, dog}, {dog, sheep}, {sheep, elephant}; their
    networks, and when they change (Table 2); public data with all labels, 500 of each; new private data in each of 15
    rounds; Adam, 5 epochs a round. Chosen here: photographs of 48 x 48, 1400 a label (the paper: 128 x 128);
    `per_label` 100 a label and round, since 500 would be more than a user has: a label's private photographs are
    dealt out among its users and come round again only when used up; 85/15 of them to train and validate on. Half of
    the public data is the reference the server knows scores and accuracies of (`common`), the other half is
    `public_test`, which the paper does not keep apart; a user is tested on its labels there, as in the paper, since
    scores are shared on public data only. Where Table 2 names another activation only (user 2, round 6),
    the user starts anew with the same network. No early stopping. Every network gives logits for all four labels; a
    method is told which of them a user owns. `skew` above 0 varies the amounts of a round's labels by Dirichlet
    shares; `fraction` takes that share of all photographs and amounts.
    """
    if rounds < 1 or not 0 < fraction <= 1 or skew < 0:
        raise ValueError(
            f"scenario 'animals-labels' with rounds={rounds}, fraction={fraction}, skew={skew}: "
            "give 1 round or more, a fraction above 0 and at most 1, a skew of 0 or more"
        )
    data = load("animals4", data_dir).with_labels(("cat", "dog", "sheep", "elephant"))
    per_label, public = max(1, round(per_label * fraction)), max(2, round(public * fraction))
    rng = np.random.default_rng(seed)
    order = [rng.permutation(np.flatnonzero(data.y == label)) for label in range(data.classes)]
    order = [mine[: max(public + 4, round(fraction * len(mine)))] for mine in order]
    common = np.concatenate([mine[: public // 2] for mine in order])
    public_test = np.concatenate([mine[public // 2 : public] for mine in order])
    private = np.sort(np.concatenate([mine[public:] for mine in order]))
    owned = {user: tuple(data.label_names.index(n) for n in names) for user, names in USERS.items()}
    pools = by_label_sets(data.y[private], list(owned.values()), everything=True, seed=seed)
    made = []
    for number, (user, pool) in enumerate(zip(USERS, pools, strict=True)):
        mine = private[pool]
        train, validation, _ = random_split(data.y[mine], (0.85, 0.15, 0.0), seed + number)
        learn, test = mine[train], public_test[np.isin(data.y[public_test], owned[user])]
        stream = label_streams(data.y[learn], [owned[user]], rounds, per_label, skew or None, seed + number)[0]
        networks = {r: _network(*what, data) for r, what in LATER[user].items()} if model_changes else {}
        made.append(
            Client(
                user,
                _network("cnn", FIRST[user], data),
                _pair(data, learn[stream[0]]),
                _pair(data, mine[validation]),
                _pair(data, test),
                labels=owned[user],
                changes={
                    r: Change(model=networks.get(r), train=_pair(data, learn[stream[r - 1]]))
                    for r in range(2, rounds + 1)
                },
            )
        )
    training = Training(rounds=rounds, epochs=5, batch=32, optimiser="adam", lr=0.001)
    return Scenario(
        "animals-labels", made, training, _pair(data, common), _pair(data, public_test), label_names=data.label_names
    )


def _network(kind: str, sizes: tuple[int, ...], data: Dataset) -> ModelBuilder:
    pixels = data.x.shape[1]
    if kind == "mlp":
        return partial(MLP, (3, pixels, pixels), sizes, data.classes)
    return partial(SmallCNN, sizes, data.classes, 3, pixels)


def _pair(data: Dataset, index: Ints) -> tuple[npt.NDArray[np.float32], Ints]:
    return centred(data, index), data.y[index]
