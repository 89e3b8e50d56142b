"""Sentences as a terminal shows them; with next to nothing imported, as what stays on a device for months needs it."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import TextIO


def for_terminal(sentence: str, stream: TextIO) -> str:
    """A sentence for a stream: in lines on a terminal, as one elsewhere, for whoever reads it by program."""
    return in_lines(sentence, shutil.get_terminal_size().columns) if stream.isatty() else sentence


def in_lines(sentence: str, width: int) -> str:
    """A sentence in lines; words stay whole, and so does a command at its end, which somebody may copy.

    >>> print(in_lines("the run is kept; look at it with: fedquilt report runs/x", 27))
    the run is kept; look at it
    with:
    fedquilt report runs/x
    """
    whole = re.sub(r"(?<=: )fedquilt .*$", lambda found: found.group().replace(" ", "\0"), sentence)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")
