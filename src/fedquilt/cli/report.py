"""`fedquilt report DIR...`: one self-contained page about runs, or their comparison as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedquilt.cli.comparison import check_form, show
from fedquilt.cli.output import Refused, note, out

if TYPE_CHECKING:
    from fedquilt.report.compare import Comparison

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of runs or comparisons.")]
Page = Annotated[Path | None, typer.Option("--out", "-o", help="The page, or the table's file; report.html otherwise.")]
Format = Annotated[
    str | None, typer.Option("--format", help="A table instead of the page: text, csv, latex or markdown.")
]


def report(
    folders: Folders,
    to: Page = None,
    form: Format = None,
    title: Annotated[str | None, typer.Option("--title", help="The page's title.")] = None,
    reference: Annotated[str | None, typer.Option("--reference", help="The method every other is set against.")] = None,
    target: Annotated[float | None, typer.Option("--target", help="Rounds and megabytes to this score.")] = None,
) -> None:
    """Write one self-contained HTML page about runs, which no network is needed to open; or print their comparison."""
    folders = [path for path in folders if not path.is_file()] or folders  # `runs/*` may name files beside runs
    if form is not None:
        check_form(form)
        tables(folders, form, to, reference, target)
        return
    try:
        from fedquilt.report import write_page
    except ModuleNotFoundError as error:
        raise Refused(f"the page needs '{error.name}': pip install 'fedquilt[report]'") from error
    path = write_page(folders, to or Path("report.html"), title=title, reference=reference, target=target)
    out.print(Text(f"{path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser"), soft_wrap=True)


def tables(folders: list[Path], form: str, to: Path | None, reference: str | None, target: float | None) -> None:
    """The comparison of every scenario, printed or written to a file."""
    from fedquilt.report.tables import FORMATS

    if to is not None and form == "text":
        raise Refused("--format text is for the terminal; write csv, latex or markdown to a file")
    found = comparisons(folders, reference, target)
    if to is not None:
        to.write_text("\n".join(FORMATS[form](table) for table in found.values()), encoding="utf-8")
        return
    for name, table in found.items():
        if len(found) > 1 and form == "text":
            out.print(Text(f"\n{name}", style="bold"))
        show(table, form)


def comparisons(folders: list[Path], reference: str | None, target: float | None) -> dict[str, Comparison]:
    """The comparison of the methods of each scenario that the runs are of; what is still going on is left out."""
    from fedquilt.report.comparison_data import compared, measured
    from fedquilt.report.page_content import grouped
    from fedquilt.report.read_runs import read_run, run_folders

    paths = [path for folder in folders for path in run_folders(folder)]
    over = [path for path in paths if (path / "summary.json").is_file()]
    if over and len(over) < len(paths):
        note(f"left out, since they are not finished: {len(paths) - len(over)} of {len(paths)} runs")
    runs = [read_run(path) for path in over or paths]
    found = {}
    for name in dict.fromkeys(run.scenario for run in runs):
        table = compared(measured(grouped([run for run in runs if run.scenario == name])), reference, target)
        if table is not None:
            found[name] = table
    if not found:
        raise Refused("nothing is measured in these runs yet; let a round end first")
    return found
