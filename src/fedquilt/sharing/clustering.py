"""Circles from how alike updates are: agglomerative clustering on cosine distance, steady from one time to the next."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

_MOST_TRIED = 64  # clusters tried when their number is not given; a federation with more has given traits


def cluster_updates(
    updates: Tensor,
    number: int | None = None,
    previous: Tensor | None = None,
    hysteresis: float = 0.1,
    convincing: float = 0.25,
    reserved: Collection[int] = (),
) -> Tensor:
    """(k,) a circle id for each client, from its update (k, size): ModFL's cohorts when they are not declared.

    Average linkage on cosine distance. `number=None` takes the number of clusters from 2 to k - 1 (at most 64) with the
    best mean silhouette, and one cluster when none is above `convincing` (up to 0.25 there is "no substantial
    structure", Kaufman and Rousseeuw 1990). With `previous` ids (-1: had none) clusters are matched to the earlier ones
    by the members they have in common, and a client leaves its circle only if its mean distance to the new one is below
    (1 - hysteresis) times that to the old. New circles take the lowest ids that are neither in `previous` nor in
    `reserved`. An update that is zero or not finite has cosine 0 with all others.

    >>> two = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    >>> cluster_updates(two).tolist()
    [0, 0, 1, 1]
    >>> cluster_updates(two, previous=torch.tensor([7, 7, 3, 3])).tolist()
    [7, 7, 3, 3]
    """
    if updates.ndim != 2 or len(updates) == 0:
        raise ValueError(f"updates have shape {tuple(updates.shape)}; give one row per client")
    if number is not None and number < 1:
        raise ValueError(f"number={number} clusters cannot hold anybody; give 1 or more, or None to find it")
    if not 0 <= hysteresis < 1:
        raise ValueError(f"hysteresis={hysteresis} must be from 0 (move at once) to below 1")
    distance = cosine_distance(updates)
    found = _cut(distance, number, convincing)
    if previous is None:
        return _renumber(found, {}, reserved)
    before = torch.as_tensor(previous).cpu().long()
    ids = keep_ids(found, before, reserved)
    return _hold(ids, before, distance, hysteresis) if hysteresis else ids


def keep_ids(found: Tensor, previous: Tensor, reserved: Collection[int] = ()) -> Tensor:
    """(k,) groups found anew under the ids of the earlier groups (-1: none) that they have most members in common with.

    The others take the lowest ids that are neither in `previous` nor in `reserved`.

    >>> keep_ids(torch.tensor([0, 0, 1, 2]), previous=torch.tensor([7, 7, 7, -1]), reserved=[0]).tolist()
    [7, 7, 1, 2]
    """
    if previous.shape != found.shape:
        raise ValueError(f"previous has shape {tuple(previous.shape)} for {len(found)} updates; give one id each")
    known = {int(i) for i in previous.tolist() if i >= 0}
    return _renumber(found, _match(found, previous), known | set(reserved))


def cosine_distance(updates: Tensor) -> Tensor:
    """(k, k) 1 - cosine, on the CPU in double precision; 0 on the diagonal.

    >>> cosine_distance(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    rows = updates.detach().double()
    rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)
    unit = torch.nn.functional.normalize(rows, dim=1)
    distance = (1 - unit @ unit.T).clamp(0, 2).cpu()
    return ((distance + distance.T) / 2).fill_diagonal_(0)


def _cut(distance: Tensor, number: int | None, convincing: float) -> Tensor:
    """(k,) clusters of the given number, or of the number that the silhouette speaks for."""
    # Imported here: scikit-learn takes longer to import than all of this package, and few methods look for circles.
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import silhouette_score

    k = len(distance)

    def labels(clusters: int) -> Tensor:
        if clusters == 1 or k == 1:
            return torch.zeros(k, dtype=torch.int64)
        tree = AgglomerativeClustering(n_clusters=clusters, metric="precomputed", linkage="average")
        return torch.from_numpy(tree.fit(distance.numpy()).labels_).long()

    if number is not None:
        return labels(min(number, k))
    best, best_score = labels(1), convincing
    for clusters in range(2, min(k - 1, _MOST_TRIED) + 1):
        tried = labels(clusters)
        score = float(silhouette_score(distance.numpy(), tried.numpy(), metric="precomputed"))
        if score > best_score + 1e-9:  # on a tie fewer clusters
            best, best_score = tried, score
    return best


def _match(found: Tensor, before: Tensor) -> dict[int, int]:
    """Found cluster -> earlier id, so that as many clients as possible keep their id (Hungarian)."""
    from scipy.optimize import linear_sum_assignment

    earlier = sorted({int(i) for i in before.tolist() if i >= 0})
    clusters = sorted(set(found.tolist()))
    common = torch.tensor(
        [[int(((found == new) & (before == old)).sum()) for old in earlier] for new in clusters]
    ).reshape(len(clusters), len(earlier))
    rows, columns = linear_sum_assignment(common.numpy(), maximize=True)
    pairs = zip(rows.tolist(), columns.tolist(), strict=True)
    return {clusters[r]: earlier[c] for r, c in pairs if common[r, c] > 0}


def _renumber(found: Tensor, matched: dict[int, int], reserved: Collection[int]) -> Tensor:
    """(k,) matched clusters under their id, the others under free ids in the order of their first client."""
    names, taken = dict(matched), set(reserved) | set(matched.values())
    for cluster in found.tolist():
        if cluster not in names:
            names[cluster] = next(i for i in range(len(taken) + 1) if i not in taken)
            taken.add(names[cluster])
    return torch.tensor([names[c] for c in found.tolist()], dtype=torch.int64)


def _hold(ids: Tensor, before: Tensor, distance: Tensor, hysteresis: float) -> Tensor:
    """(k,) ids, where a client not clearly closer to its new circle stays in the old one, if that still exists."""
    inside = ids == ids[:, None]
    kept = ids.clone()
    for i in (ids != before).nonzero()[:, 0].tolist():
        old, new = ids == before[i], inside[i].clone()
        new[i] = False
        if not bool(old.any()):
            continue
        to_old = distance[i, old].mean()
        if bool(new.any()):
            to_new = distance[i, new].mean()
        else:  # it would be alone: it leaves if it is clearly farther off than the old circle's members from each other
            to_new = distance[old][:, old].sum() / max(1, int(old.sum()) * (int(old.sum()) - 1))
        if not bool(to_new < (1 - hysteresis) * to_old):
            kept[i] = before[i]
    return kept
