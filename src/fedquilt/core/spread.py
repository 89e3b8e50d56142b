"""What clients of all ranks sent: each rank has the copies of its own, and they come together where somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedquilt.core.ranks import Ranks
from fedquilt.interface.messages import UnitValues, Update


class Spread(UnitValues):
    """The values of some units, (k, size), of which every rank has the rows of its own clients.

    `value` and `columns` bring them together. They must then be asked for on every rank: whatever the server half asks
    for, it asks for on all of them.
    """

    def __init__(
        self, units: tuple[str, ...], sizes: tuple[int, ...], places: Tensor | None, numbers: Tensor, own: Tensor,
        ranks: Ranks,
    ) -> None:  # fmt: skip
        fields = {"units": units, "sizes": sizes, "places": places, "numbers": numbers, "own": own, "ranks": ranks}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    numbers: Tensor  # (k,) whose rows they are
    own: Tensor  # (n, size) those of this rank, shard by shard
    ranks: Ranks

    @cached_property
    def order(self) -> list[Tensor]:
        """Of each rank the places of its rows among all."""
        return self.ranks.order(self.numbers)

    @property
    def mine(self) -> Tensor:
        """(n,) the places of this rank's rows among all."""
        return self.order[self.ranks.rank]

    @cached_property
    def value(self) -> Tensor:
        """(k, size) everybody's."""
        return self._together(self.own)

    @cached_property
    def _found(self) -> dict[tuple[str, ...], Tensor]:
        return {}

    def columns(self, units: Sequence[str]) -> Tensor | None:
        """The part of the value that some units have: only that comes together."""
        at = self.where(units)
        if at is None or "value" in self.__dict__ or tuple(units) == self.units:
            return super().columns(units)
        if tuple(units) not in self._found:
            self._found[tuple(units)] = self._together(self.own[:, at])
        return self._found[tuple(units)]

    def _together(self, own: Tensor) -> Tensor:
        width = own.shape[1]
        parts = self.ranks.spread(own.flatten(), [len(places) * width for places in self.order])
        whole = own.new_empty(len(self.numbers), width)
        whole[torch.cat(self.order).to(own.device)] = torch.cat(parts).view(whole.shape)
        return whole


def described(up: Update, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What all ranks hear of what one rank's clients sent: who, which units, and their reports. No copies."""
    blocks = []
    for at, block in enumerate(up.blocks):
        if block.places is not None:
            tensors[f"{prefix}{at}/places"] = block.places
        blocks.append([list(block.units), list(block.sizes)])
    tensors |= {f"{prefix}report/{name}": value for name, value in up.reports.items()}
    tensors |= {f"{prefix}coded/{unit}": who for unit, who in up.coded.items() if who is not None}
    return {"ids": list(up.ids), "blocks": blocks, "reports": list(up.reports), "coded": list(up.coded)}


def read(entry: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor], round_: int) -> Update:
    """What `described` was given, with nothing in the place of copies."""
    ids = tuple(entry["ids"])
    blocks = []
    for at, (units, sizes) in enumerate(entry["blocks"]):
        places = tensors.get(f"{prefix}{at}/places")
        nothing = torch.empty(len(ids) if places is None else len(places), sum(sizes), device="meta")
        blocks.append(UnitValues(tuple(units), tuple(sizes), places, nothing))
    reports = {name: tensors[f"{prefix}report/{name}"] for name in entry["reports"]}
    coded = {unit: tensors.get(f"{prefix}coded/{unit}") for unit in entry["coded"]}
    return Update(round_, ids, tuple(blocks), reports, coded=coded)


def joined(
    said: Sequence[Update], own: Sequence[Update], units: Sequence[str], ranks: Ranks, device: torch.device
) -> Update:
    """Updates of clients of one family as one, clients in the order of their numbers; `units` are all that there are.

    `said` is what all ranks heard of all shards, `own` what clients of this rank sent, shard by shard.
    """
    numbers = torch.cat([up.numbers for up in said])
    order = numbers.argsort()
    numbers = numbers[order]
    reports = {name: torch.cat([up.reports[name] for up in said])[order].to(device) for name in said[0].reports}
    groups: list[tuple[Tensor, dict[str, int]]] = []  # who sent, (k,), and what, with its size
    for unit in units:
        parts = [part for up in said if (part := up.part([unit])) is not None]
        if not parts:
            continue
        senders = torch.isin(numbers, torch.cat([who for who, _ in parts]))
        alike = next((sizes for others, sizes in groups if torch.equal(others, senders)), None)
        if alike is None:
            groups.append((senders, alike := {}))
        alike[unit] = parts[0][1].shape[1]
    blocks = []
    for senders, sizes in groups:
        places = None if bool(senders.all()) else senders.nonzero()[:, 0]
        mine = [rows for up in own if (rows := _rows(up, list(sizes))) is not None]
        rows = torch.cat([torch.empty(0, sum(sizes.values()), device=device), *mine])
        blocks.append(Spread(tuple(sizes), tuple(sizes.values()), places, numbers[senders], rows, ranks))
    coded = {unit: torch.cat([_coders(up, unit) for up in said])[order] for up in said for unit in up.coded}
    return Update(said[0].round, tuple(numbers.tolist()), tuple(blocks), reports, coded=coded)


def _coders(up: Update, unit: str) -> Tensor:
    """(k,) who of an update's clients sends codes of a unit, where they send it."""
    nobody = torch.zeros(len(up.ids), dtype=torch.bool)
    who = up.coded.get(unit, nobody)
    return ~nobody if who is None else who.cpu()


def _rows(up: Update, units: Sequence[str]) -> Tensor | None:
    """(k, size) some units of those who sent them, wherever these lie."""
    together = up.part(units)
    if together is not None:
        return together[1]
    apart = [part[1] for unit in units if (part := up.part([unit])) is not None]
    return torch.cat(apart, dim=1) if apart else None
