"""Shamir's secret sharing (1979): a secret of 16 bytes in shares, of which some are enough and fewer say nothing.

A random polynomial modulo the prime 2^130 - 5 has the secret as its value at 0; holder x gets its value at x. What
finds the value at 0 is the same for all secrets of one set of holders, so that putting together takes microseconds.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

PRIME = 2**130 - 5
SECRET, SHARE = 16, 17  # bytes


def split(secret: bytes, least: int, holders: Collection[int]) -> dict[int, bytes]:
    """A share for each holder, by its number from 0 up; any `least` of them give the secret.

    >>> shares = split(b"sixteen bytes...", 2, [0, 1, 2])
    >>> combine({0: shares[0], 2: shares[2]}, 2)
    b'sixteen bytes...'
    """
    if len(secret) != SECRET or not 1 <= least <= len(holders):
        raise ValueError(f"{least} of {len(holders)} holders cannot share a secret of {len(secret)} bytes")
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(least - 1))]
    return {holder: _value(polynomial, holder + 1).to_bytes(SHARE, "big") for holder in holders}


def combine(shares: Mapping[int, bytes], least: int) -> bytes:
    """The secret, from at least `least` holders' shares."""
    if len(shares) < least:
        raise ValueError(f"{len(shares)} shares are fewer than the {least} that a secret is put together from")
    chosen = sorted(shares)[:least]
    points = [int.from_bytes(shares[holder], "big") for holder in chosen]
    factors = _at_zero(tuple(chosen))
    found = sum(point * factor for point, factor in zip(points, factors, strict=True)) % PRIME
    if found >> (8 * SECRET):
        raise ValueError("the shares do not belong together")
    return found.to_bytes(SECRET, "big")


def _value(polynomial: Sequence[int], at: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * at + coefficient) % PRIME
    return value


@lru_cache(maxsize=256)
def _at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """What each holder's share counts in the value at 0 (Lagrange)."""
    factors = []
    for own in holders:
        above = below = 1
        for other in holders:
            if other != own:
                above = above * (other + 1) % PRIME
                below = below * (other - own) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
