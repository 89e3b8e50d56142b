"""`fedquilt onboard DIR client.npz`: a client that was not there joins a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedquilt.cli import options as opt
from fedquilt.cli.output import Refused, out, print_json, say

if TYPE_CHECKING:
    from fedquilt.runs.onboarding import Onboarded

Data = Annotated[
    Path,
    typer.Argument(metavar="CLIENT.npz", help="Its data: x_train, y_train, x_test, y_test, ...; or x, y."),
]
Traits = Annotated[
    list[str] | None, typer.Option("--traits", metavar="KEY=VALUE...", help="What it declares, as the others do.")
]


def onboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run.")],
    client: Data,
    traits: Traits = None,
    visits: Annotated[int, typer.Option("--visits", metavar="N", help="Rounds it takes part in, unheard.")] = 5,
    fine_tune: Annotated[int, typer.Option("--fine-tune", metavar="N", help="Further rounds by itself.")] = 0,
    to: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where its model is kept; DIR/onboarded/CLIENT otherwise.")
    ] = None,
    trust: opt.Trust = False,
    json: opt.AsJson = False,
) -> None:
    """A client that was not there joins a finished run: its circles, a personal model, and whether that was worth it.

    For example: fedquilt onboard runs/modfl watch-9.npz --traits device=gen1 cohort=north --fine-tune 2
    """
    from fedquilt.runs.onboarding import onboard as join

    joined = join(folder, client, traits=declared(traits or []), visits=visits, fine_tune=fine_tune, trust=trust)
    place = joined.save(to or folder / "onboarded" / joined.name)
    if json:
        facts = {"client": joined.name, "better": joined.better, "gain": joined.gain, "personal": joined.personal}
        print_json({**facts, "scores": joined.scores, "circles": joined.circles, "folder": str(place)})
        return
    show(joined)
    out.print(f"\nIts model is in {place}", style="dim", soft_wrap=True)


def declared(words: list[str]) -> dict[str, str]:
    """Traits as they are written.

    >>> declared(["device=gen1", "cohort=north"])
    {'device': 'gen1', 'cohort': 'north'}
    """
    pairs = [word.partition("=") for word in words]
    for word, (key, equals, value) in zip(words, pairs, strict=True):
        if not (key and equals and value):
            raise Refused(f"'{word}' is not a trait; write key=value, as in --traits device=gen1")
    return {key: value for key, _, value in pairs}


def show(joined: Onboarded) -> None:
    """Its circles and its scores, for people."""
    out.print(Text(f"The circles of {joined.name}", style="bold"))
    circles = Table(box=None, pad_edge=False, header_style="dim")
    circles.add_column("unit", no_wrap=True)
    circles.add_column("shared with")
    for unit, peers in joined.circles.items():
        more = f" and {len(peers) - 6} others" if len(peers) > 6 else ""
        circles.add_row(Text(unit), Text(", ".join(peers[:6]) + more if peers else "nobody"))
    out.print(circles)
    scores = Table(box=None, pad_edge=False, header_style="bold")
    metric = joined.metric
    for heading in (metric.heading, "validation", "test"):
        scores.add_column(heading, justify="left" if heading == metric.heading else "right")
    for name, by_split in joined.scores.items():
        known = [by_split[split] if by_split[split] == by_split[split] else None for split in ("validation", "test")]
        style = "bold" if name == joined.personal else ""
        scores.add_row(Text(name), *(Text(metric.show(value)) for value in known), style=style)
    out.print()
    out.print(scores)
    word = "better than" if joined.gain > 0 else "as good as" if joined.gain == 0 else "worse than"
    gain = f"{metric.show(joined.gain, sign=True)}{' points' if metric.percent else ''}"
    told = f"{gain} on its test data, after {joined.rounds} rounds of its own"
    out.print()
    say(f"Joining is {word} staying alone: {told} ({joined.rounds_alone} alone).")
