"""`fedquilt report DIR...`: one self-contained page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedquilt.cli.speak import Refused, out

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of runs.")]


def report(
    folders: Folders,
    to: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option("--title", help="The page's title.")] = None,
    reference: Annotated[str | None, typer.Option("--reference", help="The method every other is set against.")] = None,
    target: Annotated[float | None, typer.Option("--target", help="Rounds and megabytes to this accuracy.")] = None,
) -> None:
    """Write one self-contained HTML page about runs; no network is needed to open it."""
    for folder in folders:
        if not (folder / "run.toml").is_file():
            raise Refused(f"'{folder}' is not the directory of a run: it has no run.toml")
    try:
        from fedquilt.report import write_page
    except ModuleNotFoundError as error:
        raise Refused(f"the page needs '{error.name}': pip install 'fedquilt[report]'") from error
    path = write_page(folders, to, title=title, reference=reference, target=target)
    out.print(Text(f"{path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser"), soft_wrap=True)
