"""What the command line says: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from fedquilt._util.lines import in_lines
from fedquilt._util.wording import finite

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def working(on: str) -> Iterator[None]:
    """Say on a terminal what is being done while nothing can be shown yet."""
    if not err.is_terminal:
        yield
        return
    with err.status(on):
        yield


class Refused(ValueError):
    """Something the user asked for that cannot be done, as a sentence."""


def complain(sentence: str) -> None:
    """One red sentence."""
    say(sentence, err, "red")


def note(sentence: str) -> None:
    """Something worth knowing, on standard error."""
    say(sentence, err, "yellow")


def say(sentence: str, console: Console = out, style: str = "") -> None:
    """A sentence: on a terminal in lines that end between words, elsewhere as one, for whoever reads it by program."""
    told = sentence.strip()
    if console.is_terminal:
        told = "\n".join(in_lines(line, console.width) for line in told.splitlines())
    console.print(Text(told, style=style), soft_wrap=True)


def mention(sentence: str) -> None:
    """Something that is as it should be, on standard error."""
    err.print(Text(sentence.strip(), style="dim"), soft_wrap=True)


def say_warnings() -> None:
    """Warnings as sentences, each once, instead of source lines."""
    warnings.showwarning = lambda message, *_, **__: note(str(message))
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)


def print_json(value: Any) -> None:
    """One line of JSON on standard output; what is not a number is null."""
    print(json.dumps(finite(value), allow_nan=False))
