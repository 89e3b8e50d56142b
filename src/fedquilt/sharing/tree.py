"""A tree of circles: those of a layer split those of the layer below.

`circles` holds for each layer, from the bottom up, the circle of each client (K,), named by the number of its first
client; -1: it has none there. `layers` says for each layer what a client has there, None for nothing: clients share
only where that is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedquilt.sharing.grouping import Linkage, refine

Layers = Sequence[Sequence[Hashable]]


class Tree(NamedTuple):
    """The circles of the layers that have some, and in each how many links every client has to others of its own."""

    circles: Sequence[Tensor]
    links: Sequence[Tensor]


def below(circles: Sequence[Tensor], there: Tensor, layers: Layers) -> Tensor:
    """(K,) what the circles of the next layer must lie in; -1 for clients without that layer, or not `there`.

    >>> below([torch.tensor([0, 0, 0])], torch.tensor([True] * 3), [["a"] * 3, ["b", "c", "b"]]).tolist()
    [0, 1, 0]
    """
    return refine(circles[-1] if circles else torch.where(there, 0, -1), layers[len(circles)])


def first_of_each(circle: Tensor) -> Tensor:
    """(K,) each circle named by the number of its first client: a name lasts as long as its first member stays.

    >>> first_of_each(torch.tensor([1, 0, -1, 1])).tolist()
    [0, 1, -1, 0]
    """
    first: dict[int, int] = {}
    return torch.tensor([-1 if c < 0 else first.setdefault(c, i) for i, c in enumerate(circle.tolist())])


def with_others(circle: Tensor) -> Tensor:
    """(K,) whose circle has more members than itself.

    >>> with_others(torch.tensor([0, 0, 2, -1])).tolist()
    [True, True, False, False]
    """
    return ((circle[:, None] == circle) & (circle >= 0)).sum(1) > 1


def place(i: int, divergence: Tensor, tree: Tree, there: Tensor, layers: Layers, linkage: Linkage) -> Tree:
    """The tree with one client more, and nobody else moved: it joins the closest circle of each layer, bottom up.

    It does so while that circle is not farther off than the threshold: the mean divergence (K, K) over the pairs of
    those in the circle below, itself among them. From there on it is alone. How far off a circle is, is its closest
    member (`component`: one link joins) or the mean over its members (`average`).
    """
    circles, links = [c.clone() for c in tree.circles], [n.clone() for n in tree.links]
    for layer, (circle, linked) in enumerate(zip(circles, links, strict=True)):
        inside = below(circles[:layer], there, layers)
        if inside[i] < 0:
            continue
        circle[i], linked[i] = i, 1
        peers = ((inside == inside[i]) & (circle >= 0)).nonzero()[:, 0]
        peers = peers[peers != i]
        if len(peers) == 0:
            continue
        threshold = _mean_of_pairs(divergence, torch.cat([peers, torch.tensor([i])]))
        groups = sorted(set(circle[peers].tolist()))
        members = [peers[circle[peers] == group] for group in groups]
        far = torch.stack([_how_far(divergence[i, group], linkage) for group in members])
        if bool(far.min() <= threshold):  # with one other only, they stay together
            nearest = int(far.argmin())
            circle[i] = groups[nearest]
            linked[i] = max(1, int((divergence[i, members[nearest]] <= threshold).sum()))
    return Tree(circles, links)


def _how_far(divergence: Tensor, linkage: Linkage) -> Tensor:
    """How far off a circle is, from the divergences to its members; those that are not known are left out."""
    far = divergence.nan_to_num(torch.inf).min() if linkage == "component" else divergence.nanmean()
    return far.nan_to_num(torch.inf)


def _mean_of_pairs(divergence: Tensor, who: Tensor) -> Tensor:
    within = divergence[who[:, None], who]
    return within[~torch.eye(len(who), dtype=torch.bool)].nanmean()
