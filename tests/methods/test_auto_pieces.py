"""Pieces of `auto`: looks, ballots, decisions and patches, each by hand."""

from __future__ import annotations

from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted_groups import planted
from torch import Tensor

from fedquilt.core.federation import Federation
from fedquilt.interface.messages import UnitValues, Update, Updates
from fedquilt.methods.auto import Auto
from fedquilt.methods.ballots import BALLOT, ballot
from fedquilt.methods.candidates import measured, values_of
from fedquilt.methods.decisions import by_ballot, in_words
from fedquilt.methods.hypotheses import enough, groups, joined, seen_in, tidy
from fedquilt.methods.patches import patches_of
from fedquilt.sharing.evidence import Gain
from fedquilt.sharing.sketch import sketch


def test_sketches_keep_inner_products_in_the_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 3000, generator=rng)
    found = [float(sketch(one, 64, str(i)) @ sketch(one + other, 64, str(i))) for i in range(200)]
    assert sum(found) / 200 == pytest.approx(float(one @ (one + other)), rel=0.05)


def test_only_clients_of_one_circle_are_compared() -> None:
    circle = torch.tensor([0, 0, 1, 1])
    seen = seen_in([(torch.tensor([0, 1, 2]), torch.ones(3, 2), torch.zeros(3, 2))], circle)
    assert seen["pairs"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert not enough(seen, circle)
    assert groups(seen, circle, torch.ones(4), 0.3).tolist() == [0, 0, 1, 1]


def test_whoever_was_not_seen_is_no_reason_to_part_and_waits_by_itself_where_others_do() -> None:
    rng = torch.Generator().manual_seed(0)
    for apart, expected in ((0.0, [0, 0, 0, 0, 0, 0]), (9.0, [0, 1, 0, 1, 2, 2])):
        middle = apart * torch.tensor([[1.0], [-1.0]]).repeat(2, 8)
        one, other = (middle + torch.randn(4, 8, generator=rng) for _ in range(2))
        seen = seen_in([(torch.arange(4), one, other)], torch.zeros(6, dtype=torch.int64))
        assert groups(seen, torch.zeros(6, dtype=torch.int64), torch.ones(6), 0.3).tolist() == expected


def test_the_rounds_of_a_look_are_one_and_who_was_heard_twice_counts_with_the_mean() -> None:
    first, second = torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [4.0], [9.0]])
    visits = [(torch.tensor([0, 1]), first, 2 * first), (torch.tensor([1, 2, 3]), second, 2 * second)]
    seen = seen_in(visits, torch.tensor([0, 0, 0, -1]))
    assert seen["times"].tolist() == [1, 1, 1, 0]
    assert seen["pairs"].sum() == 9  # 0 and 2, which were never heard together, too
    means = torch.tensor([1.0, 4.0, 4.0]).double()  # of the first half; on the other they are twice that
    expected = (1.5 * means).outer(1.5 * means).diagonal_scatter(2 * means**2)
    assert torch.allclose(seen["products"][:3, :3], expected)
    assert torch.allclose(seen["noise"][:3], means**2 / 4)


def test_one_that_measured_nothing_finite_spoils_nobody_elses_evidence() -> None:
    one = torch.tensor([[1.0], [torch.nan], [2.0]])
    seen = seen_in([(torch.arange(3), one, one)], torch.zeros(3, dtype=torch.int64))
    assert seen["products"].tolist() == [[1, 0, 2], [0, 0, 0], [2, 0, 4]]


def test_whoever_was_not_seen_waits_for_a_place_when_its_circle_parts() -> None:
    federation = Federation(planted(clients=6), Auto(), engine="sequential", device="cpu", readouts=())
    state, head = Auto().begin(federation.server.roster), list(federation.server.roster.units)[-1]
    seen = seen_in([], torch.zeros(6)) | {"times": torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])}
    for changed in (False, True):
        made: list[dict[str, Any]] = [{"changed": changed}]
        after, _ = Auto()._adopt(head, torch.tensor([0, 0, 1, 1, 1, 2]), made, state | {"seen": {head: seen}})
        assert after["waiting"].tolist() == [False] * 5 + [changed]
        assert after["circle"][head].tolist() == ([0, 0, 1, 1, 1, 1] if changed else [0] * 6)  # with most until then
    federation.close()


