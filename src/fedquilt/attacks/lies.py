"""Attacks by name: on what is sent, on what is trained on, and on what is reported."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of
from fedquilt.attacks.attack import Attack, Sent, noise
from fedquilt.client import Client, Split


@dataclass(frozen=True)
class SignFlip(Attack):
    """Liars send the opposite of what they learnt, `scale` times as far."""

    name: ClassVar[str] = "sign-flip"
    scale: float = 1.0

    def copies(self, sent: Sent) -> Tensor:
        return sent.start - self.scale * sent.moves


@dataclass(frozen=True)
class InnerProduct(Attack):
    """Liars send the opposite of what the honest of their circle learn on average, `tau` times as far (Xie 2020).

    With tau=1 it is what byzfl calls sign flipping.
    """

    name: ClassVar[str] = "ipm"
    tau: float = 2.0

    def copies(self, sent: Sent) -> Tensor:
        return sent.start - self.tau * sent.of_honest(sent.moves)


@dataclass(frozen=True)
class ALittleIsEnough(Attack):
    """Liars hide in the spread of the honest: their mean and `tau` standard deviations of each number (Baruch 2019)."""

    name: ClassVar[str] = "alie"
    tau: float = 1.5

    def copies(self, sent: Sent) -> Tensor:
        mean = sent.of_honest(sent.moves)
        square = sent.of_honest((sent.moves - mean).square())
        honest = (sent.circle == sent.circle[:, None]) & ~sent.lies
        n = honest.sum(1, keepdim=True)
        return sent.start + mean + self.tau * (square * n / (n - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True)
class Mimic(Attack):
    """Liars send what one honest client of their circle sends, which then counts many times (Karimireddy et al. 2022).

    `victim` is its place among the honest of the circle.
    """

    name: ClassVar[str] = "mimic"
    victim: int = 0

    def copies(self, sent: Sent) -> Tensor:
        honest = (sent.circle == sent.circle[:, None]) & ~sent.lies  # (k, k)
        place = honest.cumsum(1) - 1
        wanted = (honest.sum(1) - 1).clamp(max=self.victim)
        chosen = honest & (place == wanted[:, None])
        return torch.where(honest.any(1)[:, None], sent.copies[chosen.long().argmax(1)], sent.copies)


@dataclass(frozen=True)
class Gaussian(Attack):
    """Liars send noise of standard deviation `sigma` in the place of what they learnt."""

    name: ClassVar[str] = "gaussian"
    sigma: float = 1.0

    def copies(self, sent: Sent) -> Tensor:
        return sent.start + self.sigma * noise(sent.copies.shape, sent.key, sent.copies.device)


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Liars train on wrong labels: of those that a client has, the first and the last change places, and so on."""

    name: ClassVar[str] = "label-flip"

    def client(self, client: Client) -> Client:
        if not client.labels:
            raise ValueError(f"the attack '{self.name}' exchanges classes, and client '{client.name}' has none")
        liar = copy(client)
        object.__setattr__(liar, "train", _flipped(client.train, client.labels))
        changes = {}
        for start, change in client.changes.items():
            labels = change.labels or client.labels
            train = _flipped(change.train, labels) if isinstance(change.train, Split) else change.train
            changes[start] = replace(change, train=train)
        object.__setattr__(liar, "changes", changes)
        return liar


@dataclass(frozen=True)
class Impostor(Attack):
    """Liars report what a client of their choice reports, to be put into its circles, and pull these the wrong way.

    They send the opposite of what the honest of that client's circle learn, `scale` times as far. It is an
    honest client of their own architecture, the same one in all rounds that it takes part in.
    """

    name: ClassVar[str] = "impostor"
    scale: float = 1.0

    def copies(self, sent: Sent) -> Tensor:
        target = target_of(sent.ids, sent.lies)
        if target is None:
            return sent.copies
        return (sent.start - self.scale * sent.of_honest(sent.moves))[target].expand_as(sent.copies)

    def reports(self, reports: Mapping[str, Tensor], ids: Tensor, lies: Tensor) -> Mapping[str, Tensor]:
        target = target_of(ids, lies)
        if target is None:
            return reports
        there = {name: lies.to(value.device) for name, value in reports.items()}
        return {
            name: torch.where(there[name].view(-1, *[1] * (value.ndim - 1)), value[target], value)
            for name, value in reports.items()
        }


def target_of(ids: Tensor, lies: Tensor) -> int | None:
    """The place of the honest client that liars choose: the one with the lowest hash; None where all lie."""
    told = enumerate(zip(ids.tolist(), lies.tolist(), strict=True))
    places = [(key_of("target", number), at) for at, (number, lie) in told if not lie]
    return min(places)[1] if places else None


def _flipped(split: Split, labels: tuple[int, ...]) -> Split:
    """Samples with the labels of a client in the reverse order."""
    before = torch.tensor(sorted(labels))
    after = before.flip(0)
    place = torch.searchsorted(before, split.y).clamp(max=len(before) - 1)
    return Split(split.x, torch.where(before[place] == split.y, after[place], split.y))
