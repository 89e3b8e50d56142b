"""What moves, against a count one value at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.sharing import MixedUnit, Plan, UnitPlan, everyone, nobody, traffic

steady = settings(max_examples=50, deadline=None)  # a busy machine is no failure


def test_by_hand() -> None:
    # conv (100 values): everyone; mid (10): circles {0, 1} and {2}; head (7): private, but 2 is asked to show it
    plan = (everyone(["conv"], [1, 1, 1]) | Plan({"mid": UnitPlan([0, 0, 1])}) | nobody(["head"], 3)).but(
        asked={"head": [False, False, True]}
    )
    moved = traffic(plan, {"conv": 100, "mid": 10, "head": 7})
    assert moved.units == ("conv", "mid", "head")
    assert moved.up.tolist() == [[100, 10, 0], [100, 10, 0], [100, 0, 7]]
    assert moved.down.tolist() == [[100, 10, 0], [100, 10, 0], [100, 0, 0]]
    assert moved.bytes_up.tolist() == [440, 440, 428]
    assert moved.bytes_down.tolist() == [440, 440, 400]
    assert (moved.total_up, moved.total_down) == (1308, 1280)
    assert moved.by_unit() == {"conv": (1200, 1200), "mid": (80, 80), "head": (28, 0)}
    twice = moved + moved
    assert twice.total_up == 2616


def test_only_participants_move() -> None:
    plan = everyone(["u"], [1, 1, 1])
    for chosen in (torch.tensor([0, 2]), torch.tensor([True, False, True])):
        moved = traffic(plan, {"u": 5}, chosen)
        assert moved.up[:, 0].tolist() == moved.down[:, 0].tolist() == [5, 0, 5]


def test_a_unit_may_have_another_size_in_another_family() -> None:
    plan = Plan({"u": UnitPlan([0, 0, 1, 1, -1])})
    assert traffic(plan, {"u": torch.tensor([3, 3, 8, 8, 0])}).up[:, 0].tolist() == [3, 3, 8, 8, 0]


def test_the_dense_form() -> None:
    plan = Plan({"u": MixedUnit([[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]])})
    moved = traffic(plan, {"u": 2})
    assert moved.up[:, 0].tolist() == [2, 2, 0]
    assert moved.down[:, 0].tolist() == [2, 0, 0]


@steady
@given(st.data())
def test_against_a_count_one_by_one(data: st.DataObject) -> None:
    clients, units = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))

    def row(kind: st.SearchStrategy[float]) -> list[float]:
        return data.draw(st.lists(kind, min_size=clients, max_size=clients))

    drawn = {
        f"u{u}": (row(st.integers(-1, 2)), row(st.sampled_from([0.0, 1.0, 7.0])), row(st.sampled_from([0.0, 0.5, 1.0])))
        for u in range(units)
    }
    part = data.draw(st.lists(st.booleans(), min_size=clients, max_size=clients))
    sizes: dict[str, int | torch.Tensor] = {name: 3 + i for i, name in enumerate(drawn)}
    moved = traffic(Plan({name: UnitPlan(*rows) for name, rows in drawn.items()}), sizes, torch.tensor(part))
    for u, (name, (circle, weight, pull)) in enumerate(drawn.items()):
        for i in range(clients):
            peers = [j for j in range(clients) if j != i and circle[j] == circle[i] >= 0]
            assert moved.up[i, u] == (sizes[name] if part[i] and peers and weight[i] else 0)
            assert moved.down[i, u] == (sizes[name] if part[i] and peers and pull[i] else 0)


def test_refusals() -> None:
    plan = everyone(["u"], [1, 1])
    with pytest.raises(ValueError, match=r"^unit 'u' is in the plan but its size is not given; add it to sizes$"):
        traffic(plan, {})
    with pytest.raises(ValueError, match=r"^traffic adds up only over the same clients and units"):
        traffic(plan, {"u": 1}) + traffic(everyone(["v"], [1, 1]), {"v": 1})
