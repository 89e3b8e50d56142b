"""The plan of one unit over all clients: the three vectors, and the dense form.

What a round needs each time (who sends, who receives, a dense row number per circle) is derived once, on the CPU, and
copied to a device once, so that a round asks the device no questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

Numbers = Tensor | Sequence[float] | Sequence[int]
PRIVATE = -1


class _Unit:
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
        if not isinstance(other, _Unit) or type(self) is not type(other) or len(self) != len(other):
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


@dataclass(frozen=True, eq=False, init=False, repr=False)
class UnitPlan(_Unit):
    """The three vectors of one unit over all K clients.

    `circle[i]` is the id of the circle client i shares the unit in, -1: with nobody. `weight[i]` is how much its copy
    counts there, `pull[i]` how far it moves from its own copy to the circle's value (one number stands for all). For a
    private client weight and pull mean nothing and are kept as 0. Values are checked when a `Plan` takes the unit in.
    `pool` says that there are so many circles, 0, 1, ..., whoever is in them: one that is empty keeps its value, and
    each starts from first weights of its own draw.

    >>> unit = UnitPlan(circle=[0, 0, 7, -1], weight=[1, 3, 5, 9])
    >>> unit.sends.tolist(), unit.members.tolist()      # a circle of one member does not move
    ([True, True, False, False], [2, 1])
    """

    circle: Tensor
    weight: Tensor
    pull: Tensor
    pool: int | None
    _defining = ("circle", "weight", "pull")
    _constants = ("count", "whole", "for_all", "pool")
    _tensors = ("circle", "weight", "pull", "labels", "row", "members", "sends", "receives", "taken")

    def __init__(
        self, circle: Numbers, weight: Numbers | float = 1.0, pull: Numbers | float = 1.0, pool: int | None = None
    ) -> None:
        # Copies: a caller that goes on writing into its tensors must not change a plan.
        numbers = torch.as_tensor(circle).detach()
        ids = numbers.to("cpu", torch.int64, copy=True)
        if numbers.is_floating_point() and not torch.equal(numbers.cpu(), ids.to(numbers.dtype)):
            raise ValueError("circles are whole numbers, -1 for private; give one id per client")
        if ids.ndim != 1:
            raise ValueError(f"circle has shape {tuple(ids.shape)}; give one circle id per client")
        object.__setattr__(self, "circle", ids)
        object.__setattr__(self, "pool", pool)
        for key, given in (("weight", weight), ("pull", pull)):
            vector = torch.as_tensor(given).detach().to("cpu", torch.float32, copy=True)
            if vector.ndim == 0:
                vector = vector.repeat(len(ids))
            if vector.shape != ids.shape:
                raise ValueError(
                    f"{key} has shape {tuple(vector.shape)} but there are {len(ids)} clients; give one each"
                )
            object.__setattr__(self, key, torch.where(ids == PRIVATE, 0.0, vector))

    @property
    def constants(self) -> dict[str, Any]:
        return {} if self.pool is None else {"pool": self.pool}

    @cached_property
    def _circles(self) -> tuple[Tensor, Tensor, Tensor]:
        inside = self.circle >= 0
        row = torch.zeros_like(self.circle)
        if self.pool is not None:
            row[inside] = self.circle[inside]
            return torch.arange(self.pool), row, torch.bincount(self.circle[inside], minlength=self.pool)
        labels, dense, members = torch.unique(self.circle[inside], return_inverse=True, return_counts=True)
        row[inside] = dense
        return labels, row, members

    @cached_property
    def labels(self) -> Tensor:
        """(C,) the circle ids in use, ascending: row r of the unit's values is the value of circle labels[r]."""
        return self._circles[0]

    @cached_property
    def row(self) -> Tensor:
        """(K,) the row of each client's circle among the unit's values; 0 where private, as weight and pull are 0."""
        return self._circles[1]

    @cached_property
    def members(self) -> Tensor:
        """(C,) how many clients each circle has."""
        return self._circles[2]

    @cached_property
    def count(self) -> int:
        """How many circles there are."""
        return len(self.labels)

    @cached_property
    def shared(self) -> Tensor:
        """(K,) who is in a circle with somebody else; in a pool, in any: others were in it, or will be."""
        if not self.count:
            return torch.zeros(len(self), dtype=torch.bool)
        least = 2 if self.pool is None else 1
        return (self.circle >= 0) & (self.members[self.row] >= least)

    @cached_property
    def sends(self) -> Tensor:
        """(K,) who sends its copy to be merged."""
        return self.shared & (self.weight > 0)

    @cached_property
    def receives(self) -> Tensor:
        """(K,) who receives its circle's value."""
        return self.shared & (self.pull > 0)

    def _faults(self) -> Sequence[tuple[Tensor, Callable[[int], str]]]:
        last = torch.iinfo(torch.int64).max if self.pool is None else self.pool - 1
        return (
            (self.circle < PRIVATE, lambda i: f"the circle {int(self.circle[i])}; ids start at 0, and -1 is private"),
            (self.circle > last, lambda i: f"the circle {int(self.circle[i])}, which is not in a pool of {self.pool}"),
            (
                ~(torch.isfinite(self.weight) & (self.weight >= 0)),
                lambda i: f"the weight {float(self.weight[i]):g}; a weight is a finite number from 0 up",
            ),
            (
                ~((self.pull >= 0) & (self.pull <= 1)),
                lambda i: f"the pull {float(self.pull[i]):g}; a pull goes from 0 (keep mine) to 1 (take the circle's)",
            ),
        )

    def _sharing(self) -> tuple[str, int]:
        least = 2 if self.pool is None else 1
        sizes = sorted((n for n in self.members.tolist() if n >= least), reverse=True)
        shown = ", ".join(str(n) for n in (sizes if len(sizes) <= 12 else sizes[:10]))
        more = f", ... {sizes[-1]}" if len(sizes) > 12 else ""
        words = f"{len(sizes)} circle{'s' * (len(sizes) > 1)} of {shown}{more}" if sizes else ""
        return words, len(self) - sum(sizes)

    def peers(self) -> Iterator[tuple[int, int]]:
        """Pairs of a client and the circle it is in: clients with the same second number must have the same shapes."""
        return ((i, c) for i, c in enumerate(self.circle.tolist()) if c >= 0)

    def __repr__(self) -> str:
        return f"UnitPlan({self.describe()})"


