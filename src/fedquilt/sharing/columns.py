"""Columns of copies in blocks, and what is summed over all of them, also where others hold some of the columns.

Among ranks each holds some columns of all copies. A rule that sums over columns by `over_columns` need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

# Doubles of one block of columns: small enough to stay in a CPU's cache, few launches and at most 512 MiB on a GPU.
_BLOCK = {"cpu": 2**18, "cuda": 2**26}


class _Share(NamedTuple):
    """Which columns are here: the shards between `ends`; `added` gives the sum over all shards, here and elsewhere."""

    ends: tuple[int, ...]
    added: Callable[[Sequence[Tensor]], Tensor]


_share: ContextVar[_Share | None] = ContextVar("share of columns", default=None)


@contextmanager
def share_of_columns(ends: Sequence[int], added: Callable[[Sequence[Tensor]], Tensor]) -> Iterator[None]:
    """Within it, copies are columns of wider ones, in shards between `ends`. No block reaches over a shard's end: what
    is found, to the last bit, does not depend on who holds which shards.

    `added` takes what was found for each shard that is here and gives the sum over all of them.

    >>> import torch
    >>> with share_of_columns([0, 1, 3], added=lambda found: found[0] + found[1] + 100):
    ...     over_columns(torch.ones(2, 3), lambda columns: torch.ones(2, 3)[:, columns].sum(1))
    tensor([103., 103.])
    """
    before = _share.set(_Share(tuple(ends), added))
    try:
        yield
    finally:
        _share.reset(before)


def column_blocks(values: Tensor) -> Iterator[slice]:
    """Column blocks that keep temporaries small; a single one for units of common size on a GPU."""
    share, width = _share.get(), values.shape[1]
    shards = pairwise((0, width) if share is None or share.ends[-1] != width else share.ends)
    found = (block for start, stop in shards if stop > start for block in _blocks(values, start, stop))
    return found if width else iter([slice(0, 0)])


def over_columns(values: Tensor, of: Callable[[slice], Tensor]) -> Tensor:
    """The sum over all columns of copies of what `of` finds for a block of them."""
    share = _share.get()
    if share is None:
        return _summed(of, _blocks(values, 0, values.shape[1]))
    return share.added([_summed(of, _blocks(values, start, stop)) for start, stop in pairwise(share.ends)])


def _blocks(values: Tensor, start: int, stop: int) -> Iterator[slice]:
    width = max(1, _BLOCK["cuda" if values.is_cuda else "cpu"] // max(1, len(values)))
    return (slice(at, min(at + width, stop)) for at in range(start, max(start + 1, stop), width))


def _summed(of: Callable[[slice], Tensor], blocks: Iterator[slice]) -> Tensor:
    total = of(next(blocks))
    for block in blocks:
        total += of(block)
    return total
