"""Samples that everybody holds: in one form for all clients, or in a form for each kind of sensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor

from fedquilt.client import Pair, Split, as_split

BY_NAME = "client"  # in the place of a trait: every client has a form of its own


class Declared(Protocol):
    """Somebody with a name and traits: a client, or what is known of one elsewhere."""

    @property
    def name(self) -> str: ...

    @property
    def traits(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class ByTrait:
    """The same samples in several forms, as unlike sensors see them: sample i is the same event in all of them.

    `trait` is what decides which form a client holds, "client" for its name; `forms` has them by its values.
    """

    trait: str
    forms: Mapping[str, Split]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def y(self) -> Tensor:
        """(n,) the labels, which all forms share."""
        return next(iter(self.forms.values())).y

    def of(self, client: Declared) -> Split:
        """The samples in the form that a client holds."""
        value = client.name if self.trait == BY_NAME else client.traits.get(self.trait)
        if value is None or value not in self.forms:
            whose = f"is {self.trait} '{value}'" if value is not None else f"declares no trait '{self.trait}'"
            raise ValueError(
                f"client '{client.name}' {whose}, and of the samples that everybody holds there are forms for "
                f"{', '.join(self.forms)} only; give one for it"
            )
        return self.forms[value]


Common = Split | ByTrait
GivenCommon = Pair | Split | ByTrait | Mapping[str, Mapping[str, Pair | Split]]


def as_common(given: GivenCommon, whose: str) -> Common:
    """A pair for all clients, or {trait: {value: pair}}, as checked samples; `whose` names them in errors.

    >>> camera, radar = (torch.zeros(2, 8, 8), [0, 1]), ([[1.0], [2.0]], [0, 1])
    >>> both = as_common({"device": {"camera": camera, "radar": radar}}, "common data")
    >>> from fedquilt.client import Client
    >>> both.of(Client("a", lambda: None, train=radar, traits={"device": "radar"})).x.shape
    torch.Size([2, 1])
    """
    if not isinstance(given, Mapping | ByTrait):
        return as_split(given, whose)
    by: Mapping[str, Mapping[str, Pair | Split]] = {given.trait: given.forms} if isinstance(given, ByTrait) else given
    if len(by) != 1 or not isinstance(next(iter(by.values())), Mapping):
        raise TypeError(f"{whose}: give (samples, labels), or one trait and a pair for each of its values: {_FORM}")
    ((trait, forms),) = by.items()
    checked = {str(value): as_split(pair, f"{whose} for {trait} '{value}'") for value, pair in forms.items()}
    if not checked:
        raise ValueError(f"{whose}: there is no form for any {trait}; write {_FORM}")
    (first, those), *others = checked.items()
    for value, split in others:
        if not torch.equal(split.y, those.y):
            raise ValueError(
                f"{whose}: the labels for {trait} '{value}' are not those for '{first}'; sample i has to be the same "
                "event in every form"
            )
    return ByTrait(str(trait), checked)


def with_targets(samples: Common, of: Callable[[Split], Split]) -> Common:
    """The same samples with other targets, in every form."""
    if not isinstance(samples, ByTrait):
        return of(samples)
    return ByTrait(samples.trait, {value: of(split) for value, split in samples.forms.items()})


_FORM = '{"device": {"camera": (x, y), "radar": (x, y)}}'


@overload
def form_for(samples: Common, client: Declared) -> Split: ...


@overload
def form_for(samples: Common | None, client: Declared) -> Split | None: ...


def form_for(samples: Common | None, client: Declared) -> Split | None:
    """What a client holds of samples: their form for it, where they have several."""
    return samples.of(client) if isinstance(samples, ByTrait) else samples
