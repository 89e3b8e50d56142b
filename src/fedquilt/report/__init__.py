"""Reading finished runs: statistics, tables and the page.

Names are imported on first use, since scipy's statistics take longer to import than the rest of the library. The
function that compares has its module's name, so it is found there.

>>> from fedquilt.report import as_markdown
>>> from fedquilt.report.compare import compare
>>> print(as_markdown(compare({"local": [[0.5], [0.5]]})).splitlines()[2])
| **local** | **50.0** | 50.0 to 50.0 | 50.0 |
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedquilt.report.compare import Comparison, Curve, pair_up
    from fedquilt.report.page import data_json, render_page, write_page
    from fedquilt.report.page_content import page_data
    from fedquilt.report.read_runs import read_run, run_folders
    from fedquilt.report.tables import FORMATS, as_csv, as_latex, as_markdown, as_text

__all__ = [
    "FORMATS", "Comparison", "Curve", "as_csv", "as_latex", "as_markdown", "as_text", "data_json", "page_data",
    "pair_up", "read_run", "render_page", "run_folders", "write_page",
]  # fmt: skip

_HOMES = {
    "compare": ("Comparison", "Curve", "pair_up"),
    "page_content": ("page_data",),
    "read_runs": ("read_run", "run_folders"),
    "page": ("data_json", "render_page", "write_page"),
    "tables": ("FORMATS", "as_csv", "as_latex", "as_markdown", "as_text"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
