"""`fedquilt demo`: five methods side by side on handwritten digits, and a plan to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from fedquilt.cli import options as opt
from fedquilt.cli.output import note, out, print_json
from fedquilt.cli.progress import Outcome, ProgressBoard, Stopped
from fedquilt.cli.request import Choices, take_request
from fedquilt.cli.svg import save
from fedquilt.cli.tables import summary_table, what_it_says

METHODS = ("local", "fedavg", "fedper", "modfl", "auto")
EXPLAINED = (
    "[bold]What you are looking at.[/bold] 24 clients read handwritten digits. Half of them (gen2) see 8 x 8 pixels, "
    "half (gen1) only 4 x 4; each of four cohorts knows 6 of the 10 digits; a client has about 37 samples. "
    "The table sets four federations against the same clients training alone (local). In a quilt a row is a client, a "
    "column a unit of its model, and patches that look alike are shared. The first is ModFL's plan, as sensors and "
    "cohorts were declared: the unit that looks at pixels is shared among clients with the same sensor, the unit that "
    "names digits among clients of the same cohort. The second is what auto found while it trained, with nothing "
    "declared, layer by layer; the sentences below it say why."
)
CAUTION = (
    "It is a demonstration with one seed, on a federation made so that sharing by sensor and cohort has a reason to "
    "help: no evidence for one method over another. `fedquilt compare` with several seeds says which differences are "
    "real."
)
NEXT = (
    ("fedquilt advise digits", "which method to use, and how sure that is"),
    ("fedquilt run digits auto --set renamed=2", "cohorts that disagree about names"),
    ("fedquilt compare digits fedavg modfl --seeds 3", "is the difference real?"),
    ("fedquilt run examples/own_clients.py auto", "clients of your own"),
    ("fedquilt list methods", "or scenarios, models, readouts, data"),
)


Picture = Annotated[Path | None, typer.Option("--picture", help="Also save the table and the quilt as this SVG file.")]


def demo(
    rounds: opt.Rounds = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    engine: opt.Engine = "vectorised",
    picture: Picture = None,
    json: opt.AsJson = False,
) -> None:
    """Five methods side by side on handwritten digits, in about a minute, and the quilts of who shares what."""
    choices = Choices(rounds, device=device, engine=engine, evaluate_every=2, seeds=(seed,))
    order = take_request("digits", METHODS, choices)
    scenario = order.scenario(seed)
    outcomes: list[Outcome] = []
    with ProgressBoard() as board:
        for method in order.methods:
            try:
                outcome = board.run(order, scenario, method, seed, method.name, readouts=("received",))
            except Stopped:
                if not outcomes:
                    raise
                break
            outcome.run.alone = outcomes[0].run if outcomes else None
            outcomes.append(outcome)
            if not outcome.finished:
                break
    stopped = len(outcomes) < len(METHODS) or not outcomes[-1].finished
    if json:
        print_json({"finished": not stopped, "summaries": [outcome.summary for outcome in outcomes]})
        return
    show(outcomes, stopped)
    if stopped:
        raise typer.Exit(130)
    if picture is not None:
        table = summary_table([outcome.summary for outcome in outcomes])
        save(picture, "fedquilt demo", table, *quilts(outcomes))


def quilts(outcomes: list[Outcome]) -> list[RenderableType]:
    """Who shares what: as it was planted, and as auto found it, with what auto says about it."""
    from fedquilt.report.quilt import Quilt

    found: list[RenderableType] = []
    for outcome, title in zip(
        outcomes[-2:], ("Planted and declared: modfl", "Found, nothing declared: auto"), strict=True
    ):
        names = [client.name for client in outcome.run.federation.scenario.clients]
        found += ["", Text(title, style="bold"), Quilt(outcome.run.plan, names)]
    changes = outcomes[-1].summary.get("changes", [])
    return [*found, *(Text(f"• {sentence.partition('; rejected')[0]}", style="dim") for sentence in changes)]


def show(outcomes: list[Outcome], stopped: bool) -> None:
    """The table, and of a demo that went to its end also the quilt and what to make of both."""
    if stopped:
        note("stopped; this is what was reached")
    shown = [outcome.summary for outcome in outcomes]
    out.print(summary_table(shown))
    out.print()
    out.print(what_it_says(shown[0]), style="dim")
    if stopped:
        return
    for drawn in quilts(outcomes):
        out.print(drawn)
    out.print()
    out.print(EXPLAINED, width=min(out.width, 100))
    out.print(CAUTION, width=min(out.width, 100))
    out.print("\n[bold]What to try next.[/bold]")
    for command, why in NEXT:
        out.print(f"  {command:<48} [dim]{why}[/dim]", soft_wrap=True)
