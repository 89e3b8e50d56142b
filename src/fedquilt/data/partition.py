"""Partitions: pure functions from labels (and subjects) to the indices each client gets, deterministic in the seed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedquilt.data.label_table import LabelTable, count_labels

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """Who gets which samples: one array of indices a client. Prints and plots its client x label table.

    >>> p = iid([0, 0, 1, 1], clients=2)
    >>> len(p), sorted(p[0].tolist() + p[1].tolist())
    (2, [0, 1, 2, 3])
    >>> print(p.named(labels=["cat", "dog"]))
        cat dog  all
    0     1   1    2
    1     1   1    2
    all   2   2    4
    """

    parts: tuple[Ints, ...]
    labels: Ints = field(repr=False)
    label_names: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Ints]:
        return iter(self.parts)

    def __getitem__(self, client: int) -> Ints:
        return self.parts[client]

    def named(self, clients: Sequence[str] = (), labels: Sequence[str] = ()) -> Partition:
        """The same partition with names for its table."""
        return Partition(self.parts, self.labels, tuple(labels) or self.label_names, tuple(clients) or self.names)

    def table(self) -> LabelTable:
        """The client x label table."""
        classes = max(len(self.label_names), int(self.labels.max(initial=-1)) + 1)
        counts = count_labels([self.labels[p] for p in self.parts], classes)
        names = self.names or tuple(str(i) for i in range(len(self)))
        return LabelTable(counts, names, self.label_names or tuple(str(j) for j in range(classes)))

    def __str__(self) -> str:
        return str(self.table())

    def plot(self, path: str | Path | None = None, title: str = "") -> Any:
        """Draw the client x label table; see `LabelTable.plot`."""
        return self.table().plot(path, title)


def iid(labels: npt.ArrayLike, clients: int, seed: int = 0) -> Partition:
    """Every label dealt out evenly: clients differ by at most one sample of each label. Covers all samples.

    >>> [len(part) for part in iid([0] * 6 + [1] * 6, clients=3)]
    [4, 4, 4]
    """
    y = _labels(labels)
    _enough(len(y), clients, 1)
    rng = np.random.default_rng(seed)
    parts: list[list[Ints]] = [[] for _ in range(clients)]
    first = 0  # the client that takes a label's first spare sample moves on, or the first clients would get them all
    for label in np.unique(y):
        mine = rng.permutation(np.flatnonzero(y == label))
        for k in range(clients):
            parts[(first + k) % clients].append(mine[k::clients])
        first += len(mine) % clients
    return _partition(parts, y)


def cohort_sets(classes: int, cohorts: int, labels: int, seed: int = 0) -> list[tuple[int, ...]]:
    """A different set of `labels` labels for each cohort, overlapping, each label in as many cohorts as any other.

    The sets are windows on a shuffled ring of labels. All labels means one cohort (ModFL's IID case): one set.

    >>> cohort_sets(classes=4, cohorts=4, labels=2)
    [(0, 2), (0, 1), (1, 3), (2, 3)]
    """
    if not 1 <= labels <= classes:
        raise ValueError(f"{labels} labels a cohort out of {classes}: give a number from 1 to {classes}")
    if labels == classes:
        return [tuple(range(classes))]
    if not 1 <= cohorts <= classes:
        raise ValueError(f"{cohorts} cohorts over {classes} labels: give 1 to {classes}, so that no two are the same")
    ring = np.random.default_rng(seed).permutation(classes)
    starts = [round(j * classes / cohorts) for j in range(cohorts)]
    return [tuple(sorted(int(ring[(s + k) % classes]) for k in range(labels))) for s in starts]


def by_label_sets(
    labels: npt.ArrayLike,
    sets: Sequence[Collection[int]],
    per_label: int | None = None,
    everything: bool = False,
    seed: int = 0,
) -> Partition:
    """Each client gets samples of its own set of labels, the same amount of each (ModFL).

    `per_label` is that amount; by default the largest that every client can have. With `everything`, each label is
    dealt out whole among the clients that have it, so amounts differ where labels are unequally common.

    >>> print(by_label_sets([0] * 4 + [1] * 8 + [2] * 4, sets=[{0, 1}, {1, 2}]))
        0 1 2  all
    0   4 4 ·    8
    1   · 4 4    8
    all 4 8 4   16
    """
    y = _labels(labels)
    owners = {label: [i for i, s in enumerate(sets) if label in s] for label in sorted(set().union(*sets))}
    most = {label: int((y == label).sum()) // len(who) for label, who in owners.items()}
    amount = min(most.values(), default=0) if per_label is None else per_label
    scarce = min(most, key=lambda label: most[label], default=0)
    if not everything and (amount < 1 or most.get(scarce, 0) < amount):
        raise ValueError(
            f"label {scarce} has {int((y == scarce).sum())} samples for {len(owners.get(scarce, []))} clients, "
            f"too few for {max(amount, 1)} each; take fewer clients, less per label or more data"
        )
    rng = np.random.default_rng(seed)
    parts: list[list[Ints]] = [[] for _ in sets]
    for label, who in owners.items():
        mine = rng.permutation(np.flatnonzero(y == label))
        dealt = mine if everything else mine[: amount * len(who)]
        for k, i in enumerate(rng.permutation(who)):  # shuffled, or the first clients would get every spare sample
            parts[i].append(dealt[k :: len(who)])
    return _partition(parts, y, at_least=1)


def specialists(labels: npt.ArrayLike, extra: Sequence[int], seed: int = 0) -> Partition:
    """As many clients as classes; everyone has some of each class and client c more of class c (the thesis).

    Class c is cut in `clients + extra[c]` equal fragments; every client gets one, client c the `extra[c]` others too.

    >>> print(specialists([0] * 5 + [1] * 4, extra=[3, 0]))
        0 1  all
    0   4 2    6
    1   1 2    3
    all 5 4    9
    """
    y = _labels(labels)
    clients = len(extra)
    if min(extra, default=0) < 0 or int(y.max(initial=-1)) >= clients:
        raise ValueError(
            f"{clients} numbers of extra fragments for labels up to {int(y.max(initial=-1))}: "
            "give one (0 or more) a class"
        )
    rng = np.random.default_rng(seed)
    parts: list[list[Ints]] = [[] for _ in range(clients)]
    for c, more in enumerate(extra):
        fragments = np.array_split(rng.permutation(np.flatnonzero(y == c)), clients + more)
        # array_split puts the longer fragments first: deal them out shuffled
        order = rng.permutation(clients + more)
        for i in range(clients):
            parts[i].append(fragments[order[i]])
        parts[c].extend(fragments[j] for j in order[clients:])
    return _partition(parts, y, at_least=1)


def by_subject(subjects: npt.ArrayLike, labels: npt.ArrayLike, at_least: int = 1) -> Partition:
    """One client a subject (writer, user), in the order of their numbers; those with too few samples are left out.

    >>> by_subject([4, 2, 4], labels=[0, 0, 1]).names
    ('2', '4')
    """
    who, y = np.asarray(subjects), _labels(labels)
    found = {str(s): np.flatnonzero(who == s) for s in np.unique(who)}
    kept = {name: part for name, part in found.items() if len(part) >= at_least}
    if not kept:
        most = max(map(len, found.values()), default=0)
        raise ValueError(f"no subject has {at_least} samples; the most any has is {most}")
    return Partition(tuple(kept.values()), y, names=tuple(kept))


def quantity_skew(
    labels: npt.ArrayLike, clients: int, alpha: float = 1.0, at_least: int = 1, seed: int = 0
) -> Partition:
    """Clients of very different size (Dirichlet shares), one mixture of labels for all. Covers all samples.

    >>> sorted(len(part) for part in quantity_skew([0] * 100, clients=3, alpha=0.5))
    [1, 32, 67]
    """
    y = _labels(labels)
    _enough(len(y), clients, at_least)
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(clients, _positive(alpha, "alpha")))
    free = len(y) - at_least * clients  # everyone has its minimum; the rest is dealt by the shares
    sizes = at_least + rng.multinomial(free, share)
    parts = np.split(rng.permutation(len(y)), np.cumsum(sizes)[:-1])
    return _partition([[p] for p in parts], y)


def label_streams(
    labels: npt.ArrayLike,
    sets: Sequence[Collection[int]],
    rounds: int,
    per_label: int,
    alpha: float | None = None,
    seed: int = 0,
) -> list[list[Ints]]:
    """What arrives at each client in each round: `streams[client][round]` (score sharing).

    A label's samples are dealt out among the clients that have it, so nothing is in two clients' streams. A round
    brings `per_label` samples of each of a client's labels, without repetition inside the round; when the client's
    share is used up, it comes round again in a new order. With `alpha`, a round's amounts vary around that (Dirichlet
    shares, at least 1 each).

    >>> streams = label_streams([0] * 6 + [1] * 6, sets=[{0}, {0, 1}], rounds=2, per_label=3)
    >>> [[len(part) for part in client] for client in streams]
    [[3, 3], [6, 6]]
    """
    y = _labels(labels)
    pools = by_label_sets(y, sets, everything=True, seed=seed)
    rng = np.random.default_rng([seed, 1])
    streams = []
    for pool, owned in zip(pools, sets, strict=True):
        wanted = np.full((rounds, len(owned)), per_label)
        if alpha is not None:
            share = rng.dirichlet(np.full(len(owned), _positive(alpha, "alpha")), size=rounds)
            wanted = 1 + np.stack([rng.multinomial((per_label - 1) * len(owned), p) for p in share])
        rows: list[list[Ints]] = [[] for _ in range(rounds)]
        for j, label in enumerate(sorted(owned)):
            mine = pool[y[pool] == label]
            ring, at = rng.permutation(mine), 0
            for r in range(rounds):
                take = min(int(wanted[r, j]), len(mine))
                if at + take > len(ring):
                    ring, at = rng.permutation(mine), 0
                rows[r].append(ring[at : at + take])
                at += take
        streams.append([np.sort(np.concatenate(row)) for row in rows])
    return streams


def subset(labels: npt.ArrayLike, fraction: float, seed: int = 0) -> Ints:
    """A random share of the samples of each label (at least one of each), sorted: for runs on less data.

    >>> len(subset([0] * 10 + [1] * 30, 0.1))
    4
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: give a share of the data above 0 and at most 1")
    y = _labels(labels)
    rng = np.random.default_rng(seed)
    kept = []
    for label in np.unique(y):
        mine = rng.permutation(np.flatnonzero(y == label))
        kept.append(mine[: max(1, round(fraction * len(mine)))])
    return np.sort(np.concatenate(kept)).astype(np.int64) if kept else np.zeros(0, np.int64)


def _labels(labels: npt.ArrayLike) -> Ints:
    y = np.asarray(labels, dtype=np.int64)
    if y.ndim != 1 or (len(y) and y.min() < 0):
        raise ValueError(f"labels of shape {y.shape}: give one whole number, 0 or more, for each sample")
    return y


def _positive(value: float, what: str) -> float:
    if not value > 0:
        raise ValueError(f"{what}={value} must be above 0; the smaller, the more clients differ")
    return value


def _enough(samples: int, clients: int, at_least: int) -> None:
    if clients < 1 or samples < clients * at_least:
        raise ValueError(
            f"{samples} samples cannot give {clients} clients {at_least} each; take fewer clients or more data"
        )


def _partition(parts: Sequence[Sequence[Ints]], y: Ints, at_least: int = 0) -> Partition:
    whole = tuple(np.sort(np.concatenate(p)).astype(np.int64) if p else np.zeros(0, np.int64) for p in parts)
    for i, part in enumerate(whole):
        if len(part) < at_least:
            raise ValueError(f"client {i} would have {len(part)} samples; take fewer clients or more data")
    return Partition(whole, y)
