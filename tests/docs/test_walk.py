"""The walk of one client on the contributors' page: every function is there, and a run passes them in order."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedquilt as fq

PACKAGE = Path(fq.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "contributing" / "architecture.md"
ADDRESS = re.compile(r"`([\w/]+\.py:[\w.]+)`")


def hops() -> list[list[str]]:
    """The addresses that each numbered hop names."""
    numbered = re.findall(r"^\d+\. .*?(?=^\d+\. |^\S)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [ADDRESS.findall(hop) for hop in numbered]


def defined(file: Path) -> set[str]:
    """The classes, functions and methods of a file."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_every_function_of_the_walk_is_there() -> None:
    addresses = ADDRESS.findall(PAGE.read_text(encoding="utf-8"))
    assert len(addresses) > 60
    lost = [each for each in addresses if each.partition(":")[2] not in defined(PACKAGE / each.partition(":")[0])]
    assert not lost


def test_a_run_passes_them_in_order(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from fedquilt.report.page import write_page

    passed: dict[str, None] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            passed.setdefault(f"{file.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_qualname}")

    draw = np.random.default_rng(0)

    def some(n: int) -> tuple[np.ndarray, np.ndarray]:
        return draw.normal(size=(n, 4)), draw.integers(0, 3, n)

    sys.setprofile(watch)
    try:
        clients = [fq.Client(f"c{i}", lambda: nn.Linear(4, 3), some(8), some(4), some(4)) for i in range(3)]
        training = fq.Training(rounds=2, batch=4, lr=0.1)
        scenario = fq.Scenario("a walk", clients, training)
        fq.run(scenario, "scaffold", alone=False, engine="sequential", out=tmp_path / "run")
        write_page([tmp_path / "run"], tmp_path / "page.html")
    finally:
        sys.setprofile(None)
    walk = hops()
    assert len(walk) == 20
    assert not [address for hop in walk for address in hop if address not in passed]
    first = [list(passed).index(hop[0]) for hop in walk]
    assert first == sorted(first)