@dataclass(frozen=True, eq=False, init=False, repr=False)
class MixedUnit(_Unit):
    """The dense form: client i receives sum_j matrix[i, j] * copy_j. A row of zeros is a client that receives nothing.

    >>> unit = MixedUnit([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    >>> unit.sends.tolist(), unit.receives.tolist()     # client 1 would get back its own copy: it does not travel
    ([True, True, False], [True, False, False])
    """

    matrix: Tensor
    pull: Tensor
    _defining = ("matrix", "pull")
    _tensors = ("matrix", "pull", "row", "labels", "sends", "receives", "taken")

    def __init__(self, matrix: Tensor | Sequence[Sequence[float]], pull: Numbers | float = 1.0) -> None:
        dense = torch.as_tensor(matrix).detach().to("cpu", torch.float32, copy=True)
        if dense.ndim != 2 or dense.shape[0] != dense.shape[1]:
            raise ValueError(f"matrix has shape {tuple(dense.shape)}; give one row and one column per client")
        vector = torch.as_tensor(pull).detach().to("cpu", torch.float32, copy=True)
        if vector.ndim == 0:
            vector = vector.repeat(len(dense))
        if vector.shape != dense.shape[:1]:
            raise ValueError(f"pull has shape {tuple(vector.shape)} but there are {len(dense)} clients; give one each")
        object.__setattr__(self, "matrix", dense)
        object.__setattr__(self, "pull", torch.where((dense == 0).all(1), 0.0, vector))

    @cached_property
    def count(self) -> int:
        """Every client has a value of its own: as many rows as clients."""
        return len(self)

    @cached_property
    def row(self) -> Tensor:
        return torch.arange(len(self))

    @cached_property
    def labels(self) -> Tensor:
        return torch.arange(len(self))

    @cached_property
    def _needs(self) -> Tensor:
        """(K, K) whether i needs j's copy, i not j. With it i's own copy is needed too, when it is in the mixture."""
        needs = (self.matrix > 0) & (self.pull > 0)[:, None]
        return needs & ~torch.eye(len(self), dtype=torch.bool)

    @cached_property
    def receives(self) -> Tensor:
        """(K,) who receives a mixture that holds somebody else's copy."""
        return self._needs.any(1)

    @cached_property
    def sends(self) -> Tensor:
        """(K,) whose copy is in a mixture that somebody receives; one's own included, the server has to add it in."""
        return ((self.matrix > 0) & self.receives[:, None]).any(0)

    def _faults(self) -> Sequence[tuple[Tensor, Callable[[int], str]]]:
        total = self.matrix.sum(1)
        return (
            (
                ~(torch.isfinite(self.matrix) & (self.matrix >= 0)).all(1),
                lambda i: "a mixture with a share that is negative or not finite; shares are numbers from 0 up",
            ),
            (
                ((total - 1).abs() > 1e-4) & (total != 0),
                lambda i: f"a mixture whose shares sum to {float(total[i]):g}; make a row sum to 1, or 0 for nothing",
            ),
            (
                ~((self.pull >= 0) & (self.pull <= 1)),
                lambda i: f"the pull {float(self.pull[i]):g}; a pull goes from 0 (keep mine) to 1 (take the mixture)",
            ),
        )

    def _sharing(self) -> tuple[str, int]:
        receivers = int(self.receives.sum())
        return f"mixed for {receivers} from {int(self.sends.sum())}" if receivers else "", len(self) - receivers

    def peers(self) -> Iterator[tuple[int, int]]:
        """Pairs of a client and one whose mixture it is in: those with the same second number need the same shapes."""
        return ((j, i) for i, j in (self.matrix > 0).nonzero().tolist())

    def __repr__(self) -> str:
        return f"MixedUnit({self.describe()})"


AnyUnit = UnitPlan | MixedUnit
