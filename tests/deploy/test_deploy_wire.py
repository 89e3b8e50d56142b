"""Messages as bytes: what goes in comes out, and what does not belong in a merge is refused with a code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("flwr")

from fedquilt.deploy.transport.codec import has_form, read_down, read_up, write_down
from fedquilt.deploy.transport.wire import Refused, check_values, pack, unpack
from fedquilt.interface.messages import Instructions, UnitValues
from fedquilt.sharing import Compression


def f32(*numbers: float) -> NDArray[np.float32]:
    return np.array(numbers, np.float32)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda n: n != "__metadata__"), st.integers(0, 40)))
def test_arrays_and_text_come_back(sizes: dict[str, int]) -> None:
    sent = {name: np.random.default_rng(size).normal(size=size).astype(np.float32) for name, size in sizes.items()}
    arrays, told = unpack(pack(sent, {"round": 3, "names": list(sizes)}))
    assert told == {"round": 3, "names": list(sizes)}
    assert set(arrays) == set(sent)
    for name in sent:
        np.testing.assert_array_equal(arrays[name], sent[name])


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes) -> None:
    with pytest.raises(Refused) as refusal:
        unpack(noise)
    assert refusal.value.code == "unreadable"


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_message_is_refused_or_has_the_shapes_it_says(place: int, change: int) -> None:
    whole = bytearray(pack({"head": np.arange(6, dtype=np.float32)}, {"round": 1}))
    whole[place % len(whole)] ^= change
    try:
        arrays, _ = unpack(bytes(whole))
    except Refused:
        return
    for array in arrays.values():
        assert array.nbytes <= len(whole)


def test_a_header_cannot_lie_about_the_shape() -> None:
    content = pack({"head": np.arange(6, dtype=np.float32)}, {})
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["head"]["shape"] = [3]
    lie = json.dumps(header).encode()
    with pytest.raises(Refused, match="decoded"):
        unpack(len(lie).to_bytes(8, "little") + lie + content[8 + length :])


def test_another_version_says_so() -> None:
    content = pack({}, {})
    with pytest.raises(Refused, match="another version"):
        unpack(content.replace(b'\\"version\\":2', b'\\"version\\":1'))


GOOD = {"base": np.ones(4, np.float32), "head": np.ones(2, np.float32)}
SIZES = {"base": 4, "head": 2}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"other": np.ones(2, np.float32)}, "unknown-unit"),
        ({"head": None}, "missing-unit"),
        ({"head": np.ones(3, np.float32)}, "wrong-shape"),
        ({"head": np.ones((1, 2), np.float32)}, "wrong-shape"),
        ({"head": np.ones(2, np.float64)}, "wrong-dtype"),
        ({"head": np.ones(2, np.int32)}, "wrong-dtype"),
        ({"head": f32(1, np.nan)}, "not-finite"),
        ({"head": f32(1, np.inf)}, "not-finite"),
        ({"head": f32(1, 2).astype(np.float16)}, "wrong-dtype"),
        ({"head": f32(1e5, 0)}, "absurd-norm"),
        ({"head": f32(3e38, 3e38)}, "absurd-norm"),
    ],
)
def test_what_a_merge_must_not_see_is_refused(change: dict[str, NDArray[Any] | None], code: str) -> None:
    values = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(Refused) as refusal:
        check_values(values, SIZES, {"base": GOOD["base"], "head": f32(1, 0)}, largest_change=1000)
    assert refusal.value.code == code


def test_honest_updates_pass() -> None:
    check_values(GOOD, SIZES, {}, largest_change=1000)
    check_values(GOOD, SIZES, {"base": GOOD["base"]}, largest_change=1000)
    check_values({"head": f32(1e5, 0)}, {"head": 2}, {"head": f32(1e4, 0)}, largest_change=1000)


def test_what_is_offered_does_not_travel_twice() -> None:
    offers = {"a": torch.randn(3, 4), "b": torch.randn(3, 2)}
    block = UnitValues(("a", "b"), (4, 2), None, torch.cat([offers["a"][1], offers["b"][1]])[None])
    other = UnitValues(("c",), (5,), None, torch.randn(1, 5))
    down = Instructions(2, (0,), (block, other), (None, None), {}, offers=offers)
    arrays, text = write_down(down, {})
    assert sum(array.size for array in arrays.values()) == 3 * 6 + 5
    back = read_down(arrays, text)
    for mine, theirs in zip(back.blocks, down.blocks, strict=True):
        assert torch.equal(mine.value, theirs.value)
    assert all(torch.equal(back.offers[unit], value) for unit, value in offers.items())


def test_parameters_travel_in_half_precision_and_all_else_does_not() -> None:
    value = torch.tensor([0.5, 0.25, 1e-9, 3.0, 1e6])  # of a two parameters and a statistic, of b one of each
    offers, copies = {"c": torch.tensor([[1.0, 1e-9], [2.0, 1e6]])}, {"d": torch.ones(1, 2, 3)}
    block = UnitValues(("a", "b"), (3, 2), None, value[None])
    down = Instructions(2, (0,), (block,), (None,), {}, offers=offers, copies=copies)
    arrays, text = unpack(pack(*write_down(down, {"a": 2, "b": 1, "c": 1})))
    assert sum(array.nbytes for array in arrays.values()) == 3 * 2 + 2 * 4 + 2 * 2 + 2 * 4 + 6 * 4
    back = read_down(arrays, text)
    assert torch.equal(back.blocks[0].value[0], value)
    assert torch.equal(back.offers["c"], offers["c"])
    assert torch.equal(back.copies["d"], copies["d"])


@pytest.mark.parametrize(
    ("reports", "right"),
    [
        ({"loss": torch.zeros(2)}, True),
        ({"loss": torch.zeros(3)}, False),
        ({"loss": torch.zeros(2, dtype=torch.float64)}, False),
        ({"loss": torch.zeros(2), "odd": torch.zeros(1)}, False),
        ({}, False),
    ],
)
def test_reports_have_the_form_that_the_method_says_and_no_more(reports: dict[str, torch.Tensor], right: bool) -> None:
    assert has_form(reports, {"loss": (2,)}) is right


@pytest.mark.parametrize("number", [1e17, 1e19, -1e19, 1e200, np.inf, np.nan])
def test_squares_of_reports_are_numbers(number: float) -> None:
    down = Instructions(1, (0,), (), (), {})
    arrays = {"report/loss": np.array([0.5, number])}
    if abs(number) < 1e18:
        assert read_up(arrays, down, {}, {}, Compression(), 1000, False)[1]["loss"].tolist() == [0.5, number]
        return
    with pytest.raises(Refused, match="NaN or infinite"):
        read_up(arrays, down, {}, {}, Compression(), 1000, False)


@pytest.mark.parametrize(("number", "code"), [(900.0, ""), (1100.0, "absurd-norm")])
def test_a_unit_may_grow_from_nothing_to_a_thousand_times_ordinary_weights(number: float, code: str) -> None:
    """However many numbers it has."""
    try:
        check_values({"unit": np.full(10_000, number, np.float32)}, {"unit": 10_000}, {}, 1000)
        said = ""
    except Refused as refused:
        said = refused.code
    assert said == code
