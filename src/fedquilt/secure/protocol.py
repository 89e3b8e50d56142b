"""The protocol of one circle in one round: four questions to each member, by which the server learns a sum.

1. keys: every member makes two fresh key pairs and tells the public keys: one for masks, one for sealed shares. It
   binds itself to its self mask's seed by a hash of it; to its mask key's seed it is bound by the public key.
2. shares: it hears its neighbours' keys, draws a self mask's seed, and gives each neighbour, sealed, one share of that
   seed and one of its mask key's seed.
3. masked: it hears who gave shares, and sends its numbers + its self mask +- a mask for each of these neighbours.
   Masks of pairs cancel in the sum.
4. unmask: it hears whose masked numbers arrived. For each of these neighbours it gives the share of the self mask, for
   those that left after giving shares that of the mask key; never both, and it answers once.

`Party` is a member, `Sum` the server. Members are known by numbers. Whoever does not answer is left out from there on.
A member that gives shares that are none spoils its circle's sum at most: what is put together must be what its owner is
bound to, else other holders' shares are tried; who gave or holds wrong ones can be told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial

import numpy as np

from fedquilt.secure import masks, shamir
from fedquilt.secure.fixed_point import Whole
from fedquilt.secure.graph import degree, neighbours
from fedquilt.secure.settings import SecureSums

_MASK, _BOUND, _SHARE = b"mask", b"bound", b"share from %d to %d"
_KEYS = 2 * masks.PUBLIC  # bytes of a member's keys; after them comes what binds it


class Unsafe(ValueError):
    """What a member is asked for would not keep its copy secret."""


class TooFew(RuntimeError):
    """So many members left that the sum cannot be opened, or must not be."""


class Spoilt(RuntimeError):
    """A member did not keep to the protocol, and its circle's sum is worth nothing."""


