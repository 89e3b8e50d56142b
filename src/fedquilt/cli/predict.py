"""`fedquilt predict DIR new.csv`: what the personal models of a run say of new rows of its table."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer

from fedquilt.cli import options as opt
from fedquilt.cli.output import Refused, out, print_json

Client = Annotated[
    str | None, typer.Option("--client", metavar="NAME", help="One client, whose model answers for all rows.")
]
Column = Annotated[
    str | None, typer.Option("--client-column", metavar="COLUMN", help="Whose each row is; else as in the run.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The answers as csv; ROWS-predicted.csv otherwise.")]


def predict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run of a table that is finished.")],
    rows: Annotated[Path, typer.Argument(metavar="ROWS.csv", help="New rows, with the columns of that table.")],
    client: Client = None,
    column: Column = None,
    to: Out = None,
    trust: opt.Trust = False,
    json: opt.AsJson = False,
) -> None:
    """Let each client's personal model answer for new rows of the table that the run was run on.

    Values are filled and scaled as the client's own training samples were, and what is predicted is written beside the
    rows. For example: fedquilt predict runs/first new_visits.csv
    """
    from fedquilt.data.tables import rows_of
    from fedquilt.runs.predicting import predict_rows

    if rows.suffix.lower() != ".csv":
        raise Refused(f"'{rows}' is no csv file; save the rows as one")
    answers = predict_rows(folder, rows, client, column=column, trust=trust)
    if json:
        print_json(answers)
        return
    place = to or rows.with_name(f"{rows.stem}-predicted.csv")
    _, ((_, head), *lines) = rows_of(rows)
    keys = [key for key in answers[0] if key != "client" or client is not None]
    with place.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*head, *keys])
        table.writerows(
            [*line, *(_text(said[key]) for key in keys)] for (_, line), said in zip(lines, answers, strict=True)
        )
    told = "1 row" if len(answers) == 1 else f"{len(answers)} rows"
    out.print(
        f"{told} answered by the models of {len({said['client'] for said in answers})} clients, in {place}",
        soft_wrap=True,
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
