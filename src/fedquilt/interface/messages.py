"""What passes between the server and its clients: who they are, what they receive, what they send.

These values are the border between the two halves of a method. In a simulation they carry many clients at a time, on a
real network one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedquilt._util.randomness import key_of
from fedquilt._util.shared_memory import place_on
from fedquilt.families.common import Common
from fedquilt.families.layout import Signature
from fedquilt.interface.masked import Masked
from fedquilt.sharing.compression import Code
from fedquilt.sharing.weighted_sums import finite_rows

if TYPE_CHECKING:
    from fedquilt.interface.sent_models import SentModels


@dataclass(frozen=True)
class ClientInfo:
    """What a client declares when it joins: never data."""

    name: str
    samples: int
    traits: Mapping[str, str]
    labels: tuple[int, ...]
    units: Mapping[str, Signature]  # in order, bottom to top
    public: tuple[int, ...] = ()  # how many public samples of each label it holds
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of layers, by unit: norm, linear, ...
    statistics: Mapping[str, int] = field(default_factory=dict)  # how many of a unit's numbers, the last ones, no step
    # of training moves: running statistics and other buffers of the model
    constant: tuple[str, ...] = ()  # buffers of its model that nothing writes: no unit has them, they stay home
    parameters: Mapping[str, int] = field(default_factory=dict)  # of a unit, its first numbers

    @property
    def architecture(self) -> str:
        """A word for the units that it has with their shapes: clients with the same one can be averaged whole."""
        return str(key_of(*self.units.items()))


@dataclass(frozen=True)
class Roster:
    """Everyone in the federation, as the server knows them, and what the server itself holds."""

    members: tuple[ClientInfo, ...]
    classes: int
    rounds: int
    seed: int = 0
    common: Common | None = None
    label_names: tuple[str, ...] = ()
    public_test: Common | None = None

    def __len__(self) -> int:
        return len(self.members)

    @property
    def names(self) -> list[str]:
        """The clients' names, in the order of their numbers."""
        return [member.name for member in self.members]

    @property
    def samples(self) -> Tensor:
        """(K,) training samples of each client."""
        return torch.tensor([float(member.samples) for member in self.members])

    @property
    def units(self) -> list[str]:
        """Every unit any client has, in order."""
        return list(dict.fromkeys(unit for member in self.members for unit in member.units))

    def has(self, unit: str) -> Tensor:
        """(K,) which clients have a unit."""
        return torch.tensor([unit in member.units for member in self.members])

    def changed(self, before: Roster) -> Tensor:
        """(K,) who has other units than before, or was not there."""
        then = [member.units for member in before.members] + [None] * (len(self) - len(before))
        return torch.tensor([now.units != units for now, units in zip(self.members, then, strict=True)])

    def needed_common(self, what: str, least: int = 1) -> Common:
        """The samples that everybody holds; where there are too few, an error says what was to be done with them."""
        if self.common is None or len(self.common) < least:
            none = "there are none" if self.common is None else f"there are {len(self.common)}"
            raise ValueError(
                f"{what} on samples that the server holds, and {none}; give the scenario common=(x, y), or use a "
                "method that needs none, such as 'fedavg', 'fedper' or 'modfl' with circles that are declared"
            )
        return self.common

    def signatures(self) -> dict[str, list[Signature | None]]:
        """The shapes of each unit on each client; None where a client lacks it."""
        return {unit: [member.units.get(unit) for member in self.members] for unit in self.units}

    def sizes(self) -> dict[str, Tensor]:
        """(K,) how many numbers each unit has on each client."""
        size = {s: sum(int(torch.Size(shape).numel()) for shape in s) for m in self.members for s in m.units.values()}
        return {
            unit: torch.tensor([0 if s is None else size[s] for s in signatures])
            for unit, signatures in self.signatures().items()
        }

    @property
    def owns(self) -> Tensor:
        """(K, classes) who owns which label."""
        return torch.tensor([[label in member.labels for label in range(self.classes)] for member in self.members])

    @property
    def public_y(self) -> Tensor:
        """(n,) the labels of the samples that everybody holds: of `common`, then of `public_test`."""
        return torch.cat([torch.zeros(0).long(), *(h.y for h in (self.common, self.public_test) if h is not None)])

    def trait(self, key: str) -> list[str]:
        """A trait of every client; a client that does not declare it is an error that says so."""
        missing = [member.name for member in self.members if key not in member.traits]
        if missing:
            raise ValueError(
                f"client '{missing[0]}' declares no trait '{key}'; give every client traits={{'{key}': ...}} "
                "or choose a method that does not need it"
            )
        return [member.traits[key] for member in self.members]


