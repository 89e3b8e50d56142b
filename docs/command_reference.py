"""Writes the page on the command from the command itself: `python docs/command_reference.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).with_name("commands.md")
HEAD = """# The command

Every command of `fedquilt` with its options, as `fedquilt COMMAND --help` has them. This page is written from the
command itself (`python docs/command_reference.py`).
"""


def reference() -> str:
    """The page."""
    from fedquilt.cli import app

    parts = [_described(path, command) for path, command in _commands("fedquilt", typer.main.get_command(app))]
    return "\n".join([HEAD, *parts])


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, each in inner.items():
        if not each.hidden:
            yield from _commands(f"{path} {name}", each)


def _described(path: str, command: Any) -> str:
    """A command's words, what it does, and a table of what it takes."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join([path, *(_metavar(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## {path}", "", f"`{usage}`", "", " ".join((command.help or "").split()), ""]
    rows = [(_metavar(each), each) for each in arguments] + [(_words(each), each) for each in options]
    if rows:
        lines += ["| | | default |", "|---|---|---|"]
        lines += [f"| `{words}` | {_safe(each.help or '')} | {_default(each)} |" for words, each in rows]
    return "\n".join([*lines, ""])


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _words(option: Any) -> str:
    """An option as it is written, with what it takes.

    >>> from types import SimpleNamespace
    >>> _words(SimpleNamespace(opts=["--rounds", "-r"], secondary_opts=[], is_flag=False, metavar="N", name="rounds"))
    '--rounds, -r N'
    """
    written = ", ".join([*option.opts, *option.secondary_opts])
    return written if option.is_flag else f"{written} {_metavar(option)}"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.param_type_name == "argument" or value is None or callable(value):
        return ""
    if parameter.is_flag:
        return f"`{parameter.opts[0] if value else parameter.secondary_opts[0]}`" if parameter.secondary_opts else ""
    return f"`{value}`"


def _safe(text: str) -> str:
    """Text inside a table."""
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
