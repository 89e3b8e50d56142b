"""pFedHN (Shamsian et al. 2021, Algorithm 1). The server holds no model, but a network that makes one for each client.

    theta_i = h(e_i; phi)                               e_i: a vector for each client; phi, e: the server's alone
    theta~_i <- local training from theta_i;            the client sends d_i = theta_i - theta~_i
    phi <- phi - rate (d theta_i / d phi)^T d_i,  e_i <- e_i - rate (d theta_i / d e_i)^T d_i

h is `depth` layers of `width` units and one linear layer for all parameters; e has 1 + K/4 numbers. The server steps by
SGD with momentum 0.9, weight decay 1e-3 and gradients clipped at 50, as the authors do. With one client a round this is
the paper to the letter; of several the server takes the mean of the gradients, all at the phi that they received.
`personal` units at the top stay home and are trained there: the variant pFedHN-PC. Running statistics stay home as
well. What a client receives is told to it, not merged: its saved model is the one after training, and read-outs that
train on or average weights answer as `received` does. A newcomer starts from the mean of all e_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.nn import functional as F

from fedquilt._util.randomness import key_of
from fedquilt.engines.objective import Batch
from fedquilt.interface.me import Me
from fedquilt.interface.messages import Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.steps import Do, Step, Train
from fedquilt.sharing import Plan, nobody

_MOMENTUM, _DECAY, _CLIP = 0.9, 1e-3, 50.0


@dataclass(frozen=True)
class PFedHN(Method):
    """A model for each client out of one network on the server, which learns from how clients change theirs."""

    name: ClassVar[str] = "pfedhn"
    merges: ClassVar[bool] = False
    sends_parameters: ClassVar[bool] = False
    rate: float = 0.01
    width: int = 100
    depth: int = 3
    personal: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"pFedHN with rate={self.rate} never learns: use the method 'local', or a rate above 0")
        if self.width < 1 or self.depth < 1 or self.personal < 0:
            raise ValueError(
                f"pfedhn: width={self.width}, depth={self.depth}, personal={self.personal}: give at least 1, 1 and 0"
            )

    # --- client half -----------------------------------------------------------------------------------------------

    def local(self) -> tuple[Step, ...]:
        return Do(self._take), Train(), Do(self._changes, reports=("change",))

    def _made(self, me: Me) -> dict[str, Tensor]:
        """The units as the server made them; what it does not make is the client's own."""
        return {unit: torch.cat([made, me.values[unit][len(made) :]]) for unit, made in me.told.items()}

    def _take(self, me: Me) -> Mapping[str, Tensor]:
        return self._made(me)

    def _changes(self, me: Me) -> Mapping[str, Tensor]:
        return {"change": torch.cat([made - me.values[unit][: len(made)] for unit, made in me.told.items()])}

    def predict(self, me: Me, batch: Batch) -> Tensor:
        return me.at(self._made(me))(batch.x) if me.installed else me.model(batch.x)

    # --- server half -----------------------------------------------------------------------------------------------

    def sizes(self, roster: Roster) -> dict[str, int]:
        """How many parameters of which units the server makes."""
        first = roster.members[0]
        units = list(first.units)[: len(first.units) - self.personal]
        unlike = [member.name for member in roster.members if member.units != first.units]
        if unlike:
            raise ValueError(
                f"pfedhn: one network makes the models of all clients, and that of '{unlike[0]}' is another one than "
                f"that of '{first.name}'; give all one architecture, or use the method 'fedavg'"
            )
        if not units:
            raise ValueError(f"pfedhn: personal={self.personal} leaves nothing to make: use the method 'local'")
        made = {u: sum(int(torch.Size(shape).numel()) for shape in first.units[u]) for u in units}
        return {unit: size - first.statistics.get(unit, 0) for unit, size in made.items()}

    def begin(self, roster: Roster) -> State:
        size, outputs = 1 + len(roster) // 4, sum(self.sizes(roster).values())
        widths = [size, *[self.width] * self.depth, outputs]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key_of("hyper-network", roster.seed))
            layers = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
            e = torch.randn(len(roster), size)
        phi = {name: value.detach() for name, value in layers.named_parameters()}
        return {"phi": phi, "e": e, "m": {name: torch.zeros_like(value) for name, value in (phi | {"e": e}).items()}}

    def make(self, phi: Mapping[str, Tensor], e: Tensor) -> Tensor:
        """(k, parameters) the models of clients with these vectors (k, size)."""
        for layer in range(self.depth):
            e = F.linear(e, phi[f"{layer}.weight"], phi[f"{layer}.bias"]).relu()
        return F.linear(e, phi[f"{self.depth}.weight"], phi[f"{self.depth}.bias"])

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        ids, change = updates.report("change")
        finite = change.isfinite().all(1)
        ids, change = ids[finite.cpu()], change[finite].cpu()
        if not len(ids):
            return state
        found = vjp(lambda phi, e: self.make(phi, e[ids]), state["phi"], state["e"])
        phi, e = found[1](change / len(ids))
        slopes = phi | {"e": e * len(ids)}  # an embedding is one client's: it has no part in the mean
        norm = torch.stack([slope.square().sum() for slope in slopes.values()]).sum().sqrt()
        values, m = state["phi"] | {"e": state["e"]}, {}
        for name, value in values.items():
            slope = slopes[name] * (_CLIP / norm).clamp(max=1.0)
            m[name] = _MOMENTUM * state["m"][name] + slope + _DECAY * value
        values = {name: value - self.rate * m[name] for name, value in values.items()}
        return {"e": values.pop("e"), "phi": values, "m": m}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        new = len(roster) - len(before)
        mean = state["e"].mean(0, keepdim=True).expand(new, -1)
        m = state["m"] | {"e": torch.cat([state["m"]["e"], torch.zeros_like(mean)])}
        return {"phi": state["phi"], "e": torch.cat([state["e"], mean]), "m": m}

    def plan(self, state: State, roster: Roster) -> Plan:
        return nobody(roster.units, len(roster))

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        sizes = self.sizes(roster)
        parts = self.make(state["phi"], state["e"][list(ids)]).split(list(sizes.values()), dim=1)
        return dict(zip(sizes, parts, strict=True))

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        return {"hyper_network_parameters": sum(value.numel() for value in state["phi"].values())}