@dataclass(frozen=True)
class UnitValues:
    """The values of some units of some clients: (k, size), unit after unit, for clients at `places` of a message."""

    units: tuple[str, ...]
    sizes: tuple[int, ...]
    places: Tensor | None  # (k,) rows of the message's clients, None: all of them in order
    value: Tensor

    def columns(self, units: Sequence[str]) -> Tensor | None:
        """The part of the value that some units have, as a view; None where they do not lie together here."""
        if tuple(units) == self.units:
            return self.value
        at = self.where(units)
        return None if at is None else self.value[:, at]

    def where(self, units: Sequence[str]) -> slice | None:
        """The columns that some units have; None where they do not lie together here."""
        if not set(units) <= set(self.units):
            return None
        first = self.units.index(units[0])
        if tuple(units) != self.units[first : first + len(units)]:
            return None
        start = sum(self.sizes[:first])
        return slice(start, start + sum(self.sizes[first : first + len(units)]))


@dataclass(frozen=True)
class Instructions:
    """What the server sends to clients of one architecture at the start of a round.

    `blocks` are the values received with, for each, how far each client moves there (`pulls`, (k,), None: all the
    way). `send` lists the units that each client shall send back after training.
    """

    round: int
    ids: tuple[int, ...]
    blocks: tuple[UnitValues, ...]
    pulls: tuple[Tensor | None, ...]
    send: Mapping[str, Tensor]  # (k,) bool
    everyone: int = 0  # training samples of all clients together
    told: Mapping[str, Tensor] = field(default_factory=dict)  # whatever the method's server half tells its client half
    offers: Mapping[str, Tensor] = field(default_factory=dict)  # (circles, size) by unit, to choose from
    copies: Mapping[str, Tensor] = field(default_factory=dict)  # (k, M, size) by unit: for each client others' copies


@dataclass(frozen=True)
class Update:
    """What clients of one architecture send after training: the asked units, nothing else, and small reports."""

    round: int
    ids: tuple[int, ...]
    blocks: tuple[UnitValues, ...]
    reports: Mapping[str, Tensor] = field(default_factory=dict)  # (k, ...)
    masked: Masked | None = None  # under secure sums, in the place of blocks
    coded: Mapping[str, Tensor | None] = field(default_factory=dict)  # (k,) by unit who sends codes, None: all who send
    codes: Mapping[str, Code] = field(default_factory=dict)  # by unit, of parameters; blocks hold what they say

    def part(self, units: Sequence[str]) -> tuple[Tensor, Tensor] | None:
        """Clients' numbers and their values of some units, where these lie together in one block."""
        for block in self.blocks:
            value = block.columns(units)
            if value is not None:
                return self.numbers if block.places is None else self.numbers[block.places], value
        return None

    @cached_property
    def numbers(self) -> Tensor:
        """(k,) the clients' numbers as a tensor."""
        return place_on(self.ids, torch.device("cpu"))