def test_each_unit_of_each_architecture_is_read_from_its_own_numbers() -> None:
    federation = Federation(planted(clients=6, widths=(32, 24)), Auto(), engine="sequential", device="cpu")
    roster = federation.server.roster
    width = {32: (2080, 330), 24: (1560, 250)}  # numbers of either unit, sketched to 256 and to half of them at most
    ups = []
    for clients, wide in (((0, 1, 2), 32), ((3, 4, 5), 24)):
        lower, upper = (min(256, numbers // 2) for numbers in width[wide])
        half = torch.cat([torch.full((3, lower), 1.0), torch.full((3, upper), 2.0)], dim=1)
        ups.append(Update(1, clients, (), {"half-0": half, "half-1": 10 * half}))
    for unit, level in (("1", 1.0), ("3", 2.0)):
        for ids, one, other in measured(unit, Updates(1, tuple(ups)), roster, 256):
            assert one.unique().tolist() == [level]
            assert other.unique().tolist() == [10 * level]
            assert len(one) == len(ids)
    federation.close()


def test_the_candidate_of_a_circle_is_the_mean_of_its_members_by_their_samples() -> None:
    federation = Federation(planted(clients=4, sizes=(30, 60)), Auto(), engine="sequential", device="cpu")
    roster = federation.server.roster
    head = list(roster.units)[-1]
    size = int(roster.sizes()[head][0])
    copies = torch.arange(4.0)[:, None].expand(4, size)
    sent = Update(1, (0, 1, 2, 3), (UnitValues((head,), (size,), torch.arange(4), copies),), {})
    asked = values_of(torch.tensor([[0, 0, 1, 1]]), head, Updates(1, (sent,)), roster, {})
    (table,) = asked["values"].values()
    assert table[asked["rows"][0], 0].tolist() == pytest.approx([2 / 3, 2 / 3, 8 / 3, 8 / 3])  # 30 and 60 samples
    federation.close()


def test_a_candidate_circle_of_which_nobody_was_heard_keeps_its_value() -> None:
    federation = Federation(planted(clients=4), Auto(), engine="sequential", device="cpu")
    roster = federation.server.roster
    head = list(roster.units)[-1]
    size, asked = int(roster.sizes()[head][0]), dict[str, Any]()
    found = []
    for ids, copies in (((0, 1), [1.0, 3.0]), ((1, 2), [5.0, 7.0]), ((0,), [9.0])):
        values = UnitValues(
            (head,), (size,), torch.arange(len(ids)), torch.tensor(copies)[:, None].expand(len(ids), size)
        )
        updates = Updates(1, (Update(1, ids, (values,), {}),))
        asked = values_of(torch.tensor([[0, 0, 1, -1]]), head, updates, roster, asked)
        (table,) = asked["values"].values()
        found.append(table[asked["rows"][0], 0].tolist())
    assert found == [[2, 2, 2, 2], [5, 5, 7, 2], [9, 9, 7, 2]]  # at first the mean of all
    federation.close()


def test_nearest_circles_are_those_that_may_join() -> None:
    circle = torch.tensor([0, 0, 1, 1, 2, 2, -1])
    values = {0: torch.tensor([0.0]), 1: torch.tensor([1.0]), 2: torch.tensor([9.0])}
    assert tidy(joined(circle, values)).tolist() == [0, 0, 0, 0, 1, 1, -1]


def asked(received: float, candidate: float, own: float, spread: float = 0.0) -> dict[str, Any]:
    """A ballot of eight clients about two circles, in which all have about the same losses."""
    wobble = spread * torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]
    losses = torch.tensor([received, candidate, own]).double().expand(8, 2, 3).clone()
    losses[:, :, 1:2] += wobble
    circles = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    return {
        "unit": "head", "names": ["its own evidence"], "back": [], "circles": circles, "losses": losses,
        "judged": torch.full((8, 2), 5.0, dtype=torch.float64),
    }  # fmt: skip


def test_a_gain_that_lasts_parts_and_one_that_fades_does_not() -> None:
    first = asked(1.0, 0.8, 0.8, 0.05)  # no better than one's own copies
    circle, made = by_ballot(first, torch.zeros(8, dtype=torch.int64), 5, 2.0)
    assert len(circle.unique()) == 1
    for candidate, parts in ((0.84, True), (0.9, False)):  # four fifths and a half of the gain are left
        later, again = by_ballot(asked(1.0, candidate, candidate, 0.05), circle, 9, 2.0, made)
        assert (len(later.unique()) == 2) is parts
        assert again[0]["changed"] is parts


@pytest.mark.parametrize(
    ("received", "candidate", "own", "spread", "parts"),
    [
        (1.0, 0.8, 0.9, 0.05, True),  # better than both, by far more than its error
        (1.0, 0.8, 0.7, 0.05, False),  # what a client can do by itself is no reason to part
        (1.0, 0.98, 1.1, 0.2, False),  # not sure
        (0.8, 1.0, 1.2, 0.05, False),  # worse
    ],
)
def test_circles_must_beat_what_is_shared_and_what_is_ones_own(
    received: float, candidate: float, own: float, spread: float, parts: bool
) -> None:
    circle, made = by_ballot(asked(received, candidate, own, spread), torch.zeros(8, dtype=torch.int64), 7, 2.0)
    assert (len(circle.unique()) == 2) is parts
    assert made[0]["changed"] is parts
    assert made[0]["gain"] == pytest.approx(received - candidate)
    assert "round 7: unit head, 8 clients" in in_words(made[0])


def test_a_gain_on_one_half_of_the_samples_alone_parts_nobody() -> None:
    told = asked(1.0, 0.6, 1.2, 0.05)
    told["losses"][:, 1, 1] += 0.5  # on the other half it is worse than what all share
    circle, made = by_ballot(told, torch.zeros(8, dtype=torch.int64), 7, Auto().sure)
    assert len(circle.unique()) == 1
    assert made[0]["sure"] > 3
    assert "on one half" in in_words(made[0])


def test_a_candidate_is_judged_half_way_between_it_and_ones_own_copy() -> None:
    def at(values: dict[str, Tensor]) -> Any:
        return lambda x: values["slope"] * x + values["shift"]

    data = SimpleNamespace(x=torch.ones(8), mask=torch.ones(8), losses=lambda said: said)  # the loss is what is said
    own, received = {"slope": torch.tensor(4.0), "shift": torch.tensor(0.0)}, {"slope": 2.0, "shift": 8.0}
    me = SimpleNamespace(
        values=own, received={unit: torch.tensor(value) for unit, value in received.items()}, data=data, at=at,
        told={BALLOT + "slope": torch.tensor([-2.0])},
    )  # fmt: skip
    said = ballot(me)  # type: ignore[arg-type]
    assert said["losses"].tolist() == [[3 + 4, 1 + 4, 4 + 4]] * 2  # received, the candidate, one's own slope
    assert said["judged"].tolist() == [4, 4]


@pytest.mark.parametrize(("errors", "joins"), [(1.0, False), (6.0, True)])
def test_circles_are_joined_again_for_a_gain_that_is_sure(errors: float, joins: bool) -> None:
    back = asked(1.0, 0.9, 1.2, 0.1 / errors * 7**0.5) | {"names": [], "back": ["everybody together"]}
    back["circles"] = torch.zeros(1, 8, dtype=torch.int64)
    circle, made = by_ballot(back, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 9, Auto().sure)
    assert (len(circle.unique()) == 1) is joins
    assert made[0]["backwards"]
    assert ("joined in one circle" in in_words(made[0])) is joins


def test_sentences_say_what_a_gain_lacks_and_count_errors_as_the_decision_does() -> None:
    for own, spread, says in ((0.7, 0.05, "own copy may do as well"), (1.2, 0.2 / 4 * 7**0.5, "3 errors are needed")):
        _, made = by_ballot(asked(1.0, 0.8, own, spread), torch.zeros(8, dtype=torch.int64), 7, Auto().sure)
        assert says in in_words(made[0])
    assert "evidence: 2.8 standard errors" in in_words(made[0])  # four, of eight clients


def test_what_is_nearly_as_good_in_fewer_circles_is_taken() -> None:
    both = asked(1.0, 0.8, 0.9, 0.05)
    pairs = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    both |= {"names": ["its own evidence", "its own evidence, more circles"]}
    both["circles"] = torch.stack([both["circles"][0], pairs])
    for loss, taken in ((0.792, 2), (0.78, 4)):  # 4 and 9 per cent of the gain more in four circles, the same for all
        finer = both["losses"][:, :, 1:2] - 0.8 + loss
        losses = torch.cat([both["losses"][:, :, :2], finer, both["losses"][:, :, 2:]], dim=2)
        circle, made = by_ballot({**both, "losses": losses}, torch.zeros(8, dtype=torch.int64), 7, 2.0)
        assert made[0]["circles"] == [1, taken]
        assert len(circle.unique()) == taken


@pytest.mark.parametrize(("errors", "parts"), [(4.0, False), (7.0, True)])  # of eight clients: 2.8 and 3.8 of many
def test_the_best_of_many_splits_needs_more_than_a_single_test(errors: float, parts: bool) -> None:
    spread = 0.2 / errors * 7**0.5  # so that the gain of 0.2 is so many standard errors
    circle, made = by_ballot(asked(1.0, 0.8, 1.2, spread), torch.zeros(8, dtype=torch.int64), 7, Auto().sure)
    assert made[0]["gain"] / made[0]["error"] == pytest.approx(errors)
    assert (len(circle.unique()) == 2) is parts


def test_few_clients_are_as_sure_as_students_t_says() -> None:
    for t in (1.0, 3.0, 8.0):  # with three clients the chance is 1/2 - t / 2 sqrt(2 + t^2)
        exact = -NormalDist().inv_cdf(0.5 - t / (2 * (2 + t * t) ** 0.5))
        assert Gain(t, 1.0, 3).sure == pytest.approx(exact, abs=0.06)
        assert Gain(-t, 1.0, 3).sure == -Gain(t, 1.0, 3).sure


def test_a_client_with_a_place_leaves_it_for_a_gain_that_is_sure_and_is_one() -> None:
    federation = Federation(planted(clients=6), Auto(), engine="sequential", device="cpu")
    roster, method = federation.server.roster, Auto()
    head = list(roster.units)[-1]
    state = method.begin(roster)
    state["circle"][head] = torch.tensor([0, 0, 0, 1, 1, 1])
    for gain, error, waits, asks, moves in (
        (0.3, 0.01, False, True, True), (0.03, 0.01, False, True, False), (1e-8, 1e-10, False, True, False),
        (1e-8, 1e-10, True, False, True), (0.3, 0.01, False, False, False),
    ):  # fmt: skip
        state["waiting"], state["asked"] = (torch.tensor([who] + [False] * 5) for who in (waits, asks))
        _, patches = patches_of(state["circle"], state["waiting"], roster, 0)
        assert patches == [(0,), (0,), (1,)] or patches == [(0,), (1,), (0,)]
        fits = torch.tensor([[0.5 - gain * (patch == (1,)) for patch in patches]], dtype=torch.float64)
        said = Update(3, (0,), (), {"fits": fits, "errors": torch.full_like(fits, error)})
        after = method.learn(state, Updates(3, (said,)), roster)
        assert (int(after["circle"][head][0]) == 1) is moves
        assert not after["waiting"].any()
        assert not after["asked"].any()
    federation.close()


def test_whether_a_patch_fits_is_asked_until_all_have_answered_and_waited_for_until_nearly_all_have() -> None:
    federation = Federation(planted(clients=8), Auto(), engine="sequential", device="cpu")
    roster, method = federation.server.roster, Auto()
    head = list(roster.units)[-1]
    state = method.begin(roster)
    state["circle"][head] = torch.arange(8) % 2
    state = method.enrol(state, roster, roster, Updates(0, ()))  # nothing declared has changed: data have
    asked = []
    for round_, ids in enumerate(((0, 1, 2, 3), (2, 3, 4), (5, 6), (0, 7)), 1):
        asked.append(method.plan(state, roster).offered[head].nonzero()[:, 0].tolist())
        fits = torch.zeros(len(ids), 3, dtype=torch.float64)
        state = method.learn(state, Updates(round_, (Update(round_, ids, (), {"fits": fits, "errors": fits}),)), roster)
        assert (state["doing"] == "fits") is (round_ < 3)
    assert asked == [list(range(8)), [4, 5, 6, 7], [5, 6, 7], [7]]
    assert not method.plan(state, roster).offered
    federation.close()


def test_a_ballot_goes_on_until_three_quarters_have_answered() -> None:
    federation = Federation(planted(share=0.5, rounds=40), Auto(), engine="sequential", device="cpu", readouts=())
    heard: list[float] = []
    while len(heard) < 2:
        federation.step(evaluate=False)
        state = federation.server.state
        if state["doing"] == "votes":
            heard.append(float(state["ballot"]["heard"].double().mean()))
    assert heard[0] == 0
    assert 0.4 < heard[1] < 0.75  # one half: the same ballot
    federation.close()


@pytest.mark.parametrize(("spent", "looks"), [(0.0, True), (1.0, False)])
def test_nobody_looks_once_the_share_of_the_traffic_is_spent(spent: float, looks: bool) -> None:
    federation = Federation(planted(clients=6), Auto(), engine="sequential", device="cpu", readouts=())
    roster, method = federation.server.roster, Auto()
    numbers = sum(float(sizes.float().mean()) for sizes in roster.sizes().values())
    state = method.begin(roster) | {"heard": 1.0, "round": 2}
    state |= {"spent": spent * 0.08 * 2 * numbers * 100}
    after = method.learn(state, Updates(3, (Update(3, tuple(range(6)), ()),)), roster)
    assert (after["doing"] == "looks") is looks
    federation.close()


def test_now_and_then_all_are_asked_whether_their_patch_fits() -> None:
    federation = Federation(planted(clients=6), Auto(), engine="sequential", device="cpu", readouts=())
    roster, method = federation.server.roster, Auto()
    for circle, asks in ((torch.arange(6) % 2, True), (torch.zeros(6, dtype=torch.int64), False)):
        state = method.begin(roster) | {"heard": 9.0, "round": 9, "doing": "looks", "tries": 5}
        state |= {"visits": {unit: [] for unit in roster.units}}  # nothing to propose
        state["circle"] = dict.fromkeys(roster.units, circle)
        after = method.learn(state, Updates(10, (Update(10, tuple(range(6)), ()),)), roster)
        assert bool(method.plan(after, roster).offered) is asks  # where there is but one patch, nobody
    federation.close()
