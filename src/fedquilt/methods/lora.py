"""Federated LoRA: FedIT (Zhang et al. 2023), FFA-LoRA (Sun et al. 2024), FedSA-LoRA (Guo et al. 2025).

Clients adapt one frozen base: a layer computes W x + (alpha / rank) B_i A_i x. Three plans over A, B and the head:

    FedIT        A <- sum_i (n_i / n) A_i;     B <- sum_i (n_i / n) B_i;      the head alike
    FFA-LoRA     A frozen, drawn once for all; B <- sum_i (n_i / n) B_i;      the head alike
    FedSA-LoRA   A <- sum_i (n_i / n) A_i;     B_i and the head never leave the client

The mean of products is not the product of means: what FedIT averages is no client's mean. FFA-LoRA is exact, since
B A for one A is linear in B. Deviations: the head is what else of a model trains (the papers of FedIT and FFA-LoRA have
no word on one); a model that comes without adapters gets them on all linear layers below its last unit, which is then
the head, and its other layers stay as they are built, so give it a base that is trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedquilt._util.randomness import key_of
from fedquilt.families.parts import Parts
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.interface.method import State
from fedquilt.methods.fedavg import FedAvg, kept_home
from fedquilt.models.lora import HEAD, A, B, adapted, adapter_units
from fedquilt.sharing import Plan


@dataclass(frozen=True)
class FedIT(FedAvg):
    """Adapters over a frozen base, averaged matrix by matrix; `rank` and `alpha` are for models without adapters."""

    name: ClassVar[str] = "fedit"
    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise ValueError(f"{self.name}: adapters of rank={self.rank} with alpha={self.alpha} change nothing")

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        model = adapted(model, self.rank, self.alpha)
        return Parts(model, units=adapter_units(model))


@dataclass(frozen=True)
class FFALora(FedIT):
    """FedIT in which the adapters' first matrices stay as they were drawn, the same for all."""

    name: ClassVar[str] = "ffa-lora"

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        model = adapted(model, self.rank, self.alpha)
        units, seed = adapter_units(model), torch.initial_seed()  # the run's own, as models are built
        for name in (name for unit, names in units.items() if _which(unit) == A for name in names):
            draw = torch.Generator().manual_seed(key_of(seed, name))
            matrix = model.get_parameter(name).requires_grad_(False)
            nn.init.kaiming_uniform_(matrix, math.sqrt(5), generator=draw)  # as a linear layer starts
        return Parts(model, units=units)


@dataclass(frozen=True)
class FedSALora(FedIT):
    """FedIT in which the adapters' second matrices and the head stay home."""

    name: ClassVar[str] = "fedsa-lora"

    def plan(self, state: State, roster: Roster) -> Plan:
        own = [[unit for unit in member.units if _which(unit) in (B, HEAD)] for member in roster.members]
        return super().plan(state, roster).but(kept_home(roster, own))


def _which(unit: str) -> str:
    """What a unit is to its layer: lora_A or lora_B; base and head are of no layer."""
    return unit.rpartition(".")[2]