@dataclass(frozen=True)
class Updates:
    """What a method's server half looks at: everything that was sent in a round, over all families."""

    round: int
    ups: tuple[Update, ...]
    look: Callable[[Updates, Common], list[SentModels]] | None = None
    held: Callable[[str, Tensor], Tensor] | None = None
    copies: Callable[[str, Tensor], Tensor] | None = None
    merge: Callable[[], Callable[[str, Tensor], Tensor]] | None = None

    @property
    def ids(self) -> Tensor:
        """(k,) the clients that took part."""
        return torch.cat([up.numbers for up in self.ups]) if self.ups else torch.zeros(0, dtype=torch.int64)

    @property
    def units(self) -> list[str]:
        """Every unit that somebody sent."""
        return list(dict.fromkeys(unit for up in self.ups for block in up.blocks for unit in block.units))

    def parts(self, *units: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of client numbers (k,) and values (k, size), one a family, of some units; units must lie together."""
        for up in self.ups:
            part = up.part(units)
            if part is not None:
                yield part

    def value(self, unit: str) -> tuple[Tensor, Tensor]:
        """Who sent a unit, (k,), and their copies, (k, size), where all copies have one shape."""
        parts = list(self.parts(unit))
        if not parts:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0)
        return torch.cat([ids for ids, _ in parts]), torch.cat([value for _, value in parts])

    def of_everyone(self, unit: str, otherwise: Tensor) -> Tensor:
        """(K, size) every client's copy of a unit that has one shape, `otherwise` (K, size) where it sent none."""
        found = otherwise.clone()
        for ids, value in self.parts(unit):
            found[ids] = value.to(found)
        return found

    def received(self, unit: str, ids: Tensor) -> Tensor:
        """(k, size) the server's value of a unit in the circles of some clients: what they had before they trained."""
        if self.held is None:
            raise ValueError("the server was given no values, so it cannot say what clients received")
        return self.held(unit, ids)

    def merged(self, unit: str, ids: Tensor) -> Tensor:
        """(k, size) what the merge makes of what was sent in the circles of some clients, by the plan until now."""
        if self._merged is None:
            raise ValueError("the server was given no values, so it cannot say what becomes of them")
        return self._merged(unit, ids)

    @cached_property
    def _merged(self) -> Callable[[str, Tensor], Tensor] | None:
        return None if self.merge is None else self.merge()

    def latest(self, unit: str, ids: Tensor) -> Tensor:
        """(k, size) what some clients, all of one shape, sent last of a mixed unit, in this round or before."""
        sent = [(who[good.cpu()], values[good]) for who, values in self.parts(unit) for good in [finite_rows(values)]]
        now = {int(i): row for who, values in sent for i, row in zip(who, values, strict=True)}
        before = [i for i in ids.tolist() if i not in now]
        if before and self.copies is None:
            raise ValueError("the server was given no values, so it cannot say what clients sent before")
        if before and self.copies is not None:
            now |= dict(zip(before, self.copies(unit, torch.tensor(before)), strict=True))
        return torch.stack([now[i] for i in ids.tolist()])

    def report(self, name: str) -> tuple[Tensor, Tensor]:
        """Who reported something, (k,), and what, (k, ...)."""
        parts = [(torch.tensor(up.ids), up.reports[name]) for up in self.ups if name in up.reports]
        if not parts:
            raise KeyError(f"no client reported '{name}' in round {self.round}")
        return torch.cat([ids for ids, _ in parts]), torch.cat([value for _, value in parts])

    def models(self, samples: Common) -> list[SentModels]:
        """The whole models that were sent, family by family, to be run on samples that the server holds.

        Where they come in several forms, every model is shown its client's.
        """
        if self.look is None:
            raise ValueError("the server was given no architectures, so it cannot run the models it was sent")
        return self.look(self, samples)

    def probabilities(self, samples: Common) -> tuple[Tensor, Tensor]:
        """Who sent a whole model, (k,), and its class probabilities on samples the server holds, (k, n, classes).

        A class that a model does not know has the probability 0 there.
        """
        sent = self.models(samples)
        said = [(models.scores().softmax(2), models.classes) for models in sent]
        wide = [nn.functional.pad(some, (0, classes - some.shape[2])) for some, classes in said]
        return torch.cat([models.ids for models in sent]), torch.cat(wide)
