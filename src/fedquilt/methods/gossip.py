"""Gossip (decentralised SGD: Lian et al. 2017, Koloskova et al. 2020). Peers mix models with neighbours, and no others.

    x_i <- local training from z_i,    z_i = sum_j W_ij x_j over i and its neighbours in a graph,
    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours of degrees d_i, d_j,   W_ii = 1 - sum_j W_ij

W (Metropolis and Hastings) is symmetric and its rows sum to 1 in any graph, so mixing keeps the mean of all models and
brings them together. `topology`:

    ring        the next `reach` clients on either side, in the order of the roster
    random      the same in an order that is drawn anew after every round
    complete    everybody: the plain mean of all, FedAvg without sample counts
    declared    those that clients name in their trait `peers`, with commas between; either naming the other is enough

Settled here: one epoch or more between two mixtures, as training says; units are mixed among neighbours that have them
in one shape, with degrees counted unit by unit. Mixtures are computed where clients meet, a server in a simulation and
on devices, so a client sends one copy and receives one mixture, however many neighbours it has. A newcomer takes from
its neighbours, and gives when it has taken part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of, mix_number
from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.sharing import MixedUnit, Plan

PEERS = "peers"


@dataclass(frozen=True)
class Gossip(Method):
    """Each client mixes its model with those of its neighbours in a graph."""

    name: ClassVar[str] = "gossip"
    topology: Literal["ring", "random", "complete", "declared"] = "ring"
    reach: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reach < 1:
            raise ValueError(f"gossip with reach={self.reach} has no neighbours: use the method 'local'")

    @property
    def learns(self) -> bool:
        return False  # its state follows from rounds and the roster, whatever is sent

    def begin(self, roster: Roster) -> State:
        return {"round": 0, "there": len(roster)}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        there = len(roster)  # who was new has now been heard, or is as its first weights say
        if self.topology != "random" and there == state["there"]:
            return state
        return {"round": updates.round, "there": there}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        return {"round": state["round"], "there": min(state["there"], len(roster))}

    def plan(self, state: State, roster: Roster) -> Plan:
        new = torch.arange(len(roster)) >= state["there"]
        graph, before = (self._neighbours(state["round"], number, roster) for number in (len(roster), state["there"]))
        units = {}
        for unit, shapes in roster.signatures().items():
            number = {shape: at for at, shape in enumerate(dict.fromkeys(shapes))}
            kind = torch.tensor([number[shape] if shape else -1 - at for at, shape in enumerate(shapes)])
            alike = kind[:, None] == kind
            # who is new takes from those who were there, who are mixed as they were without it
            shares = torch.where(new[:, None], weights(graph & alike) * ~new, weights(before & alike))
            others = shares.sum(1)
            has = torch.tensor([bool(shape) for shape in shapes])
            matrix = shares + torch.diag((1 - others) * has)
            units[unit] = MixedUnit(matrix, torch.where(new, others, 1.0))  # who is new keeps its own part itself
        return Plan(units)

    def _neighbours(self, round_: int, among: int, roster: Roster) -> Tensor:
        """(K, K) bool who is a neighbour of whom among the first so many clients; nobody of itself."""
        if self.topology == "complete":
            near = torch.ones(len(roster), len(roster), dtype=torch.bool)
        elif self.topology == "declared":
            near = self._declared(roster)
        else:
            key = key_of("gossip", roster.seed, round_)
            order = sorted(range(among), key=lambda i: mix_number(key + i) if self.topology == "random" else i)
            place = torch.zeros(len(roster), dtype=torch.int64)
            place[torch.tensor(order)] = torch.arange(among)
            apart = (place[:, None] - place).abs()
            near = torch.minimum(apart, among - apart) <= self.reach
        there = torch.arange(len(roster)) < among
        return near & there & there[:, None] & ~torch.eye(len(roster), dtype=torch.bool)

    def _declared(self, roster: Roster) -> Tensor:
        number = {name: at for at, name in enumerate(roster.names)}
        near = torch.zeros(len(roster), len(roster), dtype=torch.bool)
        for at, told in enumerate(roster.trait(PEERS)):
            for name in filter(None, (word.strip() for word in told.split(","))):
                if name not in number:
                    raise ValueError(f"client '{roster.names[at]}' names the peer '{name}', which is no client")
                near[at, number[name]] = True
        return near | near.T


def weights(near: Tensor) -> Tensor:
    """(K, K) what everybody takes of each neighbour, by Metropolis and Hastings; of itself nothing.

    >>> weights(torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).bool())[:2]
    tensor([[0.0000, 0.3333, 0.0000],
            [0.3333, 0.0000, 0.3333]])
    """
    degree = near.sum(1)
    return near / (1 + torch.maximum(degree[:, None], degree))
