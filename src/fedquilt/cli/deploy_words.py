"""What the commands of `fedquilt deploy` share: how they speak, begin and end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedquilt._util.lines import for_terminal

Where = Annotated[Path, typer.Option("--dir", "-d", metavar="DIR", help="The federation's folder.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE...", help="Settings, as in a run.")]


def say(line: str) -> None:
    """A line that is there at once, also in a log; on a terminal that is narrower it ends between words."""
    print(for_terminal(line, sys.stdout), flush=True)


def warn(sentence: str | None) -> None:
    """Prints a warning, if there is one."""
    if sentence:
        from fedquilt.cli.output import note

        note(f"WARNING: {sentence}")


@contextmanager
def flower() -> Iterator[None]:
    """Says how to get Flower where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flwr", "cryptography", "httpx"):
            raise
        raise ModuleNotFoundError("fedquilt deploy needs Flower; get it with: pip install 'fedquilt[deploy]'") from None


@contextmanager
def until_ended() -> Iterator[None]:
    """Lets Ctrl-C and a request to terminate end the command and its processes; either is a good end."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        say("ended")
    finally:
        signal.signal(signal.SIGTERM, before)
