"""Stubs: clients as the server knows them, by what they declared and without a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedquilt.client import Change, Client, Split
from fedquilt.interface.messages import ClientInfo


@dataclass(frozen=True)
class Architecture:
    """Builds a shadow's model; which of its buffers are constant cannot be tried without samples, so it is declared."""

    build: Callable[[], nn.Module]
    constant: tuple[str, ...]

    def __call__(self) -> nn.Module:
        return self.build()


def stub_client(
    member: ClientInfo, build: Callable[[int], Callable[[], nn.Module] | None], changes: Mapping[int, Mapping[str, Any]]
) -> Client:
    """A client without data: what it declared, and its architecture. `build(0)` is its model builder, `build(t)` that
    of a change at round t, if the model changes there."""

    def samples(count: int) -> Split:
        return Split(torch.zeros(count, 0), torch.zeros(1, dtype=torch.int64).expand(count))

    def model(start: int, constant: Sequence[str]) -> Architecture | None:
        builder = build(start)
        return None if builder is None else Architecture(builder, tuple(constant))

    first = model(0, member.constant)
    assert first is not None
    planned = {
        start: Change(model(start, told["constant"]), tuple(told["labels"]), samples(told["samples"]))
        for start, told in changes.items()
    }
    return Client(
        member.name, first, samples(member.samples), traits=member.traits, labels=member.labels, changes=planned
    )
