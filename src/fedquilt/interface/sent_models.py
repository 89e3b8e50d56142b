"""Whole models that clients sent, as a method's server half may run them on the samples that the server holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fedquilt.engines.check_models import misfit
from fedquilt.engines.objective import Model
from fedquilt.families.family import Family
from fedquilt.interface.client_stack import map_rows


@dataclass(frozen=True)
class SentModels:
    """The whole models that some clients of one architecture sent, and the server's samples as their sensors see them.

    `ids` (k,) are the clients, `first` is the name of one of them, `x` (n, ...) the samples, `classes` those of all
    clients together: a model may know the first of them only.
    """

    ids: Tensor
    first: str
    x: Tensor
    classes: int
    family: Family
    rows: Tensor  # (k, width)

    def scores(self) -> Tensor:
        """(k, n, outputs) what each of the models says of the samples."""
        try:
            return map_rows(self.family, partial(_scores, self.x), self.rows, stacked=self.rows.is_cuda)
        except RuntimeError as error:
            raise ValueError(misfit(self.first, self.x, error)) from error

    def at(self, *values: Mapping[str, Tensor]) -> Model:
        """Their module in eval mode at values of units, of which later ones count; it may be differentiated by them.

        Each is one vector, of all numbers of a unit or of its parameters alone. What is not given, and what no unit
        has, is as the first of them sent it.
        """
        parameters, buffers = self.family.layout.split(self.rows[0])
        named: dict[str, Tensor] = {}
        for unit, flat in (pair for some in values for pair in some.items()):
            named |= self.family.layout.named(unit, flat)
        return Model(self.family.evaluator(self.rows.device), parameters | buffers).at(named)


def _scores(x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
    return call(x)
