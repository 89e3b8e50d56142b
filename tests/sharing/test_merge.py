"""Merges and installing: numbers by hand, then properties that hold for any plan."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquilt.sharing import (
    MERGES,
    CentredClipping,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    MergeContext,
    MixedUnit,
    NormBound,
    Rule,
    Sums,
    TrimmedMean,
    UnitPlan,
    columns,
    inherit,
    install,
    mean,
    median,
    merge_unit,
    mix,
    pick,
    weighted_sums,
)

steady = settings(max_examples=50, deadline=None)  # a busy machine is no failure

RULES: list[Rule] = [mean, Median(), TrimmedMean(0.25), Krum(1), Krum(1, keep=1)]
WITH_CONTEXT: list[Rule] = [
    GeometricMedian(), NormBound(), NormBound(0.5), CentredClipping(), CentredClipping(0.5, 2), FLTrust(), Krum(0.3),
    pick("nnm+median", byzantine=0.2), pick("nnm+krum", byzantine=1), pick("bucketing+median"),
    pick("bucketing+geometric-median"), pick("bucketing+nnm+centred-clipping", byzantine=0.2),
    pick("bucketing+fltrust"),
]  # fmt: skip


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


@pytest.fixture(params=["product", "index_add"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways of summing on a CPU, and blocks of a few columns each."""
    monkeypatch.setattr(weighted_sums, "_FEW_CIRCLES", 10**9 if request.param == "product" else -1)
    monkeypatch.setitem(columns._BLOCK, "cpu", 16)


def test_weighted_mean_by_hand(both_ways: None) -> None:
    # circle 0: (1 * 1 + 3 * 4) / 4 = 3.25 ; circle 1: (2 * 10 + 2 * 30) / 4 = 20 ; circle 2: nobody
    merged = mean(column(1, 10, 4, 30), torch.tensor([0, 1, 0, 1]), torch.tensor([1.0, 2, 3, 2]), 3)
    assert merged.value[:, 0].tolist() == [3.25, 20, 0]
    assert merged.heard.tolist() == [True, True, False]
    assert merged.onto(column(-1, -1, -1))[:, 0].tolist() == [3.25, 20, -1]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_was_merged_weighs_what_its_copies_weigh(rule: Rule) -> None:
    copies, circle = column(1, 10, 4, math.nan, 5), torch.tensor([0, 1, 0, 1, 2])
    merged = rule(copies, circle, torch.tensor([1.0, 2, 3, 7, 0]), 3)
    assert merged.weight.tolist() == [4, 2, 0]  # the row that is not finite weighs nothing


def test_parts_of_several_families_add_up(both_ways: None) -> None:
    torch.manual_seed(0)
    values, circle, weight = torch.randn(9, 40), torch.randint(0, 3, (9,)), torch.rand(9)
    parts = [Sums.of(values[a:b], circle[a:b], weight[a:b], 3) for a, b in ((0, 2), (2, 7), (7, 9))]
    together = (parts[0] + parts[1] + parts[2]).mean()
    at_once = mean(values, circle, weight, 3)
    torch.testing.assert_close(together.value, at_once.value, rtol=1e-7, atol=1e-7)
    assert len(together.refused) == 9


