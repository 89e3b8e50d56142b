"""Text as spreadsheets, LaTeX and Markdown print it: names of methods and clients are anybody's."""

from __future__ import annotations

import re


def spreadsheet_safe(text: str) -> str:
    """A name that a spreadsheet will not run as a formula.

    >>> spreadsheet_safe("=1+1"), spreadsheet_safe("phone-3")
    ("'=1+1", 'phone-3')
    """
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def latex_escape(text: str) -> str:
    r"""Text as LaTeX prints it.

    >>> print(latex_escape("a_b & 5 % ± ▲"))
    a\_b \& 5 \% $\pm$ $\blacktriangle$
    """
    signs = {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--",
        "▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "<": r"\textless{}", ">": r"\textgreater{}",
        **{c: "\\" + c for c in "&%$#_{}"},
    }  # fmt: skip
    return "".join(signs.get(c, c) for c in one_line(text))


def markdown_escape(text: str) -> str:
    """Text as Markdown prints it, inside a table too.

    >>> print(markdown_escape("a|b *c* <script>"))
    a\\|b \\*c\\* &lt;script&gt;
    """
    text = re.sub(r"([\\`*_\[\]|~#])", r"\\\1", one_line(text))
    return text.replace("<", "&lt;").replace(">", "&gt;")


def one_line(text: str) -> str:
    """Text without line breaks, which would end a table's row.

    >>> one_line("a\\n b")
    'a b'
    """
    return " ".join(text.split())
