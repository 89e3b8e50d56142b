"""Every promise of SECURITY.md names tests, and these are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_tests_that_promises_name_are_there() -> None:
    told = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", told)
    assert len(named) > 15
    gone = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).is_file() or (test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not gone


def test_every_adversary_has_tests_and_those_marked_are_what_they_are_said_to_be() -> None:
    told = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promised, _, shown = told.partition("## Which test shows it")
    against = re.findall(r"^\| \*\*([^*]+)\*\*", promised, re.MULTILINE)
    assert len(against) > 8
    parts = re.split(r"^\*\*([^*]+)\*\*", shown, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(found) == set(against) - {"a simulation"}  # of which nothing is promised that could fail
    assert all("`tests/" in part for part in found.values())
    names = re.findall(r"`(tests/deploy/[\w/]+\.py)::", shown)
    slow = {name for name in names if "pytestmark = pytest.mark.deploy" in (ROOT / name).read_text(encoding="utf-8")}
    assert slow
    unmarked = [
        part for part in re.split(r"\n- |\n\n", shown) if any(name in part for name in slow) and "°" not in part
    ]
    assert not unmarked
