"""Secure sums of one circle: the sum is exact whoever leaves when, and nothing else can be opened."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography")

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, hypergeom

from fedquilt.secure import SecureSums, masks, shamir
from fedquilt.secure.fixed_point import FixedPoint, Whole
from fedquilt.secure.graph import degree, neighbours
from fedquilt.secure.protocol import Party, Spoilt, Sum, TooFew, Unsafe
from fedquilt.secure.rehearsal import rehearse

U64 = np.dtype("<u8")


class Circle:
    """Members and a server; `gone` have answered so many questions and no more."""

    def __init__(self, members: int, gone: dict[int, int] | None = None, size: int = 5, **how: Any) -> None:
        self.settings, self.last = SecureSums(**how), gone or {}
        self.numbers = np.random.default_rng(members).integers(0, 2**64, (members, size), dtype=np.uint64)
        self.parties = {number: Party(number, self.settings) for number in range(members)}
        self.masked: dict[int, Whole] = {}
        self.received: dict[int, dict[int, bytes]] = {}
        self.unmasked: dict[int, dict[int, bytes]] = {}

    def there(self, question: int, among: Collection[int]) -> list[int]:
        return [number for number in sorted(among) if self.last.get(number, 4) >= question]

    def run(self) -> Whole:
        keys = {number: self.parties[number].keys() for number in self.there(1, self.parties)}
        self.server = Sum(keys, self.settings)
        for number in self.there(2, keys):
            self.server.take_shares(number, self.parties[number].shares(self.server.peers(number), len(keys)))
        for number in self.there(3, self.server.given):
            self.received[number] = self.server.received(number)
            self.masked[number] = self.parties[number].masked(self.numbers[number], self.received[number])
            self.server.take_masked(number, self.masked[number])
        for number in self.there(4, self.masked):
            self.unmasked[number] = self.parties[number].unmask(*self.server.fates(number))
            self.server.take_unmask(number, self.unmasked[number])
        return self.server.open()


@pytest.mark.parametrize("members", [3, 4, 20, 21, 45])
def test_the_sum_of_all_is_exact(members: int) -> None:
    circle = Circle(members)
    assert np.array_equal(circle.run(), circle.numbers.sum(0, dtype=np.uint64))


@pytest.mark.parametrize(
    ("members", "gone"),
    [
        (5, {2: 0}),
        (5, {2: 1}),
        (5, {2: 2}),
        (5, {2: 3}),
        (7, {0: 0, 1: 1, 2: 2}),
        (30, {0: 0, 4: 1, 9: 2, 17: 2, 29: 3}),
    ],
)
def test_who_leaves_after_any_question_is_survived(members: int, gone: dict[int, int]) -> None:
    circle = Circle(members, gone)
    heard = [number for number in range(members) if gone.get(number, 4) >= 3]
    assert np.array_equal(circle.run(), circle.numbers[heard].sum(0, dtype=np.uint64))


def test_what_arrives_late_changes_nothing_and_stays_hidden() -> None:
    circle = Circle(6, {5: 2})
    total = circle.run()
    late = circle.parties[5].masked(circle.numbers[5], circle.server.received(5))  # the server has its mask key by now
    opened = masks.KeyPair(circle.server._secret(5))
    for other in range(5):
        key = opened.agreed(circle.server.keys[other][:32], b"mask")
        late += masks.stream(key, 5, U64) if other < 5 else 0  # 5 subtracts what those below it add
    assert not np.array_equal(late, circle.numbers[5])  # its self mask is still on it
    late -= masks.stream(masks.derive(circle.parties[5]._self_seed, b"mask"), 5, U64)
    assert np.array_equal(late, circle.numbers[5])  # and is all that is on it
    assert np.array_equal(total, circle.numbers[:5].sum(0, dtype=np.uint64))


@pytest.mark.parametrize(
    ("members", "gone", "how"),
    [
        (2, {}, {}),  # never begun
        (4, {0: 2, 1: 2}, {}),  # a sum of two
        (9, dict.fromkeys(range(5), 3), {}),  # four of nine cannot put secrets together
        (6, {0: 2, 1: 2}, {"minimum": 5}),
        (6, {0: 3, 1: 3}, {"threshold": 0.8}),
    ],
)
def test_below_the_threshold_nothing_is_opened(members: int, gone: dict[int, int], how: dict[str, Any]) -> None:
    with pytest.raises((TooFew, Unsafe)):
        Circle(members, gone, **how).run()


def test_the_server_begins_to_open_no_sum_of_two() -> None:
    """Even if members would help it."""
    circle = Circle(4, {0: 3, 1: 3})
    with pytest.raises(TooFew):
        circle.run()  # two say nothing to the last question, which nobody notes
    circle.server.arrived -= {0, 1}
    assert not circle.server.ready()
    with pytest.raises(TooFew, match="2 of 4 members sent something"):
        circle.server.open()


def asked(circle: Circle, member: int, change: Callable[[set[int], set[int]], None]) -> dict[int, bytes]:
    """What a member answers to question 4 where the server lies."""
    arrived, left = map(set, circle.server.fates(member))
    change(arrived, left)
    return circle.parties[member].unmask(arrived, left)


@pytest.mark.parametrize(
    "lie",
    [
        lambda arrived, left: left.add(2),  # both masks of one client
        lambda arrived, left: arrived.add(77),
        lambda arrived, left: (arrived.discard(0), left.add(0)),  # its own mask key
        lambda arrived, left: (arrived.difference_update({1, 2, 3, 4}), left.update({1, 2, 3, 4})),  # a sum of itself
    ],
)
def test_a_member_does_not_answer_a_question_that_would_open_a_copy(lie: Callable[[set[int], set[int]], None]) -> None:
    circle = Circle(5, dict.fromkeys(range(5), 3))
    with pytest.raises(TooFew):
        circle.run()
    with pytest.raises(Unsafe):
        asked(circle, 0, lie)


def test_a_member_answers_each_question_once() -> None:
    circle = Circle(5)
    circle.run()
    party = circle.parties[1]
    for again in (
        party.keys,
        lambda: party.shares(circle.server.peers(1), 5),
        lambda: party.masked(circle.numbers[1], circle.received[1]),
        lambda: party.unmask([0, 1, 2, 3], [4]),
    ):
        with pytest.raises(Unsafe, match="was asked after"):
            again()


def test_the_server_never_gets_both_masks_of_a_client_even_if_it_tells_each_member_another_story() -> None:
    """Half of the members are told that client 6 arrived, half that it left: neither secret can be put together."""
    circle = Circle(7, dict.fromkeys(range(7), 3))
    with pytest.raises(TooFew):
        circle.run()
    told: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})

    def it_left(arrived: set[int], left: set[int]) -> None:
        arrived.discard(6)
        left.add(6)

    for member in range(6):
        shares = asked(circle, member, it_left if member % 2 else lambda arrived, left: None)
        told[member % 2][member] = shares[6]
    least = circle.settings.least(7)
    for shares in told:
        assert len(shares) < least
        with pytest.raises(ValueError, match="fewer than"):
            shamir.combine(shares, least)


@pytest.mark.parametrize(
    "peers",
    [{}, {1: b"a" * 64}, {0: b"a" * 64, 1: b"b" * 64}, {1: b"a" * 64, 2: b"a" * 64}, {1: b"a" * 64, 2: b"b" * 64}],
)
def test_a_member_does_not_share_with_too_few_or_with_itself(peers: dict[int, bytes]) -> None:
    party = Party(0, SecureSums())
    party.keys()
    with pytest.raises((Unsafe, ValueError)):
        party.shares(peers, 3 if len(peers) != 2 or peers.keys() != {1, 2} or peers[1] == peers[2] else 2)


class Spoiling(Circle):
    """A circle in which some members lie: `lie` changes what they answer to question 2 or 4."""

    def __init__(self, members: int, liars: Collection[int], lie: str, gone: dict[int, int] | None = None) -> None:
        super().__init__(members, gone)
        for liar in liars:
            getattr(self, lie)(self.parties[liar])

    def letters_of_nothing(self, party: Any) -> None:
        """What it gives its neighbours is sealed with no key."""
        shares = party.shares
        party.shares = lambda peers, members: {peer: bytes(len(s)) for peer, s in shares(peers, members).items()}

    def shares_of_nothing(self, party: Any) -> None:
        """What it gives its neighbours is sealed, and of no secret."""

        def shares(peers: dict[int, bytes], members: int) -> dict[int, bytes]:
            honest(peers, members)
            return {peer: masks.seal(party._letter(peer, out=True), bytes(range(34))) for peer in peers}

        honest, party.shares = party.shares, shares

    def other_shares(self, party: Any) -> None:
        """What it holds of others it does not give."""
        unmask = party.unmask
        party.unmask = lambda *fates: {number: bytes(15) + b"\7\7" for number in unmask(*fates)}


@pytest.mark.parametrize(
    ("members", "liars", "gone"),
    [(3, {1}, {}), (5, {0}, {}), (5, {0}, {4: 2}), (9, {0, 2, 4}, {}), (9, {0, 1}, {3: 2}), (30, {0, 7, 8}, {2: 2})],
)
def test_holders_that_give_wrong_shares_spoil_nothing_and_are_told(
    members: int, liars: set[int], gone: dict[int, int]
) -> None:
    circle = Spoiling(members, liars, "other_shares", gone)
    heard = [number for number in range(members) if number not in gone]
    assert np.array_equal(circle.run(), circle.numbers[heard].sum(0, dtype=np.uint64))
    assert min(liars) in circle.server.blamed <= liars  # among the first who are asked, so that it was found out


@pytest.mark.parametrize("lie", ["letters_of_nothing", "shares_of_nothing"])
@pytest.mark.parametrize("members", [3, 6, 24])
def test_who_gives_shares_of_no_secret_is_told_and_the_sum_is_not_opened(lie: str, members: int) -> None:
    circle = Spoiling(members, [1], lie)
    with pytest.raises(Spoilt):
        circle.run()
    assert circle.server.blamed == {1}


def test_a_letter_that_the_server_changed_opens_nothing_and_costs_nothing() -> None:
    """Of one letter in six the receiver has no shares; the others' are enough."""
    circle = Circle(6)
    received = Sum.received

    def changed(server: Sum, member: int) -> dict[int, bytes]:
        found = received(server, member)
        return found if member else found | {1: bytes([found[1][0] ^ 1]) + found[1][1:]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sum, "received", changed)
        assert np.array_equal(circle.run(), circle.numbers.sum(0, dtype=np.uint64))
    assert circle.unmasked[0][1] == bytes(shamir.SHARE)
    assert circle.server.blamed == set()  # the one who gave it or the one who has it: nobody can say


