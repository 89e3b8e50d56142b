"""`fedquilt export DIR`: the personal models of a run, a folder for each client with a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedquilt.cli import options as opt
from fedquilt.cli.output import err, say

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Where the folders go; DIR/export otherwise.")]
Clients = Annotated[
    list[str] | None,
    typer.Option("--client", metavar="NAME", help="One client, or several with more of these; or all."),
]
Formats = Annotated[
    str,
    typer.Option(
        "--formats", metavar="NAME,...", help="safetensors, pt2 (torch.export), onnx (with the extra export)."
    ),
]


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run that is finished.")],
    to: Out = None,
    clients: Clients = None,
    formats: Formats = "safetensors,pt2",
    trust: opt.Trust = False,
) -> None:
    """Write the personal models of a finished run: a folder for each client, with its model and a card.

    The card says what the model was trained on, with whom it shared, and how good it is.
    """
    from fedquilt.runs.export import export as write

    words = [word.strip() for word in formats.split(",") if word.strip()]
    place = folder / "export" if to is None else to
    with err.status("exporting") as status:
        made = write(folder, place, clients, words, trust=trust, tell=lambda name: status.update(f"exported {name}"))
    many = "model" if len(made) == 1 else "models"
    say(f"{len(made)} {many} in {place}; start with {made[0] / 'card.md'}")
