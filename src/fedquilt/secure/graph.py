"""Who masks with whom: all with all in small circles, some neighbours each in large ones (Bell et al. 2020).

Neighbours lie beside one another on a ring in an order drawn by chance. With these many, whichever tenth of the clients
colludes and whichever tenth leaves: the chance that a client's secrets are held by too many colluders, or that it has
honest neighbours no more, is below 2^-40, that too few holders stay below 2^-20. A test computes it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

ALL_PAIRS = 20  # members up to which all mask with all


def degree(members: int) -> int:
    """How many neighbours each of so many members has.

    >>> degree(10), degree(20), degree(100), degree(1000)
    (9, 19, 34, 54)
    """
    if members <= ALL_PAIRS:
        return members - 1
    return min(members - 1, 2 * math.ceil(3 * math.log2(members) - 3))


def neighbours(members: Sequence[int]) -> dict[int, list[int]]:
    """The neighbours of each member; masks cancel whoever they are, so no result depends on the draw."""
    count, near = len(members), degree(len(members))
    if near == count - 1:
        return {member: [other for other in members if other != member] for member in members}
    ring = random.SystemRandom().sample(list(members), count)
    steps = [step for step in range(-near // 2, near // 2 + 1) if step]
    return {member: sorted(ring[(at + step) % count] for step in steps) for at, member in enumerate(ring)}