def test_equal_copies_come_back_as_they_are(both_ways: None) -> None:
    torch.manual_seed(0)
    row = torch.randn(1, 50) * torch.logspace(-6, 6, 50)
    merged = mean(row.repeat(1000, 1), torch.zeros(1000).long(), torch.rand(1000) * 1e4, 1)
    torch.testing.assert_close(merged.value, row, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rows_that_are_not_finite_are_left_out_and_told(rule: Rule, both_ways: None) -> None:
    torch.manual_seed(0)
    values = torch.randn(12, 30)
    circle, weight = torch.arange(12) % 2, torch.ones(12)
    values[3, 7], values[4, 0], values[9, 29] = math.nan, math.inf, -math.inf
    merged = rule(values, circle, weight, 3)
    assert merged.refused.nonzero()[:, 0].tolist() == [3, 4, 9]
    assert merged.heard.tolist() == [True, True, False]
    good = torch.tensor([0, 1, 2, 5, 6, 7, 8, 10, 11])
    without = rule(values[good], circle[good], weight[good], 3)
    torch.testing.assert_close(merged.value[:2], without.value[:2])


def test_a_circle_of_bad_rows_only_is_not_heard() -> None:
    merged = mean(torch.full((2, 3), math.nan), torch.zeros(2).long(), torch.ones(2), 1)
    assert merged.heard.tolist() == [False]
    assert merged.onto(torch.ones(1, 3)).tolist() == [[1, 1, 1]]


def test_huge_but_finite_rows_are_kept() -> None:
    merged = mean(torch.full((2, 3), 1e38), torch.zeros(2).long(), torch.ones(2), 1)
    assert not merged.refused.any()
    torch.testing.assert_close(merged.value, torch.full((1, 3), 1e38))


def test_median_by_hand() -> None:
    # circle 0 holds 1, 5, 100 -> 5 ; circle 1 holds 2, 4 -> 3 ; circle 2 one of weight 0 -> not heard
    circle = torch.tensor([0, 1, 0, 1, 0, 2])
    merged = median(column(100, 4, 1, 2, 5, 7), circle, torch.tensor([9.0, 1, 1, 1, 1, 0]), 3)
    assert merged.value[:2, 0].tolist() == [5, 3]
    assert merged.heard.tolist() == [True, True, False]


def test_trimmed_mean_by_hand() -> None:
    # share 0.2 of five: the lowest and the highest go; (2 + 3 + 4) / 3 ; of two clients nobody goes
    circle = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    merged = TrimmedMean(0.2)(column(3, -900, 4, 900, 2, 10, 20), circle, torch.ones(7), 2)
    assert merged.value[:, 0].tolist() == [3, 15]


def test_krum_by_hand() -> None:
    # n = 5, f = 1: the two nearest peers score. 0: 1+4=5, 1: 1+1=2, 2: 1+4=5 ... 7: (7-3)^2+(7-2)^2=41, 50 is far.
    values, circle = column(1, 2, 3, 7, 50), torch.zeros(5).long()
    assert Krum(1, keep=1)(values, circle, torch.ones(5), 1).value.item() == 2
    # keep = n - f = 4: all but the far one, (1 + 2 + 3 + 7) / 4
    assert Krum(1)(values, circle, torch.ones(5), 1).value.item() == 3.25
    # four clients are too few to defend against one: the median, (2 + 3) / 2
    assert Krum(1)(values[:4], circle[:4], torch.ones(4), 1).value.item() == 2.5


def test_krum_works_circle_by_circle() -> None:
    torch.manual_seed(0)
    values, circle = torch.randn(20, 6), torch.arange(20) % 2
    values[0] = 100
    values[1] = -100
    together = Krum(1, keep=3)(values, circle, torch.ones(20), 2)
    for c in (0, 1):
        mine = circle == c
        alone = Krum(1, keep=3)(values[mine], torch.zeros(10).long(), torch.ones(10), 1)
        torch.testing.assert_close(together.value[c], alone.value[0])
        assert together.value[c].abs().max() < 5


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum"])
def test_a_liar_cannot_steer_a_robust_merge(name: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(11, 20)
    values[4] = 1e6
    merged = MERGES[name]()(values, torch.zeros(11).long(), torch.tensor([1.0] * 4 + [1e9] + [1.0] * 6), 1)
    assert merged.value.abs().max() < 3
    assert mean(values, torch.zeros(11).long(), torch.ones(11), 1).value.abs().max() > 1e4


@st.composite
def uploads(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    k, size, circles = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    number = st.floats(-100, 100, width=32)
    values = draw(st.lists(st.lists(number, min_size=size, max_size=size), min_size=k, max_size=k))
    circle = draw(st.lists(st.integers(0, circles - 1), min_size=k, max_size=k))
    weight = draw(st.lists(st.one_of(st.just(0.0), st.floats(0.125, 50, width=32)), min_size=k, max_size=k))
    return torch.tensor(values), torch.tensor(circle), torch.tensor(weight), circles


@pytest.mark.parametrize("rule", RULES, ids=str)
@steady
@given(given=uploads())
def test_a_merged_value_lies_within_its_circle(rule: Rule, given: tuple[Tensor, Tensor, Tensor, int]) -> None:
    values, circle, weight, circles = given
    merged = rule(values, circle, weight, circles)
    for c in range(circles):
        mine = values[(circle == c) & (weight > 0)]
        assert bool(merged.heard[c]) == (len(mine) > 0)
        if len(mine):
            assert bool((merged.value[c] >= mine.amin(0) - 1e-4).all())
            assert bool((merged.value[c] <= mine.amax(0) + 1e-4).all())


@pytest.mark.parametrize("rule", [r for r in RULES if not isinstance(r, Krum)], ids=str)
@steady
@given(given=uploads(), data=st.data())
def test_the_order_of_clients_and_circles_does_not_matter(
    rule: Rule, given: tuple[Tensor, Tensor, Tensor, int], data: st.DataObject
) -> None:
    values, circle, weight, circles = given
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    rename = torch.tensor(data.draw(st.permutations(range(circles))))
    merged = rule(values, circle, weight, circles)
    other = rule(values[order], rename[circle][order], weight[order], circles)
    heard = merged.heard
    assert torch.equal(other.heard[rename], heard)
    torch.testing.assert_close(other.value[rename][heard], merged.value[heard], rtol=1e-6, atol=1e-6)


@steady
@given(given=uploads(), factor=st.floats(0.01, 1000))
def test_scaling_all_weights_changes_nothing(given: tuple[Tensor, Tensor, Tensor, int], factor: float) -> None:
    values, circle, weight, circles = given
    merged, scaled = mean(values, circle, weight, circles), mean(values, circle, weight * factor, circles)
    torch.testing.assert_close(merged.value, scaled.value, rtol=1e-5, atol=1e-5)


@steady
@given(given=uploads())
def test_mean_against_a_plain_loop(given: tuple[Tensor, Tensor, Tensor, int]) -> None:
    values, circle, weight, circles = given
    merged = mean(values, circle, weight, circles)
    for c in range(circles):
        total = sum(float(w) for i, w in enumerate(weight) if circle[i] == c)
        if total > 0:
            for j in range(values.shape[1]):
                hand = sum(float(weight[i]) * float(values[i, j]) for i in range(len(values)) if circle[i] == c) / total
                assert merged.value[c, j].item() == pytest.approx(hand, rel=1e-6, abs=1e-6)


@steady
@given(given=uploads())
def test_the_dense_form_agrees_with_circles(given: tuple[Tensor, Tensor, Tensor, int]) -> None:
    values, circle, weight, _ = given
    same = (circle == circle[:, None]) * weight
    total = same.sum(1, keepdim=True)
    mixed = MixedUnit(torch.where(total > 0, same / total, 0.0))
    ids = torch.arange(len(values))
    copies, sparse = merge_unit(mixed, [(ids, values)]), merge_unit(UnitPlan(circle, weight), [(ids, values)])
    assert torch.equal(copies.value, values)  # of each client its own, to the bit
    dense, row = mix(mixed.matrix, copies.value), UnitPlan(circle, weight).row
    assert torch.equal(dense.heard, sparse.heard[row])
    torch.testing.assert_close(dense.value, sparse.value[row], rtol=1e-4, atol=1e-4)


def test_merging_by_a_plan_hears_only_who_sent() -> None:
    unit = UnitPlan(circle=[5, 5, -1, 2, 5], weight=[1, 3, 1, 1, 100])
    # 4 did not send; the private client 2 was only asked: its copy is looked at, never merged
    merged = merge_unit(unit, [(torch.tensor([1, 2]), column(4, 999)), (torch.tensor([0]), column(1))])
    assert merged.value[1].item() == 3.25
    assert merged.heard.tolist() == [False, True]


def test_merging_a_unit_that_is_private_everywhere_gives_nothing() -> None:
    merged = merge_unit(UnitPlan([-1, -1]), [(torch.tensor([0, 1]), column(4, 5))])
    assert merged.value.shape == (0, 1)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_family_that_sent_nothing_is_no_trouble(rule: Rule) -> None:
    unit, empty = UnitPlan([0, 0, 1]), (torch.zeros(0).long(), torch.zeros(0, 1))
    assert merge_unit(unit, [empty], rule).heard.tolist() == [False, False]
    assert merge_unit(unit, [empty, (torch.tensor([2]), column(5))], rule).onto(column(1, 1)).tolist() == [[1], [5]]


def test_of_a_mixed_unit_copies_are_kept_and_mixed_when_they_are_received() -> None:
    unit = MixedUnit([[0.5, 0.25, 0.25], [0, 1, 0], [0, 0, 1]])
    merged = merge_unit(unit, [(torch.tensor([2]), column(8)), (torch.tensor([0, 1]), column(2, math.nan))])
    assert merged.heard.tolist() == [True, False, True]
    assert merged.refused.tolist() == [False, False, True]
    copies = merged.onto(column(-1, -4, -1))
    assert copies[:, 0].tolist() == [2, -4, 8]  # 1 sent nothing that counts: what it sent before
    assert mix(unit.matrix, copies).value[:, 0].tolist() == [0.5 * 2 - 0.25 * 4 + 0.25 * 8, -4, 8]
    # without a copy of 1 the others share its part: (0.5 * 2 + 0.25 * 8) / 0.75, and nobody is in 1's own mixture
    known = mix(unit.matrix * torch.tensor([True, False, True]), copies)
    assert known.value[:, 0].tolist() == [4, 0, 8]
    assert known.heard.tolist() == [True, False, True]


def test_robust_rules_see_all_parts_together() -> None:
    unit = UnitPlan([0, 0, 0])
    merged = merge_unit(unit, [(torch.tensor([0]), column(1)), (torch.tensor([1, 2]), column(2, 900))], median)
    assert merged.value.item() == 2


def test_install_by_hand() -> None:
    moved = install(column(0, 0, 0), column(8, 8, 8), torch.tensor([0.25, 1, 0]))
    assert moved[:, 0].tolist() == [2, 8, 0]


def test_install_takes_exactly_one_side_at_the_ends() -> None:
    own, received = column(math.nan, 0.1, math.inf, 0.3), column(0.7, math.nan, 0.9, math.inf)
    moved = install(own, received, torch.tensor([1.0, 0, 1, 0]))
    assert torch.equal(moved, column(0.7, 0.1, 0.9, 0.3))


@steady
@given(given=uploads())
def test_private_never_moves(given: tuple[Tensor, Tensor, Tensor, int]) -> None:
    values, circle, weight, _ = given
    unit = UnitPlan(torch.where(weight > 0, circle, -1), weight)
    ids = torch.arange(len(values))
    merged = merge_unit(unit, [(ids, values)])
    if unit.count:
        after = install(values, merged.value[unit.row], unit.taken)
        still = ~unit.receives
        assert torch.equal(after[still], values[still])
        assert bool(still[weight == 0].all())


def test_new_circles_start_from_where_their_members_were() -> None:
    older = UnitPlan([0, 0, 0, 4, 4, -1])
    #            circle 0 persists; 2 has two members from 4 and one from 0; 9 has a newcomer only
    newer = UnitPlan([0, 0, 2, 2, 2, 9])
    assert inherit(newer, older).tolist() == [0, 1, -1]
    assert inherit(newer, UnitPlan([-1] * 6)).tolist() == [-1, -1, -1]
    mixed = MixedUnit(torch.full((6, 6), 1 / 6))
    assert inherit(mixed, older).tolist() == [0, 0, 0, 1, 1, -1]
    assert inherit(mixed, mixed).tolist() == [0, 1, 2, 3, 4, 5]


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^a trimmed mean with share=0 is the mean: use the merge 'mean'$"):
        TrimmedMean(0)
    with pytest.raises(ValueError, match=r"^a trimmed mean with share=0.5 leaves nothing; give a share between"):
        TrimmedMean(0.5)
    with pytest.raises(ValueError, match=r"^Krum with byzantine=0 has nobody to guard against: use the merge 'mean'$"):
        Krum(0)
    with pytest.raises(ValueError, match=r"^Krum with keep=0 keeps no copy; give 1 or more$"):
        Krum(1, keep=0)
    with pytest.raises(ValueError, match=r"^there is no merge 'medain'; did you mean 'median'"):
        pick("medain")
    with pytest.raises(ValueError, match=r"^there is no merge 'x'; there are mean, median, trimmed"):
        pick("x")
    with pytest.raises(ValueError, match=r"^nothing to merge; when no copy was sent a circle keeps its value$"):
        merge_unit(UnitPlan([0]), [])
    with pytest.raises(ValueError, match=r"^a mixed unit has no circles, so Median.. cannot merge it; use 'mean'"):
        merge_unit(MixedUnit([[1.0]]), [(torch.tensor([0]), column(1))], median)


@pytest.mark.parametrize("rule", [*RULES, *WITH_CONTEXT], ids=str)
def test_nothing_is_asked_of_another_device_nor_mixed_with_it(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: tensors without numbers take its place. They refuse to be read, and to meet those of a CPU."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "meta"))
    unit = UnitPlan(torch.randint(-1, 30, (200,)), torch.rand(200), torch.rand(200))
    values, ids = torch.empty(150, 3000, device="meta"), torch.arange(150, device="meta")
    held, known = torch.empty(unit.count, 3000, device="meta"), torch.empty(unit.count, dtype=torch.bool, device="meta")
    context = MergeContext(held, known, 5, torch.rand(200) < 0.2)
    found = merge_unit(unit, [(ids, values)], rule, context)
    with columns.share_of_columns([0, 1000, 3000], lambda found: found[0] + found[1]):  # as among several GPUs
        shared = merge_unit(unit, [(ids, values)], rule, context)
    assert {each.device.type for each in (*found, *shared)} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", [*RULES, *WITH_CONTEXT], ids=str)
def test_a_gpu_is_never_waited_for_and_gives_the_same_bits(rule: Rule) -> None:
    torch.manual_seed(0)
    unit = UnitPlan(torch.randint(-1, 30, (200,)), torch.rand(200), torch.rand(200))
    values, ids = torch.randn(150, 3000), torch.randperm(200)[:150]
    values[7, 7] = math.nan
    held, known, trusted = torch.randn(unit.count, 3000), torch.arange(unit.count) != 3, torch.rand(200) < 0.2
    expected = merge_unit(unit, [(ids, values)], rule, MergeContext(held, known, 5, trusted))
    there, ids_there, here = values.cuda(), ids.cuda(), unit.to("cuda")
    assert here is unit.to(there.device)
    context = MergeContext(held.cuda(), known.cuda(), 5, trusted)  # whom a server trusts, it knows on the CPU
    for _ in range(2):  # the first round warms up what a library allocates once
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that mode warns that it may miss some
            torch.cuda.set_sync_debug_mode("error")
        try:
            found = merge_unit(unit, [(ids_there, there)], rule, context)
            again = merge_unit(unit, [(ids_there, there)], rule, context)
            install(there.clone(), found.value[here.row[ids_there]], here.taken[ids_there])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    heard = expected.heard
    assert torch.equal(found.heard.cpu(), heard)
    assert torch.equal(found.refused.cpu(), expected.refused)
    torch.testing.assert_close(found.value.cpu()[heard], expected.value[heard], rtol=1e-5, atol=1e-6)
    assert torch.equal(found.value[heard.cuda()], again.value[heard.cuda()])


@pytest.mark.parametrize("huge", [1e6, 1e10, 1e15, 1e20])
@pytest.mark.parametrize("where", ["in another circle", "in the same circle"])
def test_krum_is_not_blinded_by_one_huge_copy(huge: float, where: str) -> None:
    draw = torch.Generator().manual_seed(0)
    honest, other = (torch.randn(8, 50, generator=draw) * 0.01 for _ in range(2))
    if where == "in another circle":
        other[0] = huge
    else:
        honest = torch.cat([honest, torch.full((1, 50), huge)])
    values = torch.cat([honest, torch.full((1, 50), 5.0), other])
    circle = torch.tensor([0] * (len(honest) + 1) + [1] * 8)
    merged = Krum(byzantine=2)(values, circle, torch.ones(len(values)), 2)
    assert float(merged.value[0].abs().max()) < 0.1