def test_a_secret_is_found_among_wrong_shares_and_no_other_is_taken() -> None:
    secret = bytes(range(16))
    shares = shamir.split(secret, 5, range(9))
    wrong = shares | {holder: bytes(16) + bytes([holder + 1]) for holder in (0, 3, 6)}
    assert shamir.recover(wrong, 5, secret.__eq__) == (secret, {0, 3, 6})
    assert shamir.recover(wrong, 5, secret.__eq__, doubted=[0, 3, 6]) == (secret, {0, 3, 6})
    wrong |= {holder: bytes(16) + bytes([holder + 1]) for holder in (1, 2)}  # four are left, and five are needed
    assert shamir.recover(wrong, 5, secret.__eq__) is None


def test_what_is_sent_masked_looks_like_noise_whatever_is_in_it() -> None:
    circle = Circle(4, size=20_000)
    circle.numbers[:] = 7  # nothing could be less uniform
    circle.run()
    for numbers in circle.masked.values():
        counts = np.bincount(numbers.view(np.uint8), minlength=256)
        assert chisquare(counts).pvalue > 1e-6
    flat = np.bincount(circle.numbers[0].view(np.uint8), minlength=256)
    assert chisquare(flat).pvalue < 1e-6  # the test can tell


def test_differences_of_what_is_sent_and_all_that_was_unmasked_open_nobody() -> None:
    """All that an honest server has after a round: it takes off every self mask, and pairs stay hidden in pairs."""
    circle = Circle(4)
    circle.run()
    server = circle.server
    bare = {n: m - masks.stream(masks.derive(server._secret(n), b"mask"), 5, U64) for n, m in circle.masked.items()}
    for some in itertools.chain.from_iterable(itertools.combinations(bare, k) for k in (1, 2, 3)):
        part = np.sum([bare[n] for n in some], axis=0, dtype=np.uint64)
        assert not (part == circle.numbers[list(some)].sum(0, dtype=np.uint64)).any()
    assert np.array_equal(np.sum(list(bare.values()), axis=0, dtype=np.uint64), server.open())


