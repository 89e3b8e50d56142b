"""Shamir's secret sharing (1979): a secret of 16 bytes in shares, of which some are enough and fewer say nothing.

A random polynomial modulo the prime 2^130 - 5 has the secret as its value at 0; holder x gets its value at x. What
finds the value at 0 is the same for all secrets of one set of holders, so that putting together takes microseconds.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

PRIME = 2**130 - 5
SECRET, SHARE = 16, 17  # bytes
_TRIES = 1000  # sets of holders, where some shares are wrong: enough for a tenth of some fifty, or half of a few


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
    found = _through(shares, sorted(shares)[:least], 0)
    if found >> (8 * SECRET):
        raise ValueError("the shares do not belong together")
    return found.to_bytes(SECRET, "big")


def recover(
    shares: Mapping[int, bytes], least: int, fits: Callable[[bytes], bool], doubted: Collection[int] = ()
) -> tuple[bytes, set[int]] | None:
    """The secret that `fits`, where some shares may be wrong, and whose are; None where none is found.

    Holders that are `doubted` are asked last.

    >>> shares = split(b"sixteen bytes...", 2, [0, 1, 2, 3])
    >>> recover(shares | {1: bytes(SHARE)}, 2, b"sixteen bytes...".__eq__)
    (b'sixteen bytes...', {1})
    """
    holders, draw = sorted(shares, key=lambda holder: (holder in doubted, holder)), random.Random(0)
    for attempt in range(_TRIES):
        chosen = draw.sample(holders, least) if attempt else holders[:least]
        try:
            secret = combine({holder: shares[holder] for holder in chosen}, least)
        except ValueError:
            continue
        if fits(secret):
            # the first set is right as a rule: what the others hold is looked at where it was not
            others = set(holders) - set(chosen) if attempt or doubted else set()
            return secret, {h for h in others if _through(shares, chosen, h + 1) != int.from_bytes(shares[h], "big")}
    return None


def _value(polynomial: Sequence[int], at: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * at + coefficient) % PRIME
    return value


def _through(shares: Mapping[int, bytes], chosen: Collection[int], at: int) -> int:
    """The value at a place of the polynomial through some holders' shares."""
    factors = _factors(tuple(sorted(chosen)), at)
    points = (int.from_bytes(shares[holder], "big") for holder in sorted(chosen))
    return sum(point * factor for point, factor in zip(points, factors, strict=True)) % PRIME


@lru_cache(maxsize=256)
def _factors(holders: tuple[int, ...], at: int) -> tuple[int, ...]:
    """What each holder's share counts in the value at a place (Lagrange)."""
    factors = []
    for own in holders:
        above = below = 1
        for other in holders:
            if other != own:
                above = above * (other + 1 - at) % PRIME
                below = below * (other - own) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
