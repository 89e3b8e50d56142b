"""A whole circle in one process: the members' and the server's side of the protocol, as a simulation runs it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from fedquilt.secure import masks
from fedquilt.secure.fixed_point import Whole
from fedquilt.secure.protocol import Party, Sum
from fedquilt.secure.settings import SecureSums


def rehearse(
    numbers: NDArray[np.unsignedinteger], members: Sequence[int], settings: SecureSums, leaving: Collection[int] = ()
) -> Whole:
    """The sum of what members (n, size) send, less those `leaving` after they gave shares; opened as a server does it.

    Every pair's mask is drawn once and counts for both: two members would draw the same.

    >>> rehearse(np.arange(8, dtype=np.uint32).reshape(4, 2), [3, 5, 6, 9], SecureSums(bits=32), leaving=[5])
    array([10, 13], dtype=uint32)
    """
    parties = {member: Party(member, settings) for member in members}
    server = Sum({member: party.keys() for member, party in parties.items()}, settings)
    for member, party in parties.items():
        server.take_shares(member, party.shares(server.peers(member), len(members)))
    hidden, place = numbers.copy(), {member: at for at, member in enumerate(members)}
    for member, party in parties.items():
        own, *pairs = party.mask_keys(server.received(member))
        hidden[place[member]] += masks.stream(own[1], hidden.shape[1], hidden.dtype)
        for peer, (sign, key) in zip(sorted(server.graph[member]), pairs, strict=True):
            if sign > 0:
                mask = masks.stream(key, hidden.shape[1], hidden.dtype)
                hidden[place[member]] += mask
                hidden[place[peer]] -= mask
    staying = [member for member in members if member not in set(leaving)]
    for member in staying:
        server.take_masked(member, hidden[place[member]])
    for member in staying:
        server.take_unmask(member, parties[member].unmask(*server.fates(member)))
    return server.open()