class Party:
    """One member of a circle in one round. Its secrets are nowhere but here, and last as long as it does."""

    def __init__(self, number: int, settings: SecureSums) -> None:
        self.number, self.settings = number, settings
        self._mask_seed, self._self_seed = masks.fresh_seed(), masks.fresh_seed()
        self._mask_key, self._letter_key = masks.KeyPair(self._mask_seed), masks.KeyPair(masks.fresh_seed())
        self._peers: dict[int, bytes] = {}
        self._least = 0
        self._held: dict[int, bytes] = {}  # both shares of each neighbour that gave some, and its own
        self._asked = 0  # how many of the four questions were answered

    @property
    def known(self) -> int:
        """How many members it knows of: its neighbours, and itself."""
        return len(self._peers) + 1

    def keys(self) -> bytes:
        """Its public keys, for masks and for letters, and what binds it to its self mask."""
        self._next(1)
        return self._mask_key.public + self._letter_key.public + masks.derive(self._self_seed, _BOUND)

    def shares(self, peers: Mapping[int, bytes], members: int) -> dict[int, bytes]:
        """For each neighbour its sealed shares; `peers` are the neighbours' public keys, `members` how many there are
        in the circle."""
        self._next(2)
        if members < self.settings.minimum:
            raise Unsafe(f"a circle of {members} is smaller than secure.minimum={self.settings.minimum}")
        if self.number in peers or len(peers) < degree(members) or len(set(peers.values())) < len(peers):
            raise Unsafe(f"{len(peers)} neighbours with {len(set(peers.values()))} keys cannot be those of {members}")
        holders = [self.number, *peers]
        self._peers, self._least = dict(peers), self.settings.least(len(holders))
        of_self = shamir.split(self._self_seed, self._least, holders)
        of_key = shamir.split(self._mask_seed, self._least, holders)
        self._held[self.number] = of_self[self.number] + of_key[self.number]
        return {peer: masks.seal(self._letter(peer, out=True), of_self[peer] + of_key[peer]) for peer in peers}

    def masked(self, numbers: Whole, received: Mapping[int, bytes]) -> Whole:
        """Its numbers under its masks; `received` are the sealed shares that neighbours gave it."""
        hidden = numbers.copy()
        for sign, key in self.mask_keys(received):
            _add(hidden, sign, masks.stream(key, len(hidden), hidden.dtype))
        return hidden

    def mask_keys(self, received: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """What its masks are drawn by, with their signs: its own first, then one for each neighbour, by number."""
        self._next(3)
        if not received.keys() <= self._peers.keys() or len(received) + 1 < self._least:
            raise Unsafe(f"shares of {len(received)} neighbours cannot bring back what is masked")
        for peer, sealed in received.items():
            try:
                self._held[peer] = masks.unseal(self._letter(peer, out=False), sealed)
            except ValueError:  # it will give shares of this neighbour that are none, and the server will notice
                self._held[peer] = bytes(2 * shamir.SHARE)
        pairs = ((_sign(self.number, peer), self._pair(peer)) for peer in sorted(received))
        return iter([(1, masks.derive(self._self_seed, _MASK)), *pairs])

    def unmask(self, arrived: Collection[int], left: Collection[int]) -> dict[int, bytes]:
        """A share for each neighbour, and for itself: of the self mask of those whose masked numbers `arrived`, of the
        mask key of those who `left`."""
        self._next(4)
        arrived, left = set(arrived), set(left)
        if arrived & left or not arrived | left <= self._held.keys() or self.number not in arrived:
            raise Unsafe("both masks of a client are asked for, or those of a stranger")
        if len(arrived) < max(self._least, min(self.settings.minimum, self.known)):
            raise Unsafe(f"the sum of {len(arrived)} clients would say too much of each")
        of_self = {number: self._held[number][: shamir.SHARE] for number in arrived}
        shares = of_self | {number: self._held[number][shamir.SHARE :] for number in left}
        self._held.clear()
        return shares

    def _next(self, question: int) -> None:
        """The four questions come once each and in order: an answer to one asked again could say what the first hid."""
        if question != self._asked + 1:
            raise Unsafe(f"question {question} was asked after question {self._asked}")
        self._asked = question

    def _pair(self, peer: int) -> bytes:
        return self._mask_key.agreed(self._peers[peer][: masks.PUBLIC], _MASK)

    def _letter(self, peer: int, out: bool) -> bytes:
        purpose = _SHARE % ((self.number, peer) if out else (peer, self.number))
        return self._letter_key.agreed(self._peers[peer][masks.PUBLIC :], purpose)


class Sum:
    """The server's side of one circle in one round. It keeps the sum of what came masked, and no member's part."""

    def __init__(self, keys: Mapping[int, bytes], settings: SecureSums) -> None:
        if len(keys) < settings.minimum:
            raise TooFew(f"a circle of {len(keys)} is smaller than secure.minimum={settings.minimum}")
        self.settings, self.keys = settings, dict(keys)
        self.graph = neighbours(sorted(keys))
        self.given: dict[int, dict[int, bytes]] = {}  # by sender, its sealed shares by receiver
        self.arrived: set[int] = set()
        self.total: Whole | None = None
        self._shares: dict[int, dict[int, bytes]] = {}  # by whose secret, the holders' shares
        self._wrong: dict[int, set[int]] = {}  # by whose secret, the holders whose shares did not fit

    @property
    def left(self) -> set[int]:
        """Who gave shares and sent nothing masked."""
        return set(self.given) - self.arrived

    def peers(self, member: int) -> dict[int, bytes]:
        """Question 2: the public keys of a member's neighbours."""
        return {other: self.keys[other][:_KEYS] for other in self.graph[member]}

    def take_shares(self, member: int, shares: Mapping[int, bytes]) -> None:
        """Answer 2."""
        if set(shares) != set(self.graph[member]):
            raise ValueError("shares for others than the neighbours")
        self.given[member] = dict(shares)

    def received(self, member: int) -> dict[int, bytes]:
        """Question 3: what the neighbours that gave shares gave to a member."""
        return {other: self.given[other][member] for other in self.graph[member] if other in self.given}

    def take_masked(self, member: int, numbers: Whole) -> None:
        """Answer 3: added up as it comes."""
        if self.total is None:
            self.total = np.zeros_like(numbers)
        self.total += numbers
        self.arrived.add(member)

    def fates(self, member: int) -> tuple[list[int], list[int]]:
        """Question 4: which of a member and its neighbours arrived, and which left."""
        near = {member, *self.graph[member]}
        return sorted(near & self.arrived), sorted(near & self.left)

    def take_unmask(self, member: int, shares: Mapping[int, bytes]) -> None:
        """Answer 4."""
        if set(shares) != set().union(*self.fates(member)) or any(len(s) != shamir.SHARE for s in shares.values()):
            raise ValueError("shares of others than were asked for")
        for owner, share in shares.items():
            self._shares.setdefault(owner, {})[member] = share

    def ready(self) -> bool:
        """Whether enough members sent something masked that its sum may be opened."""
        return len(self.arrived) >= self.settings.minimum

    def open(self) -> Whole:
        """The sum of the numbers of all who arrived: what came masked, less the masks that do not cancel.

        `Spoilt` where a secret that its owner is bound to cannot be put together.
        """
        if self.total is None or not self.ready():
            raise TooFew(f"{len(self.arrived)} of {len(self.keys)} members sent something; nothing can be opened")
        secrets, asked = dict[int, bytes](), sorted(self.arrived | self.left)
        for number in asked:  # all of them, so that all are known who are to blame
            with suppress(Spoilt):
                secrets[number] = self._secret(number)
        if len(secrets) < len(asked):
            raise Spoilt("shares of a secret do not come to what its owner is bound to")
        total = self.total.copy()
        for number in self.arrived:
            _add(total, -1, masks.stream(masks.derive(secrets[number], _MASK), len(total), total.dtype))
        for gone in self.left:
            pair = masks.KeyPair(secrets[gone])
            for other in sorted(self.arrived & set(self.graph[gone])):
                key = pair.agreed(self.keys[other][: masks.PUBLIC], _MASK)
                _add(total, -_sign(other, gone), masks.stream(key, len(total), total.dtype))
        return total

    @property
    def blamed(self) -> set[int]:
        """Members with more than one share that did not fit: of their own secret, or of others' that they hold.

        Of a single one nobody can say whether its owner or its holder is to blame.
        """
        pairs = {(owner, holder) for owner, holders in self._wrong.items() for holder in holders}
        found: set[int] = set()
        while pairs:
            times = Counter(member for pair in pairs for member in pair)
            worst, most = times.most_common(1)[0]
            if most < 2:
                break
            found.add(worst)
            pairs = {pair for pair in pairs if worst not in pair}
        return found

    def _secret(self, number: int) -> bytes:
        """What a member's shares come to, if it is what the member is bound to; other holders' are tried if not."""
        shares, least = self._shares.get(number, {}), self.settings.least(len(self.graph[number]) + 1)
        if len(shares) < least:
            raise TooFew(f"{len(shares)} shares are fewer than the {least} that a secret is put together from")
        found = shamir.recover(shares, least, partial(self._fits, number), self.blamed)
        self._wrong[number] = set(shares) if found is None else found[1]
        if found is None:
            raise Spoilt
        return found[0]

    def _fits(self, number: int, secret: bytes) -> bool:
        if number in self.arrived:
            return masks.derive(secret, _BOUND) == self.keys[number][_KEYS:]
        return masks.KeyPair(secret).public == self.keys[number][: masks.PUBLIC]


def _sign(own: int, other: int) -> int:
    return 1 if own < other else -1


def _add(total: Whole, sign: int, mask: Whole) -> None:
    """Add a mask in place, modulo 2^bits."""
    (np.add if sign > 0 else np.subtract)(total, mask, out=total)
