"""`fedquilt data list` and `fedquilt data get NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedquilt._util.suggest import did_you_mean
from fedquilt.cli import options as opt
from fedquilt.cli.output import Refused, out, print_json, say

app = typer.Typer(no_args_is_help=True, help="Data sets: what is here, and fetching what is not.")
Folder = Annotated[
    Path | None, typer.Option("--data-dir", help="Where caches lie; else FEDQUILT_DATA or the user's cache folder.")
]


def size(count: int | None) -> str:
    """Bytes for people.

    >>> size(178123456), size(None)
    ('178.1 MB', '')
    """
    return "" if count is None else f"{count / 1e6:.1f} MB"


@app.command("list")
def list_data(data_dir: Folder = None, json: opt.AsJson = False) -> None:
    """Which data sets are present, where, and how large."""
    from fedquilt.data import available, data_folder

    found = available(data_dir)
    if json:
        print_json([{**vars(row), "path": None if row.path is None else str(row.path)} for row in found])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("data set", no_wrap=True)
    table.add_column("here")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what")
    for row in found:
        here = "bundled" if row.path is None else "yes" if row.present else "no"
        table.add_row(Text(row.name), here, size(row.size), Text(row.title), style="" if row.present else "dim")
    out.print(table)
    out.print()
    say(f"Caches lie in {data_folder(data_dir)}; `fedquilt data get NAME` fetches one.")


@app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set (`fedquilt data list`).")],
    data_dir: Folder = None,
    again: Annotated[bool, typer.Option("--again", help="Make the cache anew from the official archive.")] = False,
) -> None:
    """Fetch a data set from its official source, check it, and cache it."""
    from fedquilt.data import SOURCES, get

    if name not in SOURCES:
        raise Refused(did_you_mean(name, SOURCES, "data set"))
    row = get(name, data_dir, again=again)
    where = "comes with scikit-learn; nothing to fetch" if row.path is None else f"is in {row.path} ({size(row.size)})"
    out.print(Text(f"{row.name} {where}"), soft_wrap=True)
