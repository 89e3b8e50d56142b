"""What is put in place when the site is built: the changelog, which is a file of the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """The text of a page; that of the changelog with addresses as they are from the site."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
