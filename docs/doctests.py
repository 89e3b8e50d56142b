"""Sets the examples of docstrings as code on the reference page.

In Markdown a line that begins with `>>>` is a quotation of a quotation of a quotation, and its lines run together. Our
docstrings hold plain doctests, without a heading that would tell them apart, so each is fenced before it is rendered.
"""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """The same text with a fence around each doctest; one ends at an empty line.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2\\n\\nMore.").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'More.']
    """
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if not inside and line.startswith(">>> "):
            inside = True
            lines.append("```pycon")
        elif inside and not line:
            inside = False
            lines.append("```")
        lines.append(line)
    return "\n".join(lines[:-1])


class Doctests(griffe.Extension):
    """Fences the doctests of every object that is documented."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