def test_a_rehearsal_is_the_protocol() -> None:
    circle = Circle(26, {3: 2, 8: 2})
    assert np.array_equal(rehearse(circle.numbers, range(26), SecureSums(), leaving=[3, 8]), circle.run())


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_any_few_shares_fit_any_secret() -> None:
    """Through least - 1 shares and any value at 0 there is a polynomial of the same degree: they say nothing."""
    secret = bytes(range(16))
    shares = shamir.split(secret, 3, range(5))
    for some in itertools.combinations(shares, 3):
        assert shamir.combine({holder: shares[holder] for holder in some}, 3) == secret
    points = {0: int.from_bytes(b"another secret!!", "big")} | {h + 1: int.from_bytes(shares[h], "big") for h in (1, 4)}
    assert len(points) == 3  # three points: one polynomial of degree 2 goes through them, as through the true ones
    other = dict(shares)
    other[0] = _through(points, 1).to_bytes(shamir.SHARE, "big")
    assert shamir.combine({holder: other[holder] for holder in (0, 1, 4)}, 3) == b"another secret!!"


def _through(points: dict[int, int], at: int) -> int:
    """The value at a place of the polynomial through some points, by solving for its coefficients."""
    p = shamir.PRIME
    rows = [[pow(x, power, p) for power in range(len(points))] + [y] for x, y in points.items()]
    for i in range(len(rows)):
        pivot = next(j for j in range(i, len(rows)) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        inverse = pow(rows[i][i], -1, p)
        rows[i] = [value * inverse % p for value in rows[i]]
        for j in range(len(rows)):
            if j != i:
                rows[j] = [(a - rows[j][i] * b) % p for a, b in zip(rows[j], rows[i], strict=True)]
    return sum(row[-1] * pow(at, power, p) for power, row in enumerate(rows)) % p


def test_the_stream_is_chacha20_of_the_standard() -> None:
    """RFC 8439, A.1, test vector 1: key, nonce and counter are all 0."""
    drawn = masks.stream(bytes(32), 4, U64).tobytes()
    assert drawn.hex() == "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"


def test_two_agree_and_a_third_does_not() -> None:
    a, b, c = (masks.KeyPair(bytes([n]) * 16) for n in range(3))
    assert a.agreed(b.public, b"x") == b.agreed(a.public, b"x") != a.agreed(c.public, b"x")
    assert a.agreed(b.public, b"x") != a.agreed(b.public, b"y")


@pytest.mark.parametrize(
    ("bits", "range_", "members", "places"),
    [(32, 63.5, 64, 18), (64, 2.0**20 - 0.5, 1, 40), (64, 2.0**20 - 0.5, 8, 39), (64, 2.0**40, 8, 18)],
)
def test_places_by_hand(bits: int, range_: float, members: int, places: int) -> None:
    """bits - 2 = places + log2(range + 1/2) + log2(members), and at most 40."""
    assert FixedPoint(bits, range_, members).places == places


@given(st.data(), st.sampled_from([32, 64]), st.integers(3, 50))
@settings(max_examples=60, deadline=None)
def test_a_sum_in_fixed_point_is_off_by_half_a_step_for_each_member(data: Any, bits: int, members: int) -> None:
    point = FixedPoint(bits, 60.0, members)
    numbers = np.array(data.draw(st.lists(st.floats(-60, 60), min_size=members, max_size=members)))
    total = np.sum(point.encode(numbers), dtype=point.dtype, keepdims=True)
    exact = math.fsum(numbers)
    assert abs(point.decode(total)[0] - exact) <= members * point.step / 2 + 1e-12


def test_a_sum_at_the_range_does_not_wrap() -> None:
    for bits in (32, 64):
        point = FixedPoint(bits, 100.0, 1000)
        for sign in (1, -1):
            total = np.full(1, 0, point.dtype)
            for _ in range(1000):
                total += point.encode(np.array([sign * 100.0]))
            assert point.decode(total)[0] == pytest.approx(sign * 100_000.0)


def test_too_coarse_a_fixed_point_is_refused() -> None:
    with pytest.raises(ValueError, match=r"take secure\.bits=64"):
        SecureSums(bits=32).point(10)


@pytest.mark.parametrize("how", [{"minimum": 2}, {"threshold": 0.4}, {"threshold": 1.0}, {"bits": 16}, {"range": 0.0}])
def test_settings_that_protect_nobody_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="secure"):
        SecureSums(**how)


