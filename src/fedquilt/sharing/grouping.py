"""Circles from what is declared (traits, labels) and from how alike models answer (FedDL's affinity)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

Linkage = Literal["component", "average"]

# Doubles of one block of pairs x samples x classes: a cache's worth on a CPU, 256 MiB a temporary on a GPU.
_BLOCK = {"cpu": 2**18, "cuda": 2**25}


def circles_by_trait(values: Sequence[Hashable]) -> Tensor:
    """(K,) one circle per distinct value, numbered in sorted order; None keeps a client out.

    >>> circles_by_trait(["watch", "phone", None, "watch"]).tolist()
    [1, 0, -1, 1]
    """
    # By type first: values of different types do not compare. Tuples and the like sort by how they print.
    known = sorted(
        {v for v in values if v is not None}, key=lambda v: (type(v).__name__, v if isinstance(v, int) else str(v))
    )
    number = {value: i for i, value in enumerate(known)}
    return torch.tensor([-1 if v is None else number[v] for v in values], dtype=torch.int64)


def circles_by_labels(labels: Sequence[Collection[int]], classes: int) -> Tensor:
    """(classes, K) for each label one circle of the clients that have it.

    >>> circles_by_labels([{0, 1}, {1}], classes=2).tolist()
    [[0, -1], [0, 0]]
    """
    rows = [[0 if label in mine else -1 for mine in labels] for label in range(classes)]
    return torch.tensor(rows, dtype=torch.int64).reshape(classes, len(labels))


def refine(circle: Tensor, values: Sequence[Hashable]) -> Tensor:
    """(K,) each circle split by a further value (a trait, a signature); None and -1 stay out.

    >>> refine(torch.tensor([0, 0, 0, 1]), ["a", "b", "a", "a"]).tolist()
    [0, 1, 0, 2]
    """
    out = (circle < 0) | torch.tensor([v is None for v in values], dtype=torch.bool)
    return number_circles(circle, circles_by_trait(values), out)


def number_circles(parents: Tensor, children: Tensor, out: Tensor) -> Tensor:
    """(K,) distinct (parent, child) pairs numbered from 0 in the order of their first client; -1 where `out`."""
    seen: dict[tuple[int, int], int] = {}
    pairs = zip(parents.tolist(), children.tolist(), out.tolist(), strict=True)
    ids = [-1 if left else seen.setdefault((parent, child), len(seen)) for parent, child, left in pairs]
    return torch.tensor(ids, dtype=torch.int64)


def affinity(probabilities: Tensor) -> Tensor:
    """(K, K) how unlike the clients' models answer: Jensen-Shannon divergence in nats, the mean over the samples.

    `probabilities` is (clients, samples, classes), what each whole model says about the same samples (FedDL, eq. 1-3).
    0 means the same answers, ln 2 answers that never overlap. Only pairs i < j are computed, block by block, so the
    memory is that of the result and a few blocks. A client whose probabilities are not finite has NaN to all others.

    >>> affinity(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]]))
    tensor([[0.0000, 0.6931, 0.0000],
            [0.6931, 0.0000, 0.6931],
            [0.0000, 0.6931, 0.0000]])
    """
    if probabilities.ndim != 3 or 0 in probabilities.shape[1:]:
        raise ValueError(
            f"affinity needs (clients, samples, classes) probabilities, not the shape {tuple(probabilities.shape)}"
        )
    clients, samples, classes = probabilities.shape
    off = ((probabilities.sum(-1) - 1).abs() > 1e-3) | (probabilities < 0).any(-1)  # NaN is neither: it gives NaN below
    if bool(off.any()):
        raise ValueError(
            f"client {int(off.any(1).nonzero()[0])}: its answers are not probabilities that sum to 1; "
            "take the softmax of the logits first"
        )
    flat = probabilities.reshape(clients, samples * classes)
    result = flat.new_zeros(clients, clients, dtype=torch.float64)
    for rows, peers, columns in _pair_blocks(clients, flat.shape[1], flat.is_cuda):
        p, q = _log_safe(flat[rows, columns]), _log_safe(flat[peers, columns])
        middle = (p[:, None] + q).mul_(0.5)  # (rows, peers, columns)
        # x log x is convex, so no term is below 0 and equal answers give exactly 0: nothing to cancel in the sum.
        terms = middle.log().mul_(middle).neg_()
        terms += (p * p.log() * 0.5)[:, None]
        terms += q * q.log() * 0.5
        result[rows, peers] += terms.sum(-1)
    result = (result / samples).clamp_(min=0).triu_(1)
    return (result + result.T).to(probabilities.dtype)


def _log_safe(p: Tensor) -> Tensor:
    """Doubles that have a logarithm: x log x of 1e-300 is as good as 0 log 0 = 0."""
    return p.double().clamp(min=1e-300)


def _pair_blocks(clients: int, columns: int, on_gpu: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Blocks of rows, peers and columns that cover every pair i < j once and hold a bounded number of elements."""
    budget = _BLOCK["cuda" if on_gpu else "cpu"]
    width = min(columns, max(1, budget // min(clients, 32) ** 2))
    side = max(1, min(clients, int((budget / width) ** 0.5)))
    for a in range(0, clients, side):
        for b in range(a, clients, side):
            for c in range(0, columns, width):
                yield slice(a, a + side), slice(b, b + side), slice(c, c + width)


def group_by_affinity(divergence: Tensor, parents: Tensor, linkage: Linkage = "component") -> tuple[Tensor, Tensor]:
    """(K,) circle and (K,) freq: each group of the layer below split into clients that are alike (FedDL, section 5).

    Inside a parent group the threshold is the mean divergence of its pairs, and two clients are linked when theirs is
    below it. `linkage="component"`: circles are what links connect, the paper's letter. `"average"`: agglomerative with
    average distance, cut at the same threshold. freq is a client's number of links in its circle, 1 for a client alone.
    Where the divergences of a group are all the same (to rounding: within 1e-6 of the largest or 1e-7 nats) nothing is
    below their mean, and all are linked: a group of two stays together, and so do identical clients. A pair whose
    divergence is NaN is never linked and not in the mean. Circles are numbered from 0 in the order of their first
    client; a client with parent -1 is out: circle -1, freq 0.

    >>> near = torch.tensor([[0.0, 0.1, 0.5], [0.1, 0.0, 0.6], [0.5, 0.6, 0.0]])       # mean 0.4
    >>> circle, freq = group_by_affinity(near, parents=torch.tensor([0, 0, 0]))
    >>> circle.tolist(), freq.tolist()
    ([0, 0, 1], [1, 1, 1])
    """
    if linkage not in ("component", "average"):
        raise ValueError(f"linkage '{linkage}' is not known; take component or average")
    parents = torch.as_tensor(parents).cpu().long()
    clients = len(parents)
    if divergence.shape != (clients, clients):
        raise ValueError(f"divergence has shape {tuple(divergence.shape)}; {clients} parents need {(clients, clients)}")
    distance = divergence.detach().cpu().double()
    part = torch.zeros(clients, dtype=torch.int64)
    links = torch.zeros(clients, clients, dtype=torch.bool)
    for parent in sorted(set(parents[parents >= 0].tolist())):
        group = (parents == parent).nonzero()[:, 0]
        part[group], links[group[:, None], group] = _split(distance[group[:, None], group], linkage)
    circle = number_circles(parents, part, parents < 0)
    freq = (links & (circle == circle[:, None])).sum(1).clamp(min=1)
    return circle, torch.where(circle < 0, 0, freq)


def _split(distance: Tensor, linkage: Linkage) -> tuple[Tensor, Tensor]:
    """(g,) part of each client and (g, g) links inside one parent group."""
    # Imported here: scikit-learn takes longer to import than all of this package, and few methods look for circles.
    from scipy.sparse.csgraph import connected_components
    from sklearn.cluster import AgglomerativeClustering

    g = len(distance)
    known = ~distance.isnan() & ~torch.eye(g, dtype=torch.bool)
    if not bool(known.any()):
        return torch.arange(g), known
    given = distance[known]
    threshold = given.mean()  # every pair is in it twice, which leaves the mean as it is
    if float(given.max() - given.min()) <= max(1e-6 * float(given.max()), 1e-7):
        links = known
        whole = True
    else:
        links = known & (distance < threshold)
        whole = False
    if linkage == "component" or whole:
        return torch.from_numpy(connected_components(links.numpy(), directed=False)[1]).long(), links
    far = torch.where(known, distance, 10 * given.max()).fill_diagonal_(0)
    found = AgglomerativeClustering(
        n_clusters=None, distance_threshold=float(threshold), metric="precomputed", linkage="average"
    ).fit(far.numpy())
    return torch.from_numpy(found.labels_).long(), links


def adjusted_rand(found: Tensor, declared: Tensor) -> float:
    """How well two groupings of the same clients agree: 1 is the same groups, about 0 is chance.

    >>> adjusted_rand(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 2, 2]))
    1.0
    """
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(torch.as_tensor(declared).tolist(), torch.as_tensor(found).tolist()))
