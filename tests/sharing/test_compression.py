"""Codes of changes: by hand, there and back, and how long they are."""

from __future__ import annotations

import math

import pytest
import torch

from fedquilt.sharing import Compression, everyone, nobody, traffic
from fedquilt.sharing.compression import half
from fedquilt.sharing.traffic import Lengths


def test_int8_by_hand() -> None:
    how, change = Compression("int8"), torch.tensor([[1.27, -0.5, 0.004, 0.016], [-254.0, 3.0, 2.9, 0.0]])
    code = how.encode(change)
    # the largest is 127 steps: steps of 0.01 and of 2; halves go to the even number, as IEEE rounds
    assert code["scale"].flatten().tolist() == pytest.approx([0.01, 2.0])
    assert code["value"].tolist() == [[127, -50, 0, 2], [-127, 2, 1, 0]]
    assert code["value"].dtype == torch.int8
    said = how.decode(code, 4)
    torch.testing.assert_close(said, torch.tensor([[1.27, -0.5, 0.0, 0.02], [-254.0, 4.0, 2.0, 0.0]]))
    assert bool(((change - said).abs() <= code["scale"] / 2 * (1 + 1e-6)).all())


def test_int8_loses_nothing_of_whole_steps_and_of_nothing() -> None:
    how, steps = Compression("int8"), torch.arange(-127.0, 128.0)[None] * 0.25
    assert torch.equal(how.decode(how.encode(steps), 255), steps)
    assert torch.equal(how.decode(how.encode(torch.zeros(2, 3)), 3), torch.zeros(2, 3))


def test_topk_by_hand() -> None:
    how = Compression("topk", kept=0.4)  # two of five
    code = how.encode(torch.tensor([[1.0, -5.0, 2.0, 0.0, 4.0], [0.1, 0.0, -0.3, 0.2, 0.0]]))
    assert code["where"].tolist() == [[1, 4], [2, 3]]
    assert how.decode(code, 5).tolist() == [[0, -5, 0, 0, 4], [0, 0, pytest.approx(-0.3), pytest.approx(0.2), 0]]


def test_error_feedback_of_topk_over_three_rounds_by_hand() -> None:
    """A client wants to go by (3, 2, -1) in every round, and one number of three is sent."""
    how, step, waits = Compression("topk", kept=1 / 3), torch.tensor([[3.0, 2.0, -1.0]]), torch.zeros(1, 3)
    sent = []
    for _ in range(3):
        wanted = step + waits
        said = how.decode(how.encode(wanted), 3)
        waits = wanted - said
        sent.append(said[0].tolist())
    assert sent == [[3, 0, 0], [0, 4, 0], [6, 0, 0]]
    assert waits.tolist() == [[0, 2, -3]]
    assert (torch.tensor(sent).sum(0) + waits[0]).tolist() == [9, 6, -3]  # three steps


@pytest.mark.parametrize("n", [1, 2, 7, 300])
def test_all_kept_is_all(n: int) -> None:
    change = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    how = Compression("topk", kept=1.0)
    assert torch.equal(how.decode(how.encode(change), n), change)
    assert how.form(n) == {"value": ("float32", n)}


def test_float16_keeps_the_range_of_half_precision() -> None:
    assert half(torch.tensor([1e6, -1e6, 0.1])).float().tolist() == [65504, -65504, pytest.approx(0.1, rel=1e-3)]
    assert half(torch.tensor([math.inf, math.nan])).isfinite().tolist() == [False, False]


@pytest.mark.parametrize("up", ["float16", "int8", "topk"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_harms_nobody_else(up: str, bad: float) -> None:
    how, change = Compression(up), torch.randn(3, 40, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    good = how.decode(how.encode(change), 40)
    change[1, 7] = bad
    said = how.decode(how.encode(change), 40)
    assert said.isfinite().all(1).tolist() == [True, False, True]
    assert torch.equal(said[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("how", [Compression("float16"), Compression("int8"), Compression("topk", kept=0.1)])
def test_a_stack_is_its_rows(how: Compression) -> None:
    change = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    one_by_one = torch.cat([how.decode(how.encode(row[None]), 50) for row in change])
    assert torch.equal(how.decode(how.encode(change), 50), one_by_one)


def test_how_long_codes_are() -> None:
    assert Compression().bytes(1000) == 4000
    assert Compression("float16").bytes(1000) == 2000
    assert Compression("int8").bytes(1000) == 1004
    places = {(kept, n): Compression("topk", kept=kept).form(n).get("where") for kept in (0.01, 0.05, 0.5, 1.0)
              for n in (100, 10_000, 100_000)}  # fmt: skip
    assert places[0.01, 100] == ("uint8", 1)
    assert places[0.01, 10_000] == ("uint16", 100)
    assert places[0.01, 100_000] == ("uint32", 1000)
    assert places[0.05, 100_000] == ("bits", 12_500)  # 20 000 bytes as numbers
    assert places[0.5, 100] == ("bits", 13)
    assert places[1.0, 100] is None
    assert Compression("topk", kept=0.01).bytes(10_000) == 100 * 4 + 100 * 2
    assert Compression("topk", kept=0.5).bytes(100) == 50 * 4 + 13
    assert Compression("topk", kept=1e-9).count(5) == 1
    assert Compression("topk", kept=0.3).count(10) == 3  # not 4, by rounding


def test_settings_are_refused_in_sentences() -> None:
    with pytest.raises(ValueError, match=r"no kind of compress\.up 'int4'; did you mean 'int8'"):
        Compression("int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'int8'"):
        Compression(down="int8")  # type: ignore[arg-type]
    for kept in (0, 1.5, math.nan, True, "a"):
        with pytest.raises(ValueError, match=r"compress\.kept"):
            Compression("topk", kept=kept)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is of topk"):
        Compression("int8", kept=0.1)
    assert Compression.of(Compression("topk", "float16", 0.2).text) == Compression("topk", "float16", 0.2)
    assert Compression("topk").text == {"up": "topk", "kept": 0.05}
    assert Compression().text == {}


def test_traffic_of_codes() -> None:
    plan = everyone(["conv"], [1.0, 1.0]) | nobody(["head"], 2)
    up, down = {"conv": torch.tensor([104, 104]), "head": torch.tensor([14, 14])}, {"conv": torch.tensor([200, 200])}
    moved = traffic(plan, {"conv": 100, "head": 10}, [0], Lengths(up, {**down, "head": torch.tensor([20, 20])}))
    assert moved.bytes_up.tolist() == [104, 0]
    assert moved.bytes_down.tolist() == [200, 0]
    assert moved.up.tolist() == [[100, 0], [0, 0]]  # values are values
    assert moved.by_unit() == {"conv": (104, 200), "head": (0, 0)}
    assert (moved + moved).total_up == 208
    assert (moved + traffic(plan, {"conv": 100, "head": 10})).total_up == 104 + 800
