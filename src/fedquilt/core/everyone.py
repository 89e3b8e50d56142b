"""Everyone's test samples: what is a client's model worth beyond its own, and how much of it did it forget?

Only the evaluation of a simulation has them: they are no client's to see, and nothing is chosen or trained by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of, some_of
from fedquilt.client import Client, Split
from fedquilt.core.family_state import FamilyState, table_of
from fedquilt.core.terms import Terms
from fedquilt.families.copies import copy_of
from fedquilt.families.habits import seeded
from fedquilt.interface.client_stack import PaddedSplit

if TYPE_CHECKING:
    from fedquilt.core.simulation import Simulation

_SCORES = 2**25  # numbers that the clients' answers to all of it may be
_FEW, _MANY = 512, 8192  # samples that are drawn at least, and at most


class Everyone:
    """All clients' test samples, or a draw of them where they are many, by the seed: the same for all clients."""

    def __init__(self, clients: Sequence[Client], terms: Terms) -> None:
        most = min(_MANY, max(_FEW, _SCORES // max(1, terms.classes * len(clients))))
        self.terms = terms
        self.counts = [len(client.test) for client in clients]
        self.clients = clients
        self.total = min(most, sum(self.counts))

    @cached_property
    def chosen(self) -> list[Tensor]:
        """Of each client the places of its test samples that were drawn."""
        places = torch.tensor(some_of(sum(self.counts), self.total, key_of("everyone", self.terms.seed)))
        ends = torch.tensor([0, *self.counts]).cumsum(0)
        return [places[(places >= a) & (places < b)] - a for a, b in pairwise(ends)]

    def table(self, family_state: FamilyState, device: torch.device) -> PaddedSplit:
        """The samples that models of a family take, as a table of one client: of its shape, with labels it can name."""
        one = family_state.clients[0]
        width = self._classes(family_state, device)
        xs, ys = [], []
        for client, places in zip(self.clients, self.chosen, strict=True):
            mine = client.test
            if len(places) and _alike(mine, one.train):
                y = mine.y[places]
                known = torch.ones(len(y), dtype=torch.bool) if width is None else y < width
                xs.append(mine.x[places[known]])
                ys.append(y[known])
        x = torch.cat(xs) if xs else one.train.x[:0]
        y = torch.cat(ys) if ys else one.train.y[:0]
        asked = copy(one)
        object.__setattr__(asked, "test", Split(x, y))
        object.__setattr__(asked, "labels", tuple(range(width or 0)))  # also those that its clients do not own
        return table_of([asked], "test", self.terms.public(one)).to(device)

    def _classes(self, family_state: FamilyState, device: torch.device) -> int | None:
        """How many classes the models of a family can name; None where they name none."""
        if not self.terms.task.has_classes:  # of other tasks all models give what targets want
            return None
        family, sample = family_state.family, family_state.clients[0].train.x[:1].to(device)
        module = family.evaluator(device)
        with torch.no_grad(), seeded(0):  # twice: a norm without statistics of its own takes no single sample
            outputs = (copy_of(module) if family.habits.apart else module)(torch.cat([sample, sample]))
        return int(outputs.shape[-1])


def _alike(mine: Split, theirs: Split) -> bool:
    """Whether samples are of the same shape and kind."""
    return all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in ((mine.x, theirs.x), (mine.y, theirs.y)))


def everyone_of(simulation: Simulation) -> Everyone:
    """Everyone's test samples as they are now."""
    families = simulation.family_states
    numbered = {n: c for f in families for n, c in zip(f.family.ids, f.clients, strict=True)}
    return Everyone([numbered[n] for n in sorted(numbered)], simulation.terms)
