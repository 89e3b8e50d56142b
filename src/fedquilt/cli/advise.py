"""`fedquilt advise SCENARIO`: a short race of a few methods on your clients, and what to make of it.

The race is by seeds: all methods run the first one, and those that are hopeless on validation samples do not run the
others. Runs are kept as those of `compare` are, so the same command after a kill ends the same race.
"""

from __future__ import annotations

import json as json_
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedquilt.cli import options as opt
from fedquilt.cli.compare import AlsoMethods, Jobs, do, wanted, write_list
from fedquilt.cli.comparison import ALONE
from fedquilt.cli.output import Refused, note, out, print_json
from fedquilt.cli.planned_runs import PlannedRun, sweep
from fedquilt.cli.request import Choices

if TYPE_CHECKING:
    from fedquilt.report.advice import Advice
    from fedquilt.report.comparison_data import Group

RACE = ("auto", "fedavg", "fedper", "ditto", "ifca", ALONE)
READOUTS = "received,adapted,vote"
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where the runs are kept; runs/advise-SCENARIO otherwise.")
]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="How many seeds, counted on from --seed.")]


def advise(
    scenario: opt.Scenario,
    named: AlsoMethods = None,
    rounds: opt.Rounds = None,
    seed: opt.Seed = 0,
    seeds: Seeds = 3,
    settings: opt.Settings = None,
    device: opt.Device = "auto",
    engine: opt.Engine = "auto",
    clients_at_once: opt.AtOnce = None,
    to: Out = None,
    jobs: Jobs = None,
    checkpoint_every: opt.Checkpoints = 5,
    json: opt.AsJson = False,
) -> None:
    """Which method to use on these clients: a short race, everything chosen on validation samples.

    For example: fedquilt advise digits. It says what to use, by how much it helps, how sure that is, what it costs, who
    gains and who loses, and what to try next, on the terminal and on a page. Started again after a Ctrl-C or a kill it
    goes on where it was. With --methods others race than auto and a few that are often good; alone always does.
    """
    from fedquilt.report.advice import ADVICE
    from fedquilt.report.advice import advise as advice_of

    if seeds < 1:
        raise Refused(f"--seeds {seeds}: give at least 1")
    if jobs is not None and jobs < 1:
        raise Refused(f"--jobs {jobs}: give at least 1")
    opt.check_checkpoints(checkpoint_every)
    words = [word.strip() for word in (named or "").split(",") if word.strip()]
    methods = wanted(words) or list(RACE)
    choices = Choices(
        rounds, settings or (), READOUTS, "mean", device, engine, clients_at_once, 5, range(seed, seed + seeds)
    )
    todo = sweep(scenario, [*methods, *([ALONE] if ALONE not in methods else [])], choices, ())
    folder = to or Path("runs") / f"advise-{Path(scenario.partition(':')[0]).stem}"
    race, stopped = run_race(todo, folder, jobs, checkpoint_every)
    also = "" if rounds is None else f" --rounds {rounds}"
    also += f" --set {shlex.join(settings)}" if settings else ""
    advice = advice_of(grouped(race, folder), scenario, stopped, seeds, also)
    (folder / ADVICE).write_text(json_.dumps(advice.plain(), indent=1) + "\n", encoding="utf-8")
    if json:
        print_json(advice.plain() | {"folder": str(folder)})
        return
    show(advice)
    page(folder)


def run_race(
    todo: Sequence[PlannedRun], folder: Path, jobs: int | None, checkpoint_every: int
) -> tuple[list[PlannedRun], dict[str, float]]:
    """All methods on the first seed, then those that are not hopeless on the others; the runs, and who was stopped."""
    from fedquilt.report.advice import hopeless

    first = [job for job in todo if job.seed == todo[0].seed]
    refused = do(first, folder, jobs, checkpoint_every, None, forgiving=True)
    for name, reason in refused.items():
        note(f"left out is {name}: {reason.rstrip('.')}")
    first = [job for job in first if job.name not in refused]
    if ALONE in refused or len(first) < 2:
        raise Refused("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    check_validated(first, folder)
    stopped = hopeless(grouped(first, folder))
    out_of_race = {*refused, *stopped}
    rest = [job for job in todo if job.name not in out_of_race]
    do(rest, folder, jobs, checkpoint_every, None)
    write_list(folder, [*rest, *(job for job in first if job.name in stopped)])
    return rest, stopped


def check_validated(race: Sequence[PlannedRun], folder: Path) -> None:
    """Refuse clients of whom nobody has samples to choose by."""
    import numpy as np

    (group,) = grouped(race[:1], folder)
    scores = [s.score for (_, split), s in group.runs[0].series.items() if split == "validation"]
    if not any(np.isfinite(each).any() for each in scores):
        raise Refused("advice is chosen on validation samples, and no client has any; put some of its samples aside")


def grouped(race: Sequence[PlannedRun], folder: Path) -> list[Group]:
    """The runs of a race, by method."""
    from fedquilt.report.comparison_data import Group
    from fedquilt.report.read_runs import read_run

    found: dict[str, Group] = {}
    for job in race:
        found.setdefault(job.name, Group(job.name)).runs.append(read_run(folder / job.folder))
    return list(found.values())


def show(advice: Advice) -> None:
    """The advice on the terminal."""
    first, *others = advice.sentences
    out.print(Text(first, style="bold"))
    for sentence in others:
        out.print(Text(f"• {sentence}"))
    out.print("\n[bold]What to try next.[/bold]")
    for command in advice.next:
        out.print(Text(f"  {command}"), soft_wrap=True)


def page(folder: Path) -> None:
    """The same on a page, with all curves, clients and quilts, where it can be drawn."""
    try:
        from fedquilt.report import write_page

        path = write_page([folder], folder / "advice.html", reference=ALONE)
    except ImportError as error:
        note(f"no page: {error}")
        return
    note(f"The page is {path}; its runs are kept beside it")
