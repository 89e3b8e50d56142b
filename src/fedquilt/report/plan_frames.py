"""Plans as pictures: the order of clients in which blocks show, the colours of circles, and the frames of a slider."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist

Ints = NDArray[np.int64]
Plans = Sequence[tuple[int, Mapping[str, Ints]]]

BLANK = -1
COLOURS = 21  # that the page has for circles, before they come round again
MANY = 2000  # clients; above it the distances between all pairs cost more than the order is worth


def packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array as the page reads it: type, shape and little-endian bytes in base64.

    >>> packed(np.array([1, 2], dtype=np.uint8))
    {'type': 'u1', 'shape': [2], 'data': 'AQI='}
    """
    data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    kind = f"{data.dtype.kind}{data.dtype.itemsize}"
    return {"type": kind, "shape": list(array.shape), "data": base64.b64encode(data.tobytes()).decode("ascii")}


def small(array: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers >= 0 in the smallest unsigned type that holds them.

    >>> small(np.array([3, 300])).dtype
    dtype('uint16')
    """
    highest = int(array.max(initial=0))
    return array.astype(np.uint8 if highest < 2**8 else np.uint16 if highest < 2**16 else np.uint32)


def shared(circle: Ints) -> Ints:
    """Circles with their clients; a client that is the only one in its circle shares with nobody.

    >>> shared(np.array([0, 0, 1, -1])).tolist()
    [0, 0, -1, -1]
    """
    ids, place, count = np.unique(circle, return_inverse=True, return_counts=True)
    return np.where((count[place] > 1) & (ids[place] >= 0), circle, BLANK)


def order_by_similarity(columns: NDArray[Any]) -> Ints:
    """The clients (rows) so that those with the same circles in most units (columns) are neighbours.

    >>> order_by_similarity(np.array([[0, 1], [0, 2], [0, 1], [0, 2]])).tolist()
    [0, 2, 1, 3]
    """
    clients = len(columns)
    # Sorting first makes equal clients neighbours in a known order; average linkage then moves whole blocks together.
    first = np.lexsort((np.arange(clients), *reversed(columns.T))) if columns.shape[1] else np.arange(clients)
    if clients < 3 or clients > MANY or not columns.shape[1]:
        return first.astype(np.int64)
    leaves = leaves_list(linkage(pdist(columns[first], "hamming"), "average"))
    return np.asarray(first[leaves], dtype=np.int64)


def frames(plans: Plans, clients: int, most: int = 3_000_000) -> dict[str, Any] | None:
    """What the page needs to draw a run's quilt at any round; None where there are no plans.

    Each frame holds only the units that differ from the frame before. `circles` lists [unit, id, colour]; a cell is the
    number of its circle in that list plus one, 0 for private. With more than `most` cells, frames in between are left
    out evenly; `thinned` says so.
    """
    units = list(dict.fromkeys(name for _, plan in plans for name in plan))
    if not units:
        return None
    thinned = len(plans) * len(units) * clients > most
    if thinned:
        keep = max(2, most // (len(units) * clients))
        plans = [plans[i] for i in np.unique(np.linspace(0, len(plans) - 1, keep).astype(int))]
    empty = np.full(clients, BLANK, dtype=np.int64)
    layers = layers_of_blocks(units)
    pooled = {units[u] for layer in layers or () for u in layer}  # here a circle of one is a block in use, not private

    def column(plan: Mapping[str, Ints], unit: str) -> Ints:
        circle = _sized(plan.get(unit, empty), clients)
        return np.maximum(circle, BLANK) if unit in pooled else shared(circle)

    sheets = [np.stack([column(plan, unit) for unit in units], axis=1) for _, plan in plans]
    # Blocks side by side in a layer are told apart by colour; elsewhere a colour is a group of clients.
    colours = circle_colours(sheets, {u: j for layer in layers or () for j, u in enumerate(layer)})
    number = {key: i + 1 for i, key in enumerate(colours)}

    told: list[dict[str, Any]] = []
    before = None
    for (at, _), sheet in zip(plans, sheets, strict=True):
        changed = [u for u in range(len(units)) if before is None or (sheet[:, u] != before[:, u]).any()]
        if changed or not told:
            told.append({"round": at, "units": {str(u): packed(_numbered(sheet[:, u], u, number)) for u in changed}})
        before = sheet
    return {
        "units": units,
        "order": order_by_similarity(_sample(sheets)).tolist(),
        "circles": [[unit, circle, colour] for (unit, circle), colour in colours.items()],
        "frames": told,
        "thinned": bool(thinned),
        "layers": layers,
    }


def circle_colours(sheets: Sequence[Ints], given: Mapping[int, int] | None = None) -> dict[tuple[int, int], int]:
    """A colour number for each (unit, circle): in two units the same only for a circle of exactly the same clients.

    Circles keep their colour over rounds, and no two circles of a unit have the same. Latest plans choose first. Where
    there are more groups of clients than colours, they come round again. `given` are colours for the first circle of
    some units.

    >>> nested = np.array([[0, 7, 3], [0, 7, 3], [0, 8, 3], [0, 8, 4], [0, 8, 4]])
    >>> circle_colours([nested])
    {(0, 0): 0, (1, 8): 1, (1, 7): 2, (2, 3): 3, (2, 4): 4}
    >>> circle_colours([nested[:, [0, 1, 1]]])                               # twice the same groups
    {(0, 0): 0, (1, 8): 1, (1, 7): 2, (2, 8): 1, (2, 7): 2}
    """
    colours: dict[tuple[int, int], int] = {}
    taken: dict[int, set[int]] = {}
    groups: dict[bytes, int] = {}  # the colour of a group of clients
    for sheet in reversed(sheets):
        for unit in range(sheet.shape[1]):
            ids, count = np.unique(sheet[sheet[:, unit] >= 0, unit], return_counts=True)
            for circle in ids[np.argsort(-count, kind="stable")].tolist():
                if (unit, circle) in colours:
                    continue
                used, members = taken.setdefault(unit, set()), (sheet[:, unit] == circle).tobytes()
                colour = given.get(unit, groups.get(members)) if given else groups.get(members)
                if colour is None or colour in used:
                    fresh = (c for c in range(COLOURS) if c not in used and c not in groups.values())
                    again = (c for c in range(len(used) + 1) if c not in used)
                    colour = next(fresh, next(again))
                colours[unit, circle] = colour
                groups.setdefault(members, colour)
                used.add(colour)
    return colours


def layers_of_blocks(units: Sequence[str]) -> list[list[int]] | None:
    """The units of a module pool, layer by layer; None for a model whose units simply follow each other.

    >>> layers_of_blocks(["encoder.0", "encoder.1", "block.1.0", "block.1.1", "output.0", "router"])
    [[0, 1], [2, 3], [4]]
    >>> layers_of_blocks(["conv1", "conv2", "head"])
    """
    found: dict[str, list[int]] = {}
    for number, name in enumerate(units):
        if match := re.fullmatch(r"(?:.*\.)?(encoder|block\.\d+|output)\.\d+(?:\..*)?", name):
            found.setdefault(match.group(1), []).append(number)
    layers = sorted(found, key=lambda k: (k == "output", int(k.split(".")[1]) if "." in k else -1))
    if "encoder" not in found or "output" not in found or max(len(blocks) for blocks in found.values()) < 2:
        return None
    return [found[layer] for layer in layers]


def _sized(circle: Ints, clients: int) -> Ints:
    """The vector at the length of the run's list of clients (names and plans may come from different moments)."""
    return np.concatenate([circle[:clients], np.full(max(0, clients - len(circle)), BLANK, dtype=np.int64)])


def _numbered(column: Ints, unit: int, number: Mapping[tuple[int, int], int]) -> NDArray[Any]:
    ids, place = np.unique(column, return_inverse=True)
    return small(np.array([number.get((unit, int(i)), 0) for i in ids])[place])


def _sample(sheets: Sequence[Ints]) -> Ints:
    """The last plan, three times as loud as two earlier ones: blocks should show at the end, and not jump before it."""
    earlier = [sheets[len(sheets) * part // 3] for part in (1, 2)] if len(sheets) > 2 else []
    return np.concatenate([sheets[-1]] * 3 + earlier, axis=1)
