"""What a merge would make of what was sent, before it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedquilt.interface.messages import Update
from fedquilt.interface.method import Method

if TYPE_CHECKING:
    from fedquilt.core.server import Server


def merged_by_now(server: Server, ups: Sequence[Update]) -> Callable[[str, Tensor], Tensor]:
    """(k, size) of a unit and clients: the values of their circles after a merge by the plan that holds until now.

    The server stays as it is, and what the method makes of merged values is left out.
    """
    trial = copy(server)
    trial.merging = replace(server.merging, method=Method())
    trial.all_values = [
        replace(values, value=values.value.clone(), known=values.known.clone(), memory={}, captured=None)
        for values in server.all_values
    ]
    for values in list(trial.all_values):
        trial.merge_values(values, ups, [])
    return trial.held
