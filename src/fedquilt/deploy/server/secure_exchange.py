"""Secure sums over letters: after the round's own letters, which brought public keys, three more to each client.

Whoever does not answer one of them is left out from there on. What a client sent masked is added to its circle's sum
and not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.core.noisy_shares import NoisyShares, enough, in_shares
from fedquilt.core.secure_round import Circle, circles, summed
from fedquilt.core.server import Server
from fedquilt.deploy.server.answers import Exchange
from fedquilt.deploy.transport.secure_codec import Told, read_bytes, write_bytes
from fedquilt.deploy.transport.wire import Refused, pack
from fedquilt.interface.masked import Summed
from fedquilt.secure import SecureSums, masks, shamir
from fedquilt.secure.fixed_point import FixedPoint, whole_dtype
from fedquilt.secure.protocol import Spoilt, Sum, TooFew

Arrays = dict[str, NDArray[Any]]
Letters = dict[int, tuple[Arrays, dict[str, Any]]]
Read = Callable[[int, Mapping[str, NDArray[Any]]], None]  # takes one client's answer; `Refused` where it is none
Ask = Callable[[str, Letters, Read], None]  # a phase, its letters, who reads answers

_SEALED, _PUBLISHED = 2 * shamir.SHARE + 16, 2 * masks.PUBLIC + masks.BINDING


@dataclass
class _Place:
    """A circle at work, with its number among each member's own circles."""

    circle: Circle
    sum: Sum
    names: Mapping[int, str]


