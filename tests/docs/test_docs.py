"""The documentation: every Python block runs, page by page, and the site builds without a warning."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from readers import Readers

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
COMMAND = re.compile(r"^fedquilt (?:run|compare) ([\w-]+)(?= |$)((?: [a-z][\w-]*(?= |$))*)", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def readers() -> Iterator[Readers]:
    readers = Readers()
    yield readers
    readers.close()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, readers: Readers, tmp_path: Path) -> None:
    """In a process of its own, in one go, as a reader who copies block after block."""
    ran = readers.read("\n".join(blocks(page)), tmp_path)
    assert ran.code == 0, ran.err
    assert "Nothing was learnt" not in ran.out
    gains = [float(gain) for gain in re.findall(r"gain over alone ([+-][\d.]+)", ran.out)]
    promised = [float(gain) for gain in re.findall(r"gain over alone ([+-][\d.]+)", page.read_text(encoding="utf-8"))]
    assert len(gains) == len(promised), "a page shows what its code prints"
    assert all(gain > 2 for gain in gains), "an example that shows a gain has one"
    assert gains == pytest.approx(promised, abs=3), "the page says what its code gives, as far as machines differ"


def test_the_cells_of_the_notebook_run(readers: Readers, tmp_path: Path) -> None:
    """In order, in a process of its own; and it is kept without what its cells gave."""
    cells = json.loads((ROOT / "examples" / "first_federation.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert not any(cell.get("outputs") for cell in cells)
    checks = [
        "assert mine.summary['accuracy_mean'] == run.summary['accuracy_mean'], 'as the last cell says'",
        "assert run.summary['gain_over_alone'] > 0.02, run.summary['gain_over_alone']",
        "assert 'gen1' in run._repr_html_(), 'the quilt is shown'",
    ]
    ran = readers.read("\n".join([*code, *checks]), tmp_path)
    assert ran.code == 0, ran.err


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


def test_pages_that_the_site_promises_are_there_and_settings_of_training_are_named() -> None:
    from dataclasses import fields

    from fedquilt.engines.settings import Training

    told = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(Training) if f"`{field.name}`" not in told] == []
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if f" {page}\n" not in listed] == []


def test_names_of_methods_and_read_outs_in_the_docs_are_names_of_the_program() -> None:
    """Every `--readouts a,b`, `readouts=[...]` and `fedquilt run|compare SCENARIO METHOD...` of the pages."""
    from fedquilt import scenarios
    from fedquilt.methods import METHODS
    from fedquilt.readouts import named

    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        readouts = re.findall(r"--readouts ([a-z][a-z0-9,-]+)", text)
        readouts += [",".join(re.findall(r"\"([\w-]+)\"", one)) for one in re.findall(r"readouts=\[([^\]]*)\]", text)]
        wrong = [name for told in readouts for name in told.split(",") if name and named(name) is None]
        assert not wrong, page
        for scenario, told in COMMAND.findall(text):
            assert scenario in scenarios.SCENARIOS, (page, scenario)
            assert [name for name in told.split() if name not in METHODS] == [], page


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
