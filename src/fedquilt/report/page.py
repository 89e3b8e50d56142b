"""The page: one HTML file with everything in it, to look at, print or send.

>>> import tempfile, pathlib
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> row = '{"round": 1, "client": "a", "readout": "received", "split": "test", "accuracy": 0.5}'
>>> _ = (folder / "metrics.jsonl").write_text(row)
>>> write_page([folder], folder / "report.html").stat().st_size > 1_000_000    # plotly.js is inside
True
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fedquilt._util.files import write_text
from fedquilt._util.wording import finite
from fedquilt.report.page_content import page_data

SCRIPTS = ("core.js", "figure.js", "curves.js", "clients.js", "client.js", "quilt.js", "paths.js", "main.js")


def write_page(
    run_dirs: Iterable[str | Path],
    out: str | Path,
    *,
    title: str | None = None,
    reference: str | None = None,
    target: float | None = None,
) -> Path:
    """Write one self-contained HTML file about these run directories, and return its path.

    `reference` is the method the others are set against (default: "fedavg", else "local", else the first), `target` the
    score that rounds and megabytes are counted to (default: 95 % of the best method's).
    """
    text = render_page(page_data(run_dirs, title=title, reference=reference, target=target))
    path = Path(out)
    if path.is_dir():
        path = path / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)  # a reader never sees half a page
    return path


def render_page(data: Mapping[str, Any], *, every: float = 0) -> str:
    """The page as text, from `page_data`.

    With `every` > 0 it asks its own server for `data.json` (see `data_json`) every so many seconds: for watching a run.
    """
    parts = {
        "title": html.escape(str(data.get("title", "report"))),
        "connect": "'self'" if every > 0 else "'none'",
        "style": _asset("page.css"),
        "data": data_json(data),
        "plotly": _plotly(),
        "script": '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();",
        "every": f"{every:g}",
    }
    parts["script"] = parts["script"].replace("@@every@@", parts["every"])
    # One pass: what is put in is not searched again, so a name cannot smuggle in another part.
    return re.sub(r"@@(\w+)@@", lambda match: parts[match.group(1)], _asset("page.html"))


def data_json(data: Mapping[str, Any]) -> str:
    """The data as JSON that is safe inside a script element.

    >>> data_json({"client": "</script>"})
    '{"client":"\\\\u003c/script>"}'
    """
    text = json.dumps(finite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _asset(name: str) -> str:
    return resources.files("fedquilt.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ImportError(
            "the page is drawn with plotly, which is not installed: install it with pip install 'fedquilt[report]'"
        ) from None
    return str(get_plotlyjs())