class SecureExchange:
    """The secure sums of one round of clients that were asked."""

    def __init__(
        self, server: Server, asked: Sequence[int], settings: SecureSums, largest_change: float = 1000.0
    ) -> None:
        self.settings, self.largest_change = settings, largest_change
        self.noise = in_shares(server.privacy)
        self.planned = circles(server, asked)
        self.own = {number: [c for c in self.planned if number in c.members] for number in asked}
        self.keys: dict[int, list[bytes]] = {}
        self._public: set[bytes] = set()  # all of them one by one
        self.spoilt: list[Circle] = []  # circles that keep their value, since a member did not keep to the protocol
        self.blamed: set[int] = set()  # members of which that is known

    def told(self, number: int) -> list[dict[str, Any]]:
        """What a client is told of its circles, in the round's letter."""
        found = []
        for circle in self.own[number]:
            share = circle.shares[circle.members.index(number)]
            found.append(Told(circle.values.units, share, circle.planned)._asdict())
        return found

    def take_keys(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Public keys from the answer to the round's letter, which has nothing else."""
        expected = [f"keys/{at}" for at in range(len(self.own[number]))]
        if set(arrays) != set(expected):
            raise Refused("unknown-unit" if set(arrays) - set(expected) else "missing-unit")
        found = [read_bytes(arrays[name], [0], _PUBLISHED)[0] for name in expected]
        new = [half for key in found for half in (key[: masks.PUBLIC], key[masks.PUBLIC : 2 * masks.PUBLIC])]
        # the others would answer no question about such keys, and be left out in its place
        if len(set(new) | self._public) < len(new) + len(self._public) or not all(map(masks.usable, new)):
            raise Refused("bad-keys")
        self.keys[number], self._public = found, self._public | set(new)

    def over(self, codes: Sequence[str], needed: int) -> bool:
        """Whether of so many clients, by the codes of their answers, those whose numbers of this round left before are
        too many for a quorum, with noise in shares: the round was begun by a server that went down, and no sum of it
        will be opened however often it comes."""
        again = codes.count("asked-again")
        return self.noise is not None and again > 0 and len(codes) - again < needed

    def run(self, ask: Ask, needed: int = 0) -> tuple[list[Circle], tuple[Summed, ...], set[int]]:
        """The three questions that are left: the circles that were opened, their sums, and who left on the way.

        `TooFew` where fewer than `needed` clients stay, or too few of a circle that was begun: then nothing was
        unmasked, and the round may come again. Once shares were asked for it must not: the same copies would be summed
        again, and of two sums whose members differ by one the difference is a copy. A circle that cannot be opened then
        keeps its value; so does one whose sum a member spoilt. With noise in shares numbers leave once, so the round
        does not come again, and where fewer than `needed` stay all circles keep their values.
        """
        places = list(self._places()) if self.noise is None or len(self.keys) >= needed else []
        ask("shares", self._letters(places, self._peers), self._take_shares(places))
        ask("masked", self._letters(places, self._received), self._take_masked(places))
        begun = {number for place in places for number in place.circle.members}
        left = begun - {number for place in places for number in place.sum.arrived}
        stayed = len(self.keys) - len(left)
        if self.noise is not None:
            places = [place for place in places if stayed >= needed and self._ready(place)]
        elif stayed < needed:
            raise TooFew(f"{stayed} of {len(self.keys)} clients stayed")
        for place in places:
            if not place.sum.ready():
                raise TooFew(f"{len(place.sum.arrived)} of {len(place.circle.members)} members of a circle stayed")
        ask("unmask", self._letters(places, self._fates), self._take_unmask(places))
        found = []
        for place in places:
            circle = place.circle.only(sorted(place.sum.arrived))
            try:
                found.append((circle, self._opened(place, circle)))
            except Spoilt:
                self.spoilt.append(circle)
            except TooFew:
                pass
            self.blamed |= place.sum.blamed
        return [circle for circle, _ in found], tuple(summed(found, {})), left

    def faults(self, round_: int, attempt: int, names: Sequence[str]) -> Exchange | None:
        """What came of the sums, for the record, where a member did not keep to the protocol."""
        if not self.spoilt and not self.blamed:
            return None
        inside = {number for circle in self.spoilt for number in circle.members}
        codes = dict.fromkeys(inside, "spoilt-sum") | dict.fromkeys(self.blamed, "bad-shares")
        units = " ".join(unit for circle in self.spoilt for unit in circle.values.units)
        refused = {names[number]: code for number, code in sorted(codes.items())}
        details = {name: str(Refused(code, units[:60])) for name, code in refused.items()}
        return Exchange(round_, "sums", attempt, list(refused), refused=refused, details=details)

    def _ready(self, place: _Place) -> bool:
        """Whether so many sent something that its sum may be opened, and has the noise that was promised."""
        assert self.noise is not None
        return place.sum.ready() and len(place.sum.arrived) >= enough(self.noise, len(place.circle.members))

    def _opened(self, place: _Place, circle: Circle) -> NDArray[np.float64]:
        """The sum of the copies of those who arrived; `Spoilt` where it is none that they can come to."""
        point: FixedPoint | NoisyShares
        if self.noise is None:
            point = self.settings.point(circle.planned)
        else:
            point = NoisyShares(self.noise, self.settings, len(place.circle.members))
        total = point.decode(place.sum.open())
        if total.size and float(np.abs(total).max()) > point.largest(len(circle.members)):
            raise Spoilt
        if self.noise is not None:
            return circle.moved(total)
        value, weight = circle.values.value[circle.row].double().numpy(force=True), sum(circle.shares)
        usual = max(float(np.linalg.norm(value)), math.sqrt(total.size))
        if float(np.linalg.norm(total - weight * value)) > weight * self.largest_change * usual:
            raise Spoilt  # as a single update that went so far would be left out
        return total

    def _places(self) -> Iterator[_Place]:
        for circle in self.planned:
            members = [number for number in circle.members if number in self.keys]
            if len(members) < self.settings.minimum:
                continue
            at = {number: next(i for i, own in enumerate(self.own[number]) if own is circle) for number in members}
            keys = {number: self.keys[number][at[number]] for number in members}
            yield _Place(circle.only(members), Sum(keys, self.settings), {n: str(i) for n, i in at.items()})

    def _letters(
        self, places: Sequence[_Place], question: Callable[[_Place, int], tuple[Arrays, dict[str, Any]] | None]
    ) -> Letters:  # fmt: skip
        """A letter for each client that is there still, with a question for each of its circles."""
        letters: Letters = {}
        for place in places:
            for number, name in place.names.items():
                asked = question(place, number)
                if asked is not None:
                    arrays, text = letters.setdefault(number, ({}, {}))
                    arrays |= {f"{kind}/{name}": array for kind, array in asked[0].items()}
                    text[name] = asked[1]
        return letters

    def _peers(self, place: _Place, number: int) -> tuple[Arrays, dict[str, Any]]:
        peers = place.sum.peers(number)
        members = len(place.circle.members)
        return {"peers": write_bytes(list(peers.values()))}, {"peers": list(peers), "members": members}

    def _received(self, place: _Place, number: int) -> tuple[Arrays, dict[str, Any]] | None:
        if number not in place.sum.given:
            return None
        received = place.sum.received(number)
        return {"peers": write_bytes(list(received.values()))}, {"peers": list(received)}

    def _fates(self, place: _Place, number: int) -> tuple[Arrays, dict[str, Any]] | None:
        if number not in place.sum.arrived:
            return None
        arrived, left = place.sum.fates(number)
        return {}, {"arrived": arrived, "left": left}

    def _take_shares(self, places: Sequence[_Place]) -> Read:
        def take(number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
            mine = _of(places, number)
            found = [read_bytes(arrays.get(f"shares/{p.names[number]}"), p.sum.graph[number], _SEALED) for p in mine]
            for place, shares in zip(mine, found, strict=True):
                place.sum.take_shares(number, shares)

        return take

    def _take_masked(self, places: Sequence[_Place]) -> Read:
        def take(number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
            mine = _of(places, number)
            found = [arrays.get(f"masked/{place.names[number]}") for place in mine]
            dtype = whole_dtype(self.settings.bits)
            for place, numbers in zip(mine, found, strict=True):
                if numbers is None or numbers.dtype != dtype or numbers.shape != (place.circle.size,):
                    raise Refused("wrong-shape")
            for place, numbers in zip(mine, found, strict=True):
                assert numbers is not None
                place.sum.take_masked(number, numbers)

        return take

    def _take_unmask(self, places: Sequence[_Place]) -> Read:
        def take(number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
            for place in _of(places, number):
                arrived, left = place.sum.fates(number)
                given = arrays.get(f"share/{place.names[number]}")
                place.sum.take_unmask(number, read_bytes(given, [*arrived, *left], shamir.SHARE))

        return take


def question(arrays: Arrays, circles: Mapping[str, Any], token: str, phase: str, round_: int) -> bytes:
    """A letter with one question for each of a client's circles."""
    return pack(arrays, {"kind": "secure", "phase": phase, "round": round_, "token": token, "circles": dict(circles)})


def _of(places: Sequence[_Place], number: int) -> list[_Place]:
    return [place for place in places if number in place.names]
