"""What the plans of units have in common, whatever form they have.

What a round needs each time (who sends, who receives, a dense row number per circle) is derived once, on the CPU, and
copied to a device once, so that a round asks the device no questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

Numbers = Tensor | Sequence[float] | Sequence[int]


class Planned:
    """What both forms of a unit's plan have in common: they are read by clients through `row`, `taken` and masks."""

    pull: Tensor
    _defining: tuple[str, ...] = ()
    # What `to` carries along; computed on the CPU, where unique and bincount cost no synchronisation.
    _tensors: tuple[str, ...] = ()
    _constants: tuple[str, ...] = ("count", "whole", "for_all")

    @cached_property
    def receives(self) -> Tensor:
        raise NotImplementedError

    @cached_property
    def taken(self) -> Tensor:
        """(K,) how far each client really moves: its pull where it receives, else 0."""
        return torch.where(self.receives, self.pull, 0.0)

    @cached_property
    def whole(self) -> bool:
        """Whether everyone who receives takes the value as it is (pull 1), so that installing is a plain copy."""
        return bool((self.pull[self.receives] == 1).all())

    @cached_property
    def for_all(self) -> bool:
        """Whether everyone receives a value."""
        return bool(self.receives.all())

    def __len__(self) -> int:
        return self.pull.shape[0]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Planned) or type(self) is not type(other) or len(self) != len(other):
            return False
        mine, theirs = self.to("cpu"), other.to("cpu")
        same = (torch.equal(getattr(mine, key), getattr(theirs, key)) for key in self._defining)
        return self.constants == other.constants and all(same)

    __hash__ = None  # type: ignore[assignment]  # equal by content, and tensors cannot be hashed by content

    @property
    def constants(self) -> dict[str, Any]:
        """What defines the unit's plan beside tensors."""
        return {}

    @property
    def lists(self) -> dict[str, Any]:
        """The defining tensors as lists, and what else defines it."""
        return {key: getattr(self, key).tolist() for key in self._defining} | self.constants

    def problem(self) -> str | None:
        """What is wrong with the values, as the end of a sentence that names the unit; None when all is well."""
        for bad, tell in self._faults():
            if bool(bad.any()):
                first = int(bad.nonzero()[0])
                return f"client {first} has {tell(first)}"
        return None

    def _faults(self) -> Sequence[tuple[Tensor, Callable[[int], str]]]:
        raise NotImplementedError

    def describe(self) -> str:
        """One line of a printed plan: who shares, then who is on its own, then how far they move."""
        words, private = self._sharing()
        if not words:
            return "private"
        if private:
            words += f"; {private} private"
        if not self.whole:
            low, high = (f"{float(x):.2f}" for x in self.pull[self.receives].aminmax())
            words += f"; pull {low}" + (f" to {high}" if low != high else "")
        return words

    def _sharing(self) -> tuple[str, int]:
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        """This unit's plan with everything derived from it on `device`; made once per device and kept."""
        device = torch.device(device)
        if device == torch.device("cuda"):  # without a number: "cuda" and "cuda:0" are one device and one copy
            device = torch.device("cuda", torch.cuda.current_device())
        if device == self.pull.device:
            return self
        copies: dict[str, Self] = self.__dict__.setdefault("_copies", {})
        if str(device) not in copies:
            copy = object.__new__(type(self))
            copy.__dict__.update({key: getattr(self, key).to(device) for key in self._tensors})
            copy.__dict__.update({key: getattr(self, key) for key in self._constants})
            copies[str(device)] = copy
        return copies[str(device)]
