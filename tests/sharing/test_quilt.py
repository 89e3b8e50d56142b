"""The quilt: what a reader sees in the terminal, with and without colour."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from fedquilt.report.quilt import PALETTE, Quilt, groups, patch
from fedquilt.sharing import MixedUnit, Plan, UnitPlan, by_trait, everyone, nobody


def draw(quilt: Quilt, width: int = 80, colour: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None).print(quilt)
    return out.getvalue()


def modfl(clients: int = 24) -> Plan:
    device = ["gen1" if i % 2 else "gen2" for i in range(clients)]
    cohort = [f"c{i % 4}" for i in range(clients)]
    return by_trait([f"configuration.{i}" for i in range(4)], device) | by_trait(
        [f"operation.{i}" for i in range(4)], cohort
    )


def test_a_row_per_client_and_a_column_per_unit() -> None:
    lines = draw(Quilt(modfl(), [f"phone-{i}" for i in range(24)])).splitlines()
    assert len(lines) == 1 + 24 + 2  # heads, clients, a legend of two lines
    assert lines[0].split() == [f"con…n.{i}" for i in range(4)] + [f"ope…n.{i}" for i in range(4)]
    assert lines[1].split() == ["phone-0", *"AAAACCCC"]
    assert lines[24].split() == ["phone-23", *"BBBBFFFF"]
    assert lines[25].startswith("A 12 clients, B 12, C 6, D 6, E 6, F 6. The same letter is the same clients")
    assert all(len(line) <= 80 for line in lines)


def test_clients_of_one_circle_are_neighbours() -> None:
    lines = str(Quilt(by_trait(["u"], ["x", "y", "x", "y"]), list("abcd"))).splitlines()
    assert [line.split() for line in lines[1:5]] == [["a", "A"], ["c", "A"], ["b", "B"], ["d", "B"]]


def test_private_is_blank_and_so_is_a_circle_of_one() -> None:
    plan = Plan({"u": UnitPlan([0, 0, 1, -1])}) | nobody(["head"], 4)
    lines = str(Quilt(plan, list("abcd"))).splitlines()
    assert [line.split() for line in lines[1:5]] == [["a", "A"], ["b", "A"], ["c"], ["d"]]


def test_the_same_letter_is_the_same_clients() -> None:
    # Circle ids differ between units; what counts is who is in.
    plan = Plan({"u": UnitPlan([5, 5, 3, 3]), "v": UnitPlan([0, 0, 1, 1]), "w": UnitPlan([0, 0, 0, 1])})
    cells, sizes = groups(plan)
    assert cells == ((0, 0, 2), (0, 0, 2), (1, 1, 2), (1, 1, -1))
    assert sizes == [2, 2, 3]


def test_colours_are_there_in_a_terminal_and_only_there() -> None:
    quilt = Quilt(everyone(["u"], [1, 1]), ["a", "b"])
    assert "\x1b[" in draw(quilt, colour=True)
    assert str(patch(0, 5).style) == "#000000 on #56B4E9"  # what a terminal makes of it is up to its depth of colour
    assert "\x1b" not in draw(quilt)


def test_many_circles_stay_apart() -> None:
    looks = [(patch(g, 5).plain, str(patch(g, 5).style)) for g in range(300)]
    assert len(set(looks)) == 300
    assert len({plain for plain, _ in looks}) == 300  # without colour as well
    cloth = [(plain[0], style) for plain, style in looks]
    assert len(set(cloth[:48])) == 48  # the pattern changes where the colours come round
    assert len(PALETTE) == 8


def test_500_clients_are_abridged() -> None:
    text = draw(Quilt(modfl(500), [f"user-{i}" for i in range(500)]))
    lines = text.splitlines()
    assert len(lines) == 1 + 4 + 2
    assert lines[1].startswith("  125 like user-0 ")


def test_500_clients_that_are_all_different_are_abridged_too() -> None:
    torch.manual_seed(0)
    plan = Plan({f"u{i}": UnitPlan(torch.randint(0, 30, (500,))) for i in range(4)})
    lines = draw(Quilt(plan)).splitlines()
    assert len(lines) < 50
    assert "other patterns" in lines[41]


def test_many_units_are_abridged() -> None:
    plan = Plan({f"block{i}": UnitPlan([0, 0] if i != 3 else [-1, -1]) for i in range(40)})
    lines = draw(Quilt(plan, ["a", "b"])).splitlines()
    assert lines[0].split() == ["block0", "+2", "block3", "block4", "+35"]
    torch.manual_seed(0)
    unlike = Plan({f"block{i}": UnitPlan(torch.randint(0, 3, (12,))) for i in range(60)})
    lines = draw(Quilt(unlike), width=60).splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert "more columns do not fit; widen the terminal" in lines[13]


def test_long_names_and_mixtures() -> None:
    plan = Plan({"u": MixedUnit([[0.5, 0.5], [0, 1]])})
    text = str(Quilt(plan, ["a-client-with-a-very-long-name-indeed-0001", "b"]))
    assert "0001" in text.splitlines()[1]
    assert "~" in text.splitlines()[1]
    assert "~" not in text.splitlines()[2]
    assert "~ is a mixture of its own; blank stays private." in text


def test_wrong_number_of_names() -> None:
    with pytest.raises(ValueError, match=r"^1 names for a plan of 2 clients; give one name each$"):
        str(Quilt(everyone(["u"], [1, 1]), ["a"]))
