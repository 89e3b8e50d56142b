"""What a client does with its update before it leaves: all units together clipped, and with noise where it is local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of
from fedquilt.interface.messages import Instructions, Roster, UnitValues, Update
from fedquilt.interface.method import Method
from fedquilt.privacy import Privacy
from fedquilt.privacy.mechanism import INSIDE, gaussian, shrink
from fedquilt.sharing.columns import column_blocks, over_columns

CLIP, WITHIN = "dp: clip", "dp: within"  # told by the server, and reported to it, where the clip is adapted


def report_shapes(
    privacy: Privacy | None, method: Method, roster: Roster, number: int, told: Mapping[str, Tensor]
) -> Mapping[str, tuple[int, ...]] | None:
    """What a client's reports must be, by name; None where they are to be as most clients'."""
    if privacy is not None and privacy.adaptive:  # methods with reports of their own are refused there
        return {WITHIN: (1,)}
    return method.report_shapes(roster, number, told)


def protect(up: Update, down: Instructions, privacy: Privacy, keys: Sequence[int]) -> Update:
    """The update of clients with every change, from what was received, at most as long as the clip: one length over
    all units that a client sends. `keys` (k,) are what local noise is drawn by.

    Where noise is local, who has a number that is not finite sends noise alone: that it has would tell of its data.
    """
    if privacy.level in ("sample", "distributed") or not up.blocks:
        return up  # steps had their noise; or sums get it under masks, by `noisy_shares`
    device, k = up.blocks[0].value.device, len(up.ids)
    before = [received(block, down) for block in up.blocks]
    squares = torch.zeros(k, dtype=torch.float64, device=device)
    for block, start in zip(up.blocks, before, strict=True):
        squares.index_add_(0, places(block, k, device), squared_distances(start, block.value))
    clip = down.told[CLIP][:, 0].to(device).double() if CLIP in down.told else torch.full_like(squares, privacy.clip)
    factor = shrink(squares, INSIDE * clip)
    blocks = []
    for block, start in zip(up.blocks, before, strict=True):
        at = places(block, k, device)
        mine = factor[at]
        value = torch.where(mine[:, None] < 1, shortened(start, block.value, mine), block.value)
        if privacy.level == "local":
            value = torch.where(squares.isfinite()[at, None], value, start)
        if privacy.level == "local" and privacy.found > 0:
            value = value + privacy.found * clip[at, None].float() * _noise(block, at, keys)
        blocks.append(replace(block, value=value))
    reports = {WITHIN: (squares <= clip.square()).float()[:, None]} if privacy.adaptive else up.reports
    return replace(up, blocks=tuple(blocks), reports=reports)


def squared_distances(start: Tensor, value: Tensor) -> Tensor:
    """(k,) the squared lengths of what is between two (k, size), in double precision."""

    def of(columns: slice) -> Tensor:
        return (value[:, columns].double() - start[:, columns].double()).square().sum(1)

    return over_columns(value, of)


def shortened(start: Tensor, value: Tensor, factor: Tensor) -> Tensor:
    """(k, size) from `start` the part `factor` (k,) of the way to `value`, each number rounded towards `start`.

    Rounded to the nearest, a short way from large numbers could come out longer than it is.

    >>> start, part = torch.ones(1, 1), torch.tensor([0.1], dtype=torch.float64)
    >>> [float(end - 1) for end in (start + 0.1 * 1e-6, shortened(start, start + 1e-6, part))]
    [1.1920928955078125e-07, 0.0]
    """
    found = []
    for columns in column_blocks(value):
        before = start[:, columns]
        move = factor[:, None] * (value[:, columns].double() - before.double())
        end = (before.double() + move).float()
        past = (end.double() - before.double()).abs() > move.abs()
        found.append(torch.where(past, torch.nextafter(end, before), end))
    return torch.cat(found, dim=1)


def received(block: UnitValues, down: Instructions) -> Tensor:
    """(k, size) what the senders of a block received of its units."""
    parts = []
    for unit in block.units:
        found = next(value for other in down.blocks if (value := other.columns([unit])) is not None)
        parts.append(found if block.places is None else found[block.places.to(found.device)])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(block.value.device)


def places(block: UnitValues, k: int, device: torch.device) -> Tensor:
    """(k,) which of the clients of an update sent a block."""
    return torch.arange(k, device=device) if block.places is None else block.places.to(device)


def _noise(block: UnitValues, at: Tensor, keys: Sequence[int]) -> Tensor:
    """(k, size) a client's noise of each unit follows from its key and the unit's name, whatever else it sends."""
    all_keys = torch.tensor(keys, device=at.device)[at]
    parts = [
        gaussian(all_keys ^ key_of("noise", unit), size) for unit, size in zip(block.units, block.sizes, strict=True)
    ]
    return torch.cat(parts, dim=1)
