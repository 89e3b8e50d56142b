"""Who takes part in a round: a fair draw that depends on the seed and the round alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedquilt._util.randomness import key_of, some_of


@given(st.integers(1, 60), st.data(), st.integers(0, 2**63 - 1))
def test_who_takes_part_is_drawn_without_repetition(count: int, data: st.DataObject, key: int) -> None:
    number = data.draw(st.integers(1, count))
    chosen = some_of(count, number, key)
    assert len(set(chosen)) == number
    assert list(chosen) == sorted(chosen)
    assert set(chosen) <= set(range(count))
    assert chosen == some_of(count, number, key)


def test_everyone_takes_part_about_equally_often_and_in_any_company() -> None:
    rounds = [some_of(10, 3, key_of("participants", 0, round_)) for round_ in range(3000)]
    often = torch.zeros(10)
    for chosen in rounds:
        often[list(chosen)] += 1
    assert bool(((often - 900).abs() < 100).all())  # four standard deviations of a fair draw
    assert len(set(rounds)) == 120  # each of the 120 companies of three
