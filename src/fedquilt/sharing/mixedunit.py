"""The dense form of a plan of one unit: client i receives any mixture of the others' copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedquilt.sharing.planned import Numbers, Planned
from fedquilt.sharing.unitplan import UnitPlan


@dataclass(frozen=True, eq=False, init=False, repr=False)
class MixedUnit(Planned):
    """The dense form: client i receives sum_j matrix[i, j] * copy_j. A row of zeros is a client that receives nothing.

    A copy is what a client sent last, be it rounds ago, and at first the first weights.

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
