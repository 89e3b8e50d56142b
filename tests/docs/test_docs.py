"""The documentation: every Python block runs, page by page, and the site builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """In a process of its own, in one go, as a reader who copies block after block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks(page))], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "Nothing was learnt" not in ran.stdout
    gains = [float(gain) for gain in re.findall(r"gain over alone ([+-][\d.]+)", ran.stdout)]
    promised = [float(gain) for gain in re.findall(r"gain over alone ([+-][\d.]+)", page.read_text(encoding="utf-8"))]
    assert len(gains) == len(promised), "a page shows what its code prints"
    assert all(gain > 2 for gain in gains), "an example that shows a gain has one"
    assert gains == pytest.approx(promised, abs=3), "the page says what its code gives, as far as machines differ"


def test_the_page_on_the_command_is_what_the_command_says() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from command_reference import PAGE, reference
    finally:
        sys.path.remove(str(ROOT / "docs"))
    assert PAGE.read_text(encoding="utf-8") == reference(), "write it anew: python docs/command_reference.py"


def test_every_readout_and_data_set_is_on_a_page() -> None:
    from fedquilt.data import SOURCES
    from fedquilt.readouts import READOUTS

    told = (ROOT / "docs" / "concepts" / "results.md").read_text(encoding="utf-8")
    assert [name for name in READOUTS if f"`{name}`" not in told and f"`{name}-k`" not in told] == []
    told = (ROOT / "docs" / "concepts" / "data.md").read_text(encoding="utf-8")
    assert [name for name in SOURCES if f"| `{name}` |" not in told] == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").is_file()
    reference = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert "&gt;&gt;&gt; " in reference, "examples of docstrings are there"
    assert "<blockquote>" not in reference, "and are set as code"
