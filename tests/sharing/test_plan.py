"""Plans: what follows from the three vectors, printing, equality, JSON, and every sentence of refusal."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.sharing import MixedUnit, Plan, UnitPlan, by_labels, by_trait, everyone, nobody

steady = settings(max_examples=50, deadline=None)  # a busy machine is no failure

circles = st.lists(st.integers(-1, 4), min_size=1, max_size=8)


@st.composite
def unit_plans(draw: st.DrawFn, clients: int) -> UnitPlan:
    row = st.integers(-1, 3)
    weight = st.floats(0, 100, width=32)
    pull = st.floats(0, 1, width=32)
    drawn = [draw(st.lists(kind, min_size=clients, max_size=clients)) for kind in (row, weight, pull)]
    return UnitPlan(drawn[0], drawn[1], drawn[2], draw(st.sampled_from([None, 4])))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    clients = draw(st.integers(1, 7))
    units = {f"u{i}": draw(unit_plans(clients)) for i in range(draw(st.integers(1, 4)))}
    mask = st.lists(st.booleans(), min_size=clients, max_size=clients)
    return Plan(units, draw(st.dictionaries(st.sampled_from(sorted(units)), mask)))


def test_who_sends_and_receives_by_hand() -> None:
    # clients      0     1     2    3    4    5
    circle = [7, 7, 3, -1, 7, 3]
    weight = [1, 0, 5, 9, 2, 1]
    pull = [1, 0.5, 0, 1, 0.25, 1]
    plan = Plan({"u": UnitPlan(circle, weight, pull)})
    unit = plan["u"]
    assert isinstance(unit, UnitPlan)
    assert unit.labels.tolist() == [3, 7]
    assert unit.members.tolist() == [2, 3]
    assert unit.row.tolist() == [1, 1, 0, 0, 1, 0]
    assert plan.sends("u").tolist() == [True, False, True, False, True, True]
    assert plan.receives("u").tolist() == [True, True, False, False, True, True]
    assert unit.taken.tolist() == [1, 0.5, 0, 0, 0.25, 1]
    assert plan.circle_sizes["u"].tolist() == [2, 3]
    assert not unit.whole


def test_a_circle_of_one_does_not_move() -> None:
    plan = Plan({"u": UnitPlan([0, 0, 1], [1, 1, 1])})
    assert plan.sends("u").tolist() == [True, True, False]
    assert plan.receives("u").tolist() == [True, True, False]


def test_private_clients_have_no_weight_and_no_pull() -> None:
    assert UnitPlan([-1, 0], [5, 5], 1.0) == UnitPlan([-1, 0], [0, 5], [0.0, 1.0])


def test_asked_units_are_sent_but_nobody_receives_them() -> None:
    plan = nobody(["head"], 3).but(asked={"head": [True, False, True]})
    assert plan.sends("head").tolist() == [True, False, True]
    assert not plan.receives("head").any()


def test_mixed_unit_by_hand() -> None:
    unit = MixedUnit([[0.5, 0.5, 0], [0, 1, 0], [1, 0, 0]], pull=[1, 1, 0])
    plan = Plan({"u": unit})
    # 2 has pull 0 and asks for nothing; 1 would only get its own copy back; 0 mixes its own with 1's.
    assert plan.receives("u").tolist() == [True, False, False]
    assert plan.sends("u").tolist() == [True, True, False]
    assert plan.circle_sizes == {}


def test_printing() -> None:
    plan = (
        everyone(["conv1"], [1] * 12) | by_trait(["conv2"], ["a"] * 8 + ["b"] * 4) | nobody(["head"], 12)
    )  # the example of the style guide
    assert str(plan) == "conv1      1 circle of 12\nconv2      2 circles of 8, 4\nhead       private"


@pytest.mark.parametrize(
    ("unit", "line"),
    [
        (UnitPlan([0, 0, 1, -1]), "1 circle of 2; 2 private"),
        (UnitPlan([0, 0, 0, 0], 1, 0.5), "1 circle of 4; pull 0.50"),
        (UnitPlan([0, 0, 0, 0], 1, [0.25, 0, 1, 1]), "1 circle of 4; pull 0.25 to 1.00"),
        (MixedUnit([[0.5, 0.5], [0, 1]]), "mixed for 1 from 2; 1 private"),
        (MixedUnit([[1, 0], [0, 1]]), "private"),
        (UnitPlan(torch.arange(40) // 2), "20 circles of 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, ... 2"),
    ],
)
def test_printing_one_unit(unit: UnitPlan | MixedUnit, line: str) -> None:
    assert str(Plan({"a.long.unit.name": unit})) == f"a.long.unit.name  {line}"


def test_printing_says_who_is_asked() -> None:
    assert str(nobody(["head"], 3).but(asked={"head": [1, 1, 0]})) == "head       private; asked of 2"


@steady
@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    back = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back == plan
    assert str(back) == str(plan)


def test_json_of_a_mixed_unit() -> None:
    plan = Plan({"u": MixedUnit([[0.25, 0.75], [0.5, 0.5]], [1, 0.5])})
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_json_is_what_a_run_keeps_on_disk() -> None:
    assert Plan({"u": UnitPlan([0, -1], [2, 3], 1)}).to_json() == {
        "units": {"u": {"circle": [0, -1], "weight": [2.0, 0.0], "pull": [1.0, 0.0]}}
    }


@steady
@given(plans(), plans())
def test_equality_is_equality_of_contents(one: Plan, other: Plan) -> None:
    assert one == copy.deepcopy(one)
    assert (one == other) == (one.to_json() == other.to_json())


@steady
@given(plans())
def test_what_follows_from_a_plan(plan: Plan) -> None:
    for name, unit in plan.units.items():
        assert isinstance(unit, UnitPlan)
        ids = unit.circle.tolist()
        for i, c in enumerate(ids):
            alone = c == -1 or (ids.count(c) < 2 and unit.pool is None)
            asked = name in plan.asked and bool(plan.asked[name][i])
            assert bool(plan.receives(name)[i]) == (not alone and float(unit.pull[i]) > 0)
            assert bool(plan.sends(name)[i]) == (asked or (not alone and float(unit.weight[i]) > 0))
            if c >= 0:
                assert int(unit.labels[unit.row[i]]) == c


def test_a_plan_does_not_change() -> None:
    circle = torch.tensor([0, 0])
    unit = UnitPlan(circle)
    plan = Plan({"u": unit})
    circle[0] = 5
    assert unit.circle.tolist() == [0, 0]
    with pytest.raises(FrozenInstanceError):
        plan.clients = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        unit.circle = circle  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.units["v"] = unit  # type: ignore[index]
    with pytest.raises(TypeError):
        hash(plan)


def test_copies_on_a_device_are_made_once_and_carry_what_is_derived() -> None:
    unit = UnitPlan([0, 0, 4, -1], [1, 2, 3, 4])
    assert unit.to("cpu") is unit
    there = unit.to("meta")
    assert there is unit.to("meta")
    assert there.row.device.type == there.sends.device.type == there.taken.device.type == "meta"
    assert there.count == 2


def test_units_that_are_alike_are_found() -> None:
    plan = everyone(["a", "b"], [1, 2]) | nobody(["c"], 2) | everyone(["d"], [1, 2])
    assert [names for _, names in plan.alike] == [("a", "b", "d"), ("c",)]


def test_patterns() -> None:
    beta = torch.tensor([[1, 0.5, 0], [0, 0.75, 0.2], [0, 0, 0.4]])
    plan = by_labels([{0, 1}, {1, 2}, {2}], classes=3, weights=beta, pull=0.5)
    assert list(plan.units) == ["label-0", "label-1", "label-2"]
    assert plan["label-1"].lists == {"circle": [0, 0, -1], "weight": [0.5, 0.75, 0], "pull": [0.5, 0.5, 0]}
    assert plan.sends("label-0").tolist() == [False] * 3
    shared = by_trait(["u"], ["x", None, "y", "x"], weights=[1, 2, 3, 4])["u"]
    assert shared.lists["circle"] == [0, -1, 1, 0]


def refused(sentence: str) -> Any:
    return pytest.raises(ValueError, match=r"^" + re.escape(sentence))


def test_refusals() -> None:
    with refused("a plan needs at least one unit; cut the model into units first"):
        Plan({})
    with refused("unit 'b' is planned for 2 clients but unit 'a' for 3; a plan is over all clients"):
        Plan({"a": UnitPlan([0, 0, 0]), "b": UnitPlan([0, 0])})
    with refused("unit 'a': client 1 has the circle -2; ids start at 0, and -1 is private"):
        Plan({"a": UnitPlan([0, -2])})
    for weight in (-1.0, float("nan"), float("inf")):
        with refused(f"unit 'a': client 0 has the weight {weight:g}; a weight is a finite number from 0 up"):
            Plan({"a": UnitPlan([0, 0], [weight, 1])})
    for pull in (-0.5, 1.5, float("nan")):
        with refused(f"unit 'a': client 1 has the pull {pull:g}; a pull goes from 0 (keep mine) to 1"):
            Plan({"a": UnitPlan([0, 0], 1, [1, pull])})
    with refused("circle has shape (1, 2); give one circle id per client"):
        UnitPlan(torch.zeros(1, 2))
    with refused("weight has shape (3,) but there are 2 clients; give one each"):
        UnitPlan([0, 0], [1, 1, 1])
    with refused("unit 'c' is asked for but not in the plan; it has a"):
        Plan({"a": UnitPlan([0])}, {"c": [True]})
    with refused("unit 'a': asked has shape (2,) but there are 1 clients; give one each"):
        Plan({"a": UnitPlan([0])}, {"a": [True, True]})
    with refused("unit 'a': pull has shape (2,) but there are 1 clients; give one each"):
        Plan.from_json({"units": {"a": {"circle": [0], "weight": [1], "pull": [1, 1]}}})
    with pytest.raises(KeyError, match="unit 'x' is not in the plan; it has a"):
        Plan({"a": UnitPlan([0])})["x"]


def test_refusals_of_mixtures() -> None:
    with refused("matrix has shape (1, 2); give one row and one column per client"):
        MixedUnit([[1, 0]])
    with refused("pull has shape (3,) but there are 1 clients; give one each"):
        MixedUnit([[1]], [1, 1, 1])
    with refused("unit 'm': client 1 has a mixture whose shares sum to 0.7; make a row sum to 1, or 0 for nothing"):
        Plan({"m": MixedUnit([[0, 0], [0.3, 0.4]])})
    with refused("unit 'm': client 0 has a mixture with a share that is negative or not finite"):
        Plan({"m": MixedUnit([[1.5, -0.5], [0, 1]])})
    with refused("unit 'm': client 0 has the pull 2; a pull goes from 0 (keep mine) to 1 (take the mixture)"):
        Plan({"m": MixedUnit([[1, 0], [0, 1]], [2, 1])})


def test_a_plan_that_models_cannot_follow_is_refused() -> None:
    plan = Plan({"head": UnitPlan([0, 0, -1])})
    names = ["watch-1", "phone-2", "phone-3"]
    plan.check({"head": ["s", "s", None]}, names)
    with refused("unit 'head': clients 'watch-1' and 'phone-2' share it, but one has the shapes s and the other t;"):
        plan.check({"head": ["s", "t", "t"]}, names)
    with refused("unit 'head': client 'phone-2' is planned to share it but its model has no such unit; give it the"):
        plan.check({"head": ["s", None, None]}, names)
    with refused("unit 'head' is planned but no client's model has it; there are conv"):
        plan.check({"conv": ["s"] * 3}, names)
    with refused("the plan is for 3 clients but there are 2; plan for all of them"):
        plan.check({"head": ["s"] * 2}, names[:2])
    mixed = Plan({"head": MixedUnit([[0.5, 0, 0.5], [0, 1, 0], [0, 0, 1]])})
    mixed.check({"head": ["s", "t", "s"]}, names)
    with refused("unit 'head': clients 'watch-1' and 'phone-3' share it"):
        mixed.check({"head": ["s", "s", "t"]}, names)


def test_refusals_of_patterns() -> None:
    with refused("1 unit names for 2 labels; give one name per label"):
        by_labels([{0, 1}], classes=2, units=["cat"])
    with refused("weights have shape (1, 3); give (clients, labels) = (1, 2)"):
        by_labels([{0, 1}], classes=2, weights=torch.ones(1, 3))


def test_circles_are_whole_numbers_and_labels_known() -> None:
    with pytest.raises(ValueError, match="circles are whole numbers"):
        UnitPlan([0.2, 0.9, 1.5])
    assert UnitPlan([0.0, 1.0]).circle.tolist() == [0, 1]
    with pytest.raises(ValueError, match="a client owns label 5, but there are 3, from 0 up"):
        by_labels([{0, 5}, {1}], 3)
