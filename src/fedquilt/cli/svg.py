"""What the terminal shows, as an SVG picture."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

WIDTH = 72


def save(path: Path, title: str, *parts: RenderableType) -> None:
    """Write the parts, one below the other, as a picture that asks nobody for fonts."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    for part in parts:
        console.print(part)
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id="fedquilt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")
