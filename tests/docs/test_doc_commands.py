"""Every `fedquilt ...` that a page tells a reader to type is one that the command understands, options and all."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from fedquilt.cli import ClickException, app
from fedquilt.cli.settings import spread, with_port

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
OTHERS = {"commands.md", "CHANGELOG.md", "changelog.md"}  # made of the command itself, or telling of what was
BLOCK = re.compile(r"^```(?:console|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(fedquilt [a-z][^`]* --[^`]*)`")


def typed(page: Path) -> list[str]:
    """What a page has a reader type, in blocks, where `$ ` marks it if anything does."""
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [re.sub(r"(^| )#.*", "", line) for line in block.replace("\\\n", " ").splitlines()]
        marked = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found += [line[line.index("fedquilt ") :] for line in marked or lines if re.search(r"(^|[/ ])fedquilt ", line)]
    return found


def named(page: Path) -> list[str]:
    """Commands with options within a text; they need not be whole."""
    return [" ".join(words.split()) for words in INLINE.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))]


def idle(command: Any) -> Any:
    """The same command, which understands everything and does nothing."""
    for inner in getattr(command, "commands", {}).values():
        idle(inner)
    command.callback = lambda **_: None
    return command


def refused(all_words: list[str]) -> dict[str, str]:
    """Those that the command line does not understand, and what it says."""
    command, wrong = idle(typer.main.get_command(app)), {}
    for words in all_words:
        rest = spread(with_port(shlex.split(words)[1:]))
        try:
            command.main(args=rest, prog_name="fedquilt", standalone_mode=False)
        except ClickException as error:
            wrong[words] = error.format_message()
    return wrong


@pytest.mark.parametrize("page", [p for p in PAGES if typed(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_command_understands_what_a_page_has_typed(page: Path) -> None:
    assert refused(typed(page)) == {}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if named(p) and p.name not in OTHERS], ids=lambda p: str(p.relative_to(ROOT))
)
def test_options_that_a_text_names_are_there(page: Path) -> None:
    wrong = refused(named(page))
    assert [told for told in wrong.items() if not told[1].startswith("Missing argument")] == []


def test_what_is_not_there_is_noticed() -> None:
    wrong = ["fedquilt deploy run digits modfl --dri fed", "fedquilt deploy frollow", "fedquilt deploy run -r many"]
    assert list(refused([*wrong, "fedquilt deploy client a b"])) == wrong