@pytest.mark.parametrize("members", [3, 20, 21, 60])
def test_neighbours_are_mutual_as_many_as_said_and_connected(members: int) -> None:
    graph = neighbours([2 * n for n in range(members)])
    assert {len(near) for near in graph.values()} == {degree(members)}
    assert all(own in graph[other] and own != other for own, near in graph.items() for other in near)
    found, edge = {0}, [0]
    while edge:
        new = set(graph[edge.pop()]) - found
        found |= new
        edge += new
    assert len(found) == members


@pytest.mark.parametrize("members", [21, 30, 50, 100, 200, 500, 1000, 5000, 10_000, 100_000])
def test_neighbours_are_enough_where_a_tenth_colludes_and_a_tenth_leaves(members: int) -> None:
    """A union bound over the members; a client's neighbours are a draw without replacement from all others."""
    near, tenth, others = degree(members), members // 10, members - 1
    least = SecureSums().least(near + 1)
    colluding = hypergeom.logsf(least - 1, others, tenth, near) + math.log(members)
    lonely = hypergeom.logsf(near - 1, others, 2 * tenth, near) + math.log(members)
    # of a client that left, its neighbours alone hold shares
    staying = hypergeom.logcdf(least - 1, others, others - tenth, near) + math.log(members)
    assert max(colluding, lonely) < -40 * math.log(2)
    assert staying < -20 * math.log(2)
