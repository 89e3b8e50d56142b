"""ModFL's federation: device generations crossed with cohorts of label sets. Used by the four ModFL scenarios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquilt.client import Client, ModelBuilder
from fedquilt.data.partition import Ints, by_label_sets, cohort_sets
from fedquilt.data.splits import Parts


@dataclass(frozen=True, eq=False)
class Generation:
    """One generation of devices: its network, and all samples its clients will be dealt, already split.

    `inputs` turns indices into samples, so that only what is dealt is ever converted.
    """

    name: str
    model: ModelBuilder
    inputs: Callable[[Ints], npt.NDArray[np.float32]]
    y: Ints
    parts: Parts


def per_label_sample(y: Ints, amount: int, seed: int) -> Ints:
    """At most `amount` samples of each label, drawn at random, in their old order.

    >>> per_label_sample(np.array([0, 0, 0, 1]), 2, seed=0).size
    3
    """
    rng = np.random.default_rng(seed)
    kept = [rng.permutation(np.flatnonzero(y == label))[:amount] for label in np.unique(y)]
    return np.sort(np.concatenate(kept)).astype(np.int64)


def cohort_clients(
    scenario: str,
    generations: Sequence[Generation],
    clients: int,
    cohorts: int,
    labels: int,
    classes: int,
    seed: int,
) -> list[Client]:
    """Clients that alternate between the generations; each cohort has its own labels and clients of each generation.

    Every split of a generation's samples is dealt by itself, label by label, in equal amounts: a sample is on one
    client and in one of its splits. Validation samples that do not suffice for all are left out.
    """
    sets = cohort_sets(classes, cohorts, labels, seed)
    if clients < len(generations):
        raise ValueError(f"scenario '{scenario}' with clients={clients}: give at least one for each generation")
    samples = sum(len(generation.parts.train) for generation in generations)
    if clients > samples:
        raise ValueError(
            f"scenario '{scenario}' has {samples} samples to train on for clients={clients}; take "
            "fewer clients or a larger fraction"
        )
    made: dict[int, Client] = {}
    for g, generation in enumerate(generations):
        numbers = range(g, clients, len(generations))
        homes = [i // len(generations) % len(sets) for i in numbers]
        dealt = [_deal(scenario, generation, part, [sets[h] for h in homes], seed) for part in Parts._fields]
        for k, (i, home) in enumerate(zip(numbers, homes, strict=True)):
            train, validation, test = ((generation.inputs(d[k]), generation.y[d[k]]) for d in dealt)
            made[i] = Client(
                f"{generation.name}-cohort{home + 1}-{k // len(sets) + 1}",
                generation.model,
                train,
                validation,
                test,
                traits={"device": generation.name, "cohort": f"cohort{home + 1}"},
                labels=sets[home],
            )
    return [made[i] for i in sorted(made)]


def _deal(scenario: str, generation: Generation, part: str, sets: list[tuple[int, ...]], seed: int) -> list[Ints]:
    """A split's samples for each client of the generation, the same amount of each of its labels."""
    pool = getattr(generation.parts, part)
    y = generation.y[pool]
    owners = {label: sum(label in s for s in sets) for s in sets for label in s}
    amount = min(int((y == label).sum()) // number for label, number in owners.items())
    if amount == 0 and part == "validation":
        return [pool[:0] for _ in sets]
    if amount == 0:
        scarce = min(owners, key=lambda label: int((y == label).sum()) / owners[label])
        raise ValueError(
            f"scenario '{scenario}': label {scarce} of '{generation.name}' has {int((y == scarce).sum())} {part} "
            f"samples for {owners[scarce]} clients; take fewer clients or a larger fraction"
        )
    return [pool[mine] for mine in by_label_sets(y, sets, per_label=amount, seed=seed)]
