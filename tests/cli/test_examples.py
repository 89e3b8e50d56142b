"""The scripts a user starts from run."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedquilt as fq

ROOT = Path(__file__).parents[2]
Load = Callable[[str], dict[str, Any]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """The names of an example, run with a quick engine."""
    real = fq.run

    def quick(*args: Any, **settings: Any) -> fq.Run:
        return real(*args, **{"engine": "sequential", "device": "cpu", **settings})

    monkeypatch.setattr(fq, "run", quick)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return lambda name: runpy.run_path(str(ROOT / "examples" / name))


def test_own_clients(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("own_clients.py")["main"](rounds=3)
    out = capsys.readouterr().out
    assert "2 circles of 6, 6" in out  # the first layer of each kind of sensor
    assert "gain_over_alone" in out
    assert re.search(r"machine-1 is \[('\w+', ){3}'\w+'\]", out)


def test_own_model(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("own_model.py")["main"](rounds=2)
    out = capsys.readouterr().out
    assert "norm.running_mean" in out
    assert "4 circles of 3, 3, 3, 3" in out
    assert "head       private" in out


def test_compare_methods(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("compare_methods.py")["main"](("local", "modfl"), seeds=1, rounds=1)
    out = capsys.readouterr().out
    assert "modfl" in out
    assert "24 clients and 1 seed" in out
