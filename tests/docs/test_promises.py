"""Every promise of SECURITY.md that names a test names one that is there."""

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
