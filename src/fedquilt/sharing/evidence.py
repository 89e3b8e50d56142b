"""What sharing would cost, from noisy measurements: circles by agglomeration that stops where the noise says so.

Client i has measured the direction in which a unit should move twice, on two halves of its samples: a_i and b_i. With
m_i = (a_i + b_i) / 2 and M_i its expectation,

    <M_i, M_j> ~ <m_i, m_j>  (i != j),    |M_i|^2 ~ <a_i, b_i>,    noise of m_i: v_i = |a_i - b_i|^2 / 4.

If the clients of a set C share the unit with weights w, each follows the mean of their m in the place of its own M_i:

    cost_i(C) = lam |M_C - M_i|^2 + sum_j w_j^2 v_j,    M_C = sum_j w_j M_j,

what it loses by following others and what it still has of everybody's noise. `lam` below 1 says that a client makes up
for a part of the former when it trains by itself. Alone it pays v_i. All of this follows from inner products.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedquilt.sharing.grouping import number_circles

_LOUDEST = 3.0  # times the median: beyond that, one client's measurement is scaled down


class Evidence(NamedTuple):
    """Inner products of what clients should follow, without the noise, (k, k), and the noise of each, (k,)."""

    products: Tensor
    noise: Tensor


class Gain(NamedTuple):
    """A mean over clients, its standard error, and of how many clients it is."""

    mean: float
    error: float
    clients: int

    @property
    def sure(self) -> float:
        """By how many standard errors the mean is above 0, counted as if there were many clients.

        Of few clients the error itself is uncertain (Student's t); the normal deviate that is as rare is smaller, about
        (8 nu + 1) / (8 nu + 3) sqrt(nu log(1 + t^2 / nu)) with nu = clients - 1 (Wallace 1959).

        >>> round(Gain(0.5, 0.1, 1000).sure, 1), round(Gain(0.5, 0.1, 4).sure, 1)
        (5.0, 2.4)
        """
        ratio, free = self.mean / max(self.error, 1e-12), max(1, self.clients - 1)
        shrunk = (8 * free + 1) / (8 * free + 3) * math.sqrt(free * math.log1p(ratio**2 / free))
        return math.copysign(shrunk, ratio)


def evidence(one: Tensor, other: Tensor) -> Evidence:
    """From measurements on two halves, (k, size) each; one that is not finite counts as zero.

    >>> found = evidence(torch.tensor([[3.0], [1.0]]), torch.tensor([[1.0], [1.0]]))
    >>> found.products.tolist(), found.noise.tolist()
    ([[3.0, 2.0], [2.0, 1.0]], [1.0, 0.0])
    """
    one, other = (half.detach().double().cpu() for half in (one, other))
    good = (one.isfinite() & other.isfinite()).all(1)
    scale = torch.where(good, _soft(((one + other) / 2).norm(dim=1), good), 0.0)[:, None]
    one, other = (torch.where(good[:, None], half, 0.0) * scale for half in (one, other))
    middle = (one + other) / 2
    products = middle @ middle.T
    products = products.diagonal_scatter((one * other).sum(1))
    return Evidence(products, (one - other).square().sum(1) / 4)


def _soft(norms: Tensor, good: Tensor) -> Tensor:
    """(k,) factors by which measurements are scaled down that are far longer than most."""
    if not bool(good.any()):
        return torch.ones_like(norms)
    most = _LOUDEST * norms[good].median()
    return torch.where(norms > most, most / norms.clamp(min=1e-300), 1.0)


def costs(found: Evidence, samples: Tensor, circle: Tensor, lam: float) -> Tensor:
    """(k,) what each client pays in its circle.

    >>> found = Evidence(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([0.5, 0.5]))
    >>> costs(found, torch.ones(2), torch.tensor([0, 0]), lam=1.0).tolist()      # |0 - 1|^2 + (0.5 + 0.5) / 4
    [1.25, 1.25]
    >>> costs(found, torch.ones(2), torch.tensor([0, 1]), lam=1.0).tolist()
    [0.5, 0.5]
    """
    together = (circle[:, None] == circle).double() * samples.double()  # (k, k) row i: the weights in i's circle
    weight = together / together.sum(1, keepdim=True)
    products, noise = found.products.double(), found.noise.double()
    far = ((weight @ products) * weight).sum(1) - 2 * (weight * products).sum(1) + products.diagonal()
    return lam * far + weight.square() @ noise


def agglomerate(found: Evidence, samples: Tensor, lam: float) -> Tensor:
    """(k,) circles: from everybody alone, the two whose joining lowers the cost most join, until none does.

    Circles are numbered in the order of their first client.

    >>> apart = Evidence(torch.tensor([[4.0, 4.0, -4.0], [4.0, 4.0, -4.0], [-4.0, -4.0, 4.0]]), torch.ones(3))
    >>> agglomerate(apart, torch.ones(3), lam=1.0).tolist()
    [0, 0, 1]
    """
    weight, own = samples.double(), found.products.diagonal().double()
    both = (
        found.products.double() * weight[:, None]
    )  # Q_CD: the sum over C x D of w_i <M_i, M_j>, at first of two clients
    sums = _Sums(
        weight[:, None] * both.T, both, weight, weight.square() * found.noise.double(), own, torch.ones_like(own)
    )
    home = torch.arange(len(samples))
    while len(sums.weight) > 1:
        alone = sums.cost(lam)
        change = sums.joined().cost(lam) - alone[:, None] - alone  # (c, c)
        change.fill_diagonal_(torch.inf)
        best = int(change.argmin())
        i, j = sorted(divmod(best, len(alone)))
        if not bool(change[i, j] < 0):
            break
        sums = sums.join(i, j)
        home = torch.where(home == j, i, home) - (home > j).long()
    return number_circles(home, torch.zeros_like(home), home < 0)


class _Sums(NamedTuple):
    """What the cost of a circle is made of: sums over its members, or over pairs of two circles' members, that add up.

    `squares` (c, c) of w_i w_j <M_i, M_j>, `mixed` (c, c) of w_i <M_i, M_j>, and (c,) of w, w^2 v, |M|^2 and 1.
    """

    squares: Tensor
    mixed: Tensor
    weight: Tensor
    noise: Tensor
    own: Tensor
    members: Tensor

    def cost(self, lam: float) -> Tensor:
        """The cost of each circle; of a table of circles where the sums are tables already."""
        one = self.weight.ndim == 1
        squares, mixed = (self.squares.diagonal(), self.mixed.diagonal()) if one else (self.squares, self.mixed)
        far = self.members * squares / self.weight.square() - 2 * mixed / self.weight + self.own
        return lam * far + self.members * self.noise / self.weight.square()

    def joined(self) -> _Sums:
        """The sums of every two circles together, (c, c) each."""
        squares, mixed = self.squares.diagonal(), self.mixed.diagonal()
        return _Sums(
            squares[:, None] + squares + 2 * self.squares,
            mixed[:, None] + mixed + self.mixed + self.mixed.T,
            *(each[:, None] + each for each in self[2:]),
        )

    def join(self, i: int, j: int) -> _Sums:
        """The sums with the circle j in i, and gone."""
        keep = torch.arange(len(self.weight)) != j

        def added(table: Tensor) -> Tensor:
            for axis in range(table.ndim):
                table = table.index_add(axis, torch.tensor([i]), table.narrow(axis, j, 1))
            return table[keep][:, keep] if table.ndim == 2 else table[keep]

        return _Sums(*map(added, self))


def pooled(gains: Tensor, counts: Tensor) -> Gain:
    """The mean of clients' gains, weighted by how many samples each judged by; far-off ones are drawn in first.

    >>> pooled(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    Gain(mean=2.0, error=1.0, clients=2)
    """
    told = (counts > 0) & gains.isfinite()
    gains, counts = gains[told].double(), counts[told].double()
    if len(gains) < 2:
        return Gain(0.0, float("inf"), len(gains))
    middle = gains.median()
    spread = 1.4826 * (gains - middle).abs().median()
    if float(spread) > 0:
        gains = gains.clamp(middle - 4 * spread, middle + 4 * spread)
    weight = counts.clamp(max=4 * float(counts.median()))
    weight = weight / weight.sum()
    mean = (weight * gains).sum()
    k = len(gains)
    error = ((weight * (gains - mean)).square().sum() * k / (k - 1)).sqrt()
    return Gain(float(mean), float(error), k)
