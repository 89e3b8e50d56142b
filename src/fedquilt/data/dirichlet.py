"""Random label mixtures: Dirichlet, Dirichlet within class groups, and Pachinko allocation (FedEM's partitions)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedquilt.data.partition import Ints, Partition, _enough, _labels, _partition, _positive


def dirichlet(
    labels: npt.ArrayLike,
    clients: int,
    alpha: float = 0.4,
    groups: int | None = None,
    at_least: int = 1,
    seed: int = 0,
) -> Partition:
    """Divide each label among the clients by Dirichlet shares. Covers all samples.

    The smaller alpha, the more clients differ.
        With `groups`, the labels are first put in that many random groups, and each group is divided as one (FedEM's
    CIFAR-10: 3 groups). A client left with fewer than `at_least` samples is given some of the largest client's.

    >>> p = dirichlet([0] * 50 + [1] * 50, clients=4, alpha=0.3)
    >>> sum(len(part) for part in p), min(len(part) for part in p) > 0
    (100, True)
    """
    y = _labels(labels)
    _enough(len(y), clients, at_least)
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.unique(y))
    number = len(classes) if groups is None else groups
    if not 1 <= number <= max(len(classes), 1):
        raise ValueError(f"groups={groups}: give 1 to {len(classes)}, the number of labels")
    parts: list[list[Ints]] = [[] for _ in range(clients)]
    for group in np.array_split(classes, number):
        mine = rng.permutation(np.flatnonzero(np.isin(y, group)))
        shares = _shares(rng, clients, alpha)
        for i, piece in enumerate(np.split(mine, np.cumsum(rng.multinomial(len(mine), shares))[:-1])):
            parts[i].append(piece)
    return _partition(_topped_up([np.concatenate(p) for p in parts], at_least, rng), y)


def pachinko(
    labels: npt.ArrayLike,
    coarse: npt.ArrayLike,
    clients: int,
    alpha: float = 0.4,
    beta: float = 10.0,
    seed: int = 0,
) -> Partition:
    """Pachinko allocation (FedEM's CIFAR-100): each client mixes super-classes, and labels inside them, its own way.

    Every client draws the same number of samples (one more for some, so that all samples are dealt out): a super-class
    by its Dirichlet(alpha) mixture, a label in it by its Dirichlet(beta) mixture. What is used up is drawn no more.

    >>> p = pachinko([0] * 10 + [1] * 10 + [2] * 10, coarse=[0] * 20 + [1] * 10, clients=3)
    >>> [len(part) for part in p]
    [10, 10, 10]
    """
    y, top = _labels(labels), _labels(coarse)
    if len(y) != len(top):
        raise ValueError(f"{len(y)} labels and {len(top)} super-classes; give one of each for every sample")
    _enough(len(y), clients, 1)
    rng = np.random.default_rng(seed)
    _, fine_of = np.unique(y, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(fine_of == f)) for f in range(int(fine_of.max()) + 1)]
    parent = np.array([np.bincount(top[pool]).argmax() for pool in pools])
    left = np.array([len(pool) for pool in pools])
    parts: list[list[Ints]] = []
    for i in range(clients):
        size = len(y) // clients + (i < len(y) % clients)
        within = np.zeros(len(pools))
        over = _shares(rng, int(parent.max()) + 1, alpha)
        for c in np.unique(parent):
            within[parent == c] = _shares(rng, int((parent == c).sum()), beta)
        counts = _draw(rng, size, over, within, parent, left)
        parts.append([pool[n - k : n] for pool, n, k in zip(pools, left, counts, strict=True)])
        left = left - counts
    return _partition(parts, y)


def _shares(rng: np.random.Generator, size: int, alpha: float) -> npt.NDArray[np.float64]:
    """Dirichlet shares; where a tiny alpha underflows to all zeros, one place takes all."""
    draw = rng.dirichlet(np.full(size, _positive(alpha, "alpha")))
    if not np.isfinite(draw).all() or draw.sum() == 0:
        draw = np.zeros(size)
        draw[rng.integers(size)] = 1.0
    return np.asarray(draw / draw.sum(), dtype=np.float64)


def _draw(
    rng: np.random.Generator,
    size: int,
    over: npt.NDArray[np.float64],
    within: npt.NDArray[np.float64],
    parent: Ints,
    left: Ints,
) -> Ints:
    """How many samples of each label one client takes: multinomial draws, again for what was no longer there.

    Each pass either is the last or uses up at least one label for good, so there are at most as many as labels.
    """
    counts = np.zeros_like(left)
    while counts.sum() < size:
        free = left - counts > 0
        alive = np.bincount(parent[free], minlength=len(over)) > 0
        tops = np.where(alive, over, 0.0)
        tops = tops / tops.sum() if tops.sum() > 0 else alive / alive.sum()
        chance = np.zeros(len(left))
        for c in np.flatnonzero(alive):
            inside = free & (parent == c)
            weight = np.where(inside, within, 0.0)
            weight = weight / weight.sum() if weight.sum() > 0 else inside / inside.sum()
            chance += tops[c] * weight
        wanted = rng.multinomial(size - counts.sum(), chance / chance.sum())
        counts = counts + np.minimum(wanted, left - counts)
    return counts


def _topped_up(parts: list[Ints], at_least: int, rng: np.random.Generator) -> list[list[Ints]]:
    """Give clients below the minimum samples of the largest one; there are enough for everyone, so this ends."""
    for i in range(len(parts)):
        while len(parts[i]) < at_least:
            rich = int(np.argmax([len(p) for p in parts]))
            spare = min(at_least - len(parts[i]), len(parts[rich]) - at_least)
            gift = rng.permutation(len(parts[rich]))[:spare]
            parts[i] = np.concatenate([parts[i], parts[rich][gift]])
            parts[rich] = np.delete(parts[rich], gift)
    return [[p] for p in parts]
