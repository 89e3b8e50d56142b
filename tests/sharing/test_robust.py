"""Robust merges: numbers by hand, and those of byzfl 0.0.11 (MIT), which is not needed to run this.

byzfl's rules take moves; ours take copies and the circle's last value, here 0. Its Krum scores n - f - 1 peers, ours
n - f - 2 as in the paper, so only its MultiKrum is compared, where both keep the same copies.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fedquilt.runs.rule_texts import rule_from, rule_to
from fedquilt.sharing import (
    Bucketing,
    CentredClipping,
    Composed,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    MergeContext,
    NearestNeighbours,
    NormBound,
    Rule,
    TrimmedMean,
    UnitPlan,
    merge_unit,
    pick,
)
from fedquilt.sharing.presteps import Prepared
from fedquilt.sharing.robust import liars_in
from fedquilt.sharing.rule import ContextRule

COPIES = torch.tensor([[1, 2, -1], [1.5, 1, -0.5], [0.5, 2.5, -2], [2, 1.5, -1.5], [1, 1, -1], [9, -7, 4], [0, 3, 0.5]])
BYZFL: dict[str, tuple[dict[str, Any], list[float]]] = {  # what byzfl makes of COPIES
    "geometric-median": ({"steps": 500}, [1.2395851612, 1.4472488165, -0.9078614712]),  # GeometricMedian(1e-6, 2000)
    "norm-bound": ({"radius": 2.0}, [0.9266832471, 1.0027369261, -0.5127189755]),  # CenteredClipping(L=1, tau=2)
    "centred-clipping": ({"radius": 2.0, "steps": 3}, [1.2323966026, 1.5553649664, -0.8108685017]),
    "krum": ({"byzantine": 2}, [1.2, 1.6, -1.2]),  # MultiKrum(f=2)
    "nnm+median": ({"byzantine": 2}, [1.2, 1.6, -1.2]),
    "nnm+krum": ({"byzantine": 1}, [1, 1.8333333731, -0.9166666865]),  # NNM(f=1), MultiKrum(f=1)
    "nnm+trimmed-mean": ({"byzantine": 1, "share": 0.15}, [1, 1.8333333731, -0.9166666865]),  # TrMean(f=1)
}
NNM_OF_TWO = [*[[1.2, 1.6, -1.2]] * 5, [2.9, -0.3, 0], [0.8, 1.9, -0.8]]  # NNM(f=2)
ALL = [
    *(GeometricMedian(), NormBound(), NormBound(0.5), CentredClipping(), CentredClipping(0.5, 2), FLTrust(), Krum(0.3)),
    *(pick(f"nnm+{name}", byzantine=0.2) for name in ("median", "krum", "norm-bound")),
    *(pick(f"bucketing+{name}") for name in ("median", "geometric-median", "centred-clipping")),
    pick("bucketing+trimmed-mean", share=0.4),
    pick("bucketing+nnm+krum", byzantine=3),
]


def merged(
    rule: Rule, copies: Tensor, held: Tensor | None = None, key: int = 0, trusted: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    context = MergeContext(torch.zeros(1, copies.shape[1]) if held is None else held, None, key, trusted)
    given = (copies, torch.zeros(len(copies)).long(), torch.ones(len(copies)) if weight is None else weight, 1)
    return (rule(*given, context) if isinstance(rule, ContextRule) else rule(*given)).value[0]


@pytest.mark.parametrize("name", BYZFL)
def test_rules_give_what_byzfl_gives(name: str) -> None:
    settings, expected = BYZFL[name]
    torch.testing.assert_close(merged(pick(name, **settings), COPIES), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_mixing_with_neighbours_gives_what_byzfl_gives() -> None:
    # the mean of rule's copies is told by a rule that gives them back one after the other
    for number, expected in enumerate(NNM_OF_TWO):

        def one(values: Tensor, circle: Tensor, weight: Tensor, circles: int, number: int = number) -> object:
            return Median()(values[number : number + 1], circle[:1], weight[:1], circles)

        found = merged(Composed((NearestNeighbours(2),), one), COPIES)  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_geometric_median_by_hand() -> None:
    # of three points on a line it is the middle one; of a square and its centre the centre
    assert merged(GeometricMedian(200), torch.tensor([[0.0], [1.0], [50.0]])).item() == pytest.approx(1, abs=1e-3)
    square = torch.tensor([[0.0, 0], [2, 0], [0, 2], [2, 2], [1, 1]])
    assert merged(GeometricMedian(), square).tolist() == pytest.approx([1, 1], abs=1e-6)


def test_clipping_by_hand() -> None:
    # moves from 10: +1, +2, +30 cut to 3: 10 + (1 + 2 + 3) / 3 = 12; then -1, 0, +28 cut to 3: 12 + 2/3
    copies, held = torch.tensor([[11.0], [12.0], [40.0]]), torch.tensor([[10.0]])
    assert merged(NormBound(3), copies, held).item() == pytest.approx(12, abs=1e-5)
    assert merged(CentredClipping(3, 2), copies, held).item() == pytest.approx(12 + 2 / 3, abs=1e-5)
    # without a radius the median of the lengths, 2: 10 + (1 + 2 + 2) / 3
    assert merged(NormBound(), copies, held).item() == pytest.approx(10 + 5 / 3, abs=1e-5)


def test_fltrust_by_hand() -> None:
    # the server's move is (2, 0). (3, 3) has the cosine 1/sqrt 2 and is cut to (sqrt 2, sqrt 2); that of (0, 5) is 0,
    # of (-4, 0) below 0, and (8, 0) counts as (2, 0)
    copies = torch.tensor([[4.0, 4], [1, 6], [-3, 1], [9, 1], [3, 1]])
    trust = 1 / math.sqrt(2)
    expected = [1 + (trust * math.sqrt(2) + 2) / (trust + 1), 1 + trust * math.sqrt(2) / (trust + 1)]
    trusted, held = torch.tensor([False] * 4 + [True]), torch.ones(1, 2)
    assert merged(FLTrust(), copies, held, trusted=trusted).tolist() == pytest.approx(expected, abs=1e-6)
    # all others go the other way: the circle stays; nobody to trust: the median
    away = torch.tensor([[-3.0, 1], [-9, 1], [3, 1]])
    assert merged(FLTrust(), away, held, trusted=torch.tensor([False, False, True])).tolist() == [1, 1]
    assert merged(FLTrust(), copies, held).tolist() == copies.median(0).values.tolist()


def test_buckets_hold_every_copy_once_and_change_from_round_to_round() -> None:
    copies = 2.0 ** torch.arange(9)[:, None]
    found = set()
    for key in range(5):
        seen: list[Tensor] = []

        def look(values: Tensor, circle: Tensor, weight: Tensor, circles: int, seen: list[Tensor] = seen) -> object:
            seen.append(values[weight > 0][:, 0])
            return Median()(values, circle, weight, circles)

        merged(Composed((Bucketing(2),), look), copies, key=key)  # type: ignore[arg-type]
        means = seen[0]
        assert len(means) == 5  # nine copies: four pairs and one alone
        alone = means.log2() % 1 == 0
        assert (means[alone].sum() + 2 * means[~alone].sum()).item() == 2**9 - 1  # each power of two once
        assert int(alone.sum()) == 1
        found.add(tuple(sorted(means.tolist())))
    assert len(found) == 5


def test_a_trusted_copy_is_in_no_bucket_with_another() -> None:
    """It would be measured with a liar in it."""
    copies, trusted = torch.arange(6.0)[:, None], torch.tensor([False, True, False, False, True, False])
    for key in range(5):
        found = Bucketing(3)(Prepared(copies, torch.zeros(6).long(), torch.ones(6), trusted), 1, key)
        assert found.values[trusted, 0].tolist() == [1.0, 4.0]
        assert found.weight[trusted].tolist() == [1.0, 1.0]
        assert int((found.weight > 0).sum()) == 4  # and two buckets of the others


@pytest.mark.parametrize("rule", ALL, ids=str)
def test_circles_do_not_know_of_each_other(rule: Rule) -> None:
    draw = torch.Generator().manual_seed(1)
    values, circle = torch.randn(26, 6, generator=draw), torch.arange(26) % 2
    values[0], values[1] = 100, -1e6
    held, trusted = torch.randn(2, 6, generator=draw), torch.arange(26) >= 24
    weight = torch.rand(26, generator=draw) + 0.1
    context = MergeContext(held, None, 5, trusted)
    together = merge_unit(UnitPlan(circle, weight), [(torch.arange(26), values)], rule, context)
    assert together.weight.tolist() == pytest.approx([float(weight[circle == c].sum()) for c in (0, 1)], rel=1e-5)
    buckets = isinstance(rule, Composed) and any(isinstance(step, Bucketing) for step in rule.before)
    for c in (0, 1):
        mine = (circle == c).nonzero()[:, 0]
        alone = merge_unit(
            UnitPlan([0] * 13), [(torch.arange(13), values[mine])], rule,
            MergeContext(held[c : c + 1], None, 5, trusted[mine]),
        )  # fmt: skip
        assert together.value[c].abs().max() < 60
        if not buckets:  # which are drawn by a copy's place among all
            torch.testing.assert_close(together.value[c], alone.value[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [rule for rule in ALL if rule != NormBound(0.5)], ids=str)
def test_liars_cannot_steer_them(rule: Rule) -> None:
    draw = torch.Generator().manual_seed(0)
    honest = torch.randn(17, 20, generator=draw) * 0.1 + 1
    copies = torch.cat([honest, torch.full((3, 20), -1e4), honest[:1]])
    trusted = torch.tensor([False] * 20 + [True])
    mean_of_honest = honest.mean(0)
    claims = torch.tensor([1.0] * 17 + [1e6] * 3 + [1.0])  # of many samples
    found = merged(rule, copies, torch.full((1, 20), 0.5), trusted=trusted, weight=claims)
    assert float((found - mean_of_honest).norm()) < float(mean_of_honest.norm()) < 1e3
    assert float((merged(pick("mean"), copies) - mean_of_honest).norm()) > 1e3


def test_a_share_that_is_a_whole_number_of_clients_is_not_rounded_down() -> None:
    """0.42 * 150 in single precision is less than 63."""
    copies = torch.cat([torch.ones(87, 1), torch.full((63, 1), -1e4)])
    assert merged(TrimmedMean(0.42), copies).item() == 1
    assert liars_in(torch.tensor([150]), 0.42).item() == 63


SMALL = [
    *(TrimmedMean(), TrimmedMean(0.22), Krum(0.2), GeometricMedian(), NormBound(), CentredClipping(), FLTrust()),
    *(pick(f"nnm+{name}", byzantine=0.2) for name in ("median", "krum", "trimmed-mean")),
    *(pick(f"bucketing+{name}") for name in ("median", "trimmed-mean", "centred-clipping")),
]


@pytest.mark.parametrize("heard", [3, 4, 5, 7])
@pytest.mark.parametrize("rule", SMALL, ids=str)
def test_a_liar_in_a_circle_that_is_too_small_for_a_rule_meets_its_median(rule: Rule, heard: int) -> None:
    """The first circle is big enough for all of them; of the second one, so many are heard in a round."""
    draw = torch.Generator().manual_seed(0)
    copies = torch.randn(12 + heard, 20, generator=draw) * 0.1 + 1
    copies[12] = -1e4
    circle, context = torch.tensor([0] * 12 + [1] * heard), MergeContext(torch.ones(2, 20))
    found = merge_unit(UnitPlan(circle), [(torch.arange(12 + heard), copies)], rule, context)
    assert float((found.value - 1).abs().max()) < 0.5


@pytest.mark.parametrize("rule", ALL, ids=str)
def test_copies_that_are_not_finite_are_left_out_and_told(rule: Rule) -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(14, 5, generator=draw)
    bad = values.clone()
    bad[3, 1], bad[8, 0] = math.nan, math.inf
    good = torch.tensor([i for i in range(14) if i not in (3, 8)])
    unit, context = UnitPlan([0] * 14), MergeContext(torch.zeros(1, 5), trusted=torch.arange(14) == 13)
    found = merge_unit(unit, [(torch.arange(14), bad)], rule, context)
    assert found.refused.nonzero()[:, 0].tolist() == [3, 8]
    assert found.value.isfinite().all()
    buckets = isinstance(rule, Composed) and any(isinstance(step, Bucketing) for step in rule.before)
    if not buckets:
        without = merge_unit(unit, [(good, values[good])], rule, context)
        torch.testing.assert_close(found.value, without.value)


@pytest.mark.parametrize("rule", [*ALL, Median(), TrimmedMean(0.2), Krum(2), Krum(2, keep=1)], ids=str)
def test_a_merge_comes_back_from_a_file(rule: Rule) -> None:
    assert rule_from(rule_to(rule)) == rule


def test_refusals() -> None:
    refused: dict[tuple[Any, ...], str] = {
        ("nnm",): "'nnm' needs a merge after it, as in nnm+median",
        ("krum+nnm",): "'krum' is a merge and comes last, as in nnm+krum",
        ("nmm+krum",): "there is no step before a merge 'nmm'; did you mean 'nnm'",
        ("nnm+krumm",): "there is no merge 'krumm'; did you mean 'krum'",
        ("bucketing+mean",): "'bucketing+mean' is a mean of means, which any liar steers",
        ("geometric-median", "steps", 0): "a geometric median with steps=0 is the median",
        ("geometric-median", "smoothing", 0): "a geometric median with smoothing=0 may divide by 0",
        ("centred-clipping", "steps", 1): "centred clipping with one step bounds norms: use the merge 'norm-bound'",
        ("centred-clipping", "steps", 0): "centred clipping with steps=0 hears nobody",
        ("norm-bound", "radius", 0): "a norm bound with radius=0 lets nothing or everything pass",
        ("fltrust", "trusted", ()): "FLTrust trusts nobody",
        ("bucketing+median", "size", 1): "buckets of size=1 hold single copies",
        ("nnm+median", "byzantine", 0): "nnm with byzantine=0 has nobody to guard against",
        ("krum", "byzantine", 0.5): "Krum: byzantine=0.5 must be a number of clients, or a share of a circle below",
        ("krum", "byzantine", 1.5): "Krum: byzantine=1.5 must be a number of clients",
        ("nnm+krum", "byzantin", 1): "there is no setting of the merge nnm+krum 'byzantin'; did you mean 'byzantine'",
    }
    for (name, *setting), sentence in refused.items():
        with pytest.raises(ValueError, match="^" + re.escape(sentence)):
            pick(name, **dict([setting] if setting else []))
    twice = Composed((NearestNeighbours(1),), Krum(2))
    with pytest.raises(ValueError, match="has two values of 'byzantine'; by name, all parts of a merge have the same"):
        rule_to(twice)
