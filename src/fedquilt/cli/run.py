"""`fedquilt run SCENARIO METHOD`, `fedquilt run config.toml`, and `resume DIR` and `extend DIR` to go on with one."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt._util.suggest import did_you_mean
from fedquilt.cli import options as opt
from fedquilt.cli.config import ENDINGS, Config, read_config
from fedquilt.cli.output import Refused, mention, note, out, print_json, say, working
from fedquilt.cli.progress import Outcome, ProgressBoard
from fedquilt.cli.ranks import Ranks, launch, needs_launch, ranks_joined
from fedquilt.cli.request import Choices, take_request
from fedquilt.cli.tables import in_full, summary_table, what_it_says
from fedquilt.cli.watch import watched

if TYPE_CHECKING:
    from fedquilt.core.federation import Callback

Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where the run is kept; runs/SCENARIO-METHOD-TIME otherwise.")
]
Keep = Annotated[bool, typer.Option("--keep/--no-keep", help="Keep the run on disk as it goes.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Also log to tensorboard (inside the run's directory) or mlflow."),
]
Quilted = Annotated[bool, typer.Option("--quilt", help="Draw the last plan: a row a client, a patch a circle.")]


def run(
    context: typer.Context,
    scenario: opt.ScenarioOrConfig,
    method: opt.MethodName = None,
    rounds: opt.Rounds = None,
    seed: opt.Seed = 0,
    settings: opt.Settings = None,
    readouts: opt.Readouts = None,
    merge: opt.Merge = "mean",
    attack: opt.Attack = None,
    liars: opt.Liars = None,
    secure_sums: opt.SecureSums = False,
    device: opt.Device = "auto",
    engine: opt.Engine = "auto",
    clients_at_once: opt.AtOnce = None,
    threads: opt.Threads = None,
    evaluate_every: opt.Every = 1,
    everyone: opt.Everyone = False,
    unseen: opt.Unseen = 0,
    alone: opt.Alone = True,
    out_dir: Out = None,
    keep: Keep = True,
    checkpoint_every: opt.Checkpoints = 5,
    watch: opt.Watch = None,
    track: Track = None,
    ranks: Ranks = None,
    quilt: Quilted = False,
    trust: opt.Trust = False,
    json: opt.AsJson = False,
) -> None:
    """Run a method on a scenario and say what came of it.

    For example: fedquilt run digits fedprox --rounds 10 --set clients=16 mu=0.1. With the .toml of a run in the place
    of both, fedquilt run runs/first/run.toml, that run is repeated, with what else is said here on top.
    """
    if needs_launch(ranks):
        raise typer.Exit(launch(int(ranks or 1), context.obj))
    at: dict[str, Any] = dict(context.params)
    config = config_for(scenario, method, trust) if scenario.endswith(ENDINGS) else None
    if config is None and method is None:
        raise Refused(f"name the method to run on '{scenario}' (fedquilt list methods)")
    said = _said(context)
    at |= {} if config is None else {key: value for key, value in config.options.items() if key not in said}
    choices = Choices(
        at["rounds"], opt.lying(settings, at["attack"], liars), readouts, at["merge"], at["device"], at["engine"],
        at["clients_at_once"],
        at["evaluate_every"], (at["seed"],), at["attack"], secure_sums, at["threads"], at["everyone"],
        at["unseen"],
    )  # fmt: skip
    with working("importing PyTorch ..."):
        order = take_request(scenario, [str(method)], choices) if config is None else config.request(choices)
    opt.check_checkpoints(at["checkpoint_every"])
    built_with = config.scenario_seed if config is not None and "seed" not in said else None
    with working(f"building the clients of {scenario} ..."):
        made, name = order.scenario(at["seed"] if built_with is None else built_with), order.methods[0].name
    if "data" in made.origin:  # a table of the user's own: was it read as it is meant?
        mention(str(made))
    if config is not None and built_with is not None and config.changed(order, made):
        note(f"the samples are not those that {scenario} was run on, so numbers will differ")
    with ranks_joined() as here:
        folder = here.same(at["out_dir"] or fresh_folder(made.name, name)) if keep else None
        more = trackers(track if here.first else None, folder, f"{made.name} {name} seed {at['seed']}")
        kept: dict[str, Any] = {"alone": at["alone"], "out": folder, "checkpoint_every": at["checkpoint_every"]}
        with watched(watch if here.first else None, folder), ProgressBoard() as board:
            outcome = board.run(order, made, order.methods[0], at["seed"], name, also=more, **kept)
    if here.first:
        tell(outcome, folder, quilt, json)


def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run that was interrupted.")],
    watch: opt.Watch = None,
    ranks: Ranks = None,
    quilt: Quilted = False,
    trust: opt.Trust = False,
    json: opt.AsJson = False,
) -> None:
    """Go on with a run that was interrupted, to the same bits as if it had not been."""
    from fedquilt.runs.folder import RunFolder
    from fedquilt.runs.run import resume as go_on

    if needs_launch(ranks):
        raise typer.Exit(launch(int(ranks or 1), context.obj))
    known = RunFolder(folder).read_settings()
    rounds, name = known["training"]["rounds"], known["method"]["name"]
    with ranks_joined() as here, watched(watch if here.first else None, folder), ProgressBoard() as board:
        outcome = board.resume(name, rounds, lambda callbacks: go_on(folder, callbacks=callbacks, trust=trust))
    if here.first:
        tell(outcome, folder, quilt, json)


def extend(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run that is finished.")],
    rounds: Annotated[int, typer.Option("--rounds", "-r", metavar="N", help="How many rounds it shall have in all.")],
    watch: opt.Watch = None,
    quilt: Quilted = False,
    trust: opt.Trust = False,
    json: opt.AsJson = False,
) -> None:
    """Go on with a finished run until it has N rounds in all, to the same bits as if it had been so long at once.

    Where a method, the learning rate or the scenario depends on how many rounds there are, that is said.
    """
    from fedquilt.runs.folder import RunFolder
    from fedquilt.runs.run import extend as go_on

    known = RunFolder(folder).read_settings()
    with watched(watch, folder), ProgressBoard() as board:
        name = known["method"]["name"]
        outcome = board.resume(name, rounds, lambda callbacks: go_on(folder, rounds, callbacks=callbacks, trust=trust))
    tell(outcome, folder, quilt, json)


def config_for(path: str, method: str | None, trust: bool) -> Config:
    """The configuration in a file, which names its method itself."""
    if method is not None:
        raise Refused(f"{path} says which method it runs; leave '{method}' out, or name a scenario")
    return read_config(Path(path), trust)


def _said(context: typer.Context) -> set[str]:
    """The options that were said on the command line, not those that have their defaults."""
    sources = {key: context.get_parameter_source(key) for key in context.params}
    return {key for key, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def trackers(names: list[str] | None, folder: Path | None, title: str) -> list[Callback]:
    """The loggers of these names."""
    from fedquilt.runs.trackers import TRACKERS, mlflow, tensorboard

    for name in names or ():
        if name not in TRACKERS:
            raise Refused(did_you_mean(name, TRACKERS, "tracker"))
    made: list[Callback] = []
    if "tensorboard" in (names or ()):
        made.append(tensorboard((folder or Path("runs")) / "tensorboard"))
    if "mlflow" in (names or ()):
        made.append(mlflow(title))
    return made


def fresh_folder(scenario: str, method: str) -> Path:
    """A folder for a run that is not there yet."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in scenario)
    first = Path("runs") / f"{plain}-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], others) if not path.exists())


def tell(outcome: Outcome, folder: Path | None, quilt: bool, json: bool) -> None:
    """What came of a run, for people or machines, and how to go on with one that was stopped."""
    if json:
        print_json({**as_json(outcome), "folder": None if folder is None else str(folder)})
    else:
        show(outcome, quilt)
    if not outcome.finished and folder is not None:
        note(f"stopped; this is what was reached. Go on with: fedquilt resume {folder}")
    elif not outcome.finished:
        note("stopped; this is what was reached")
    elif folder is not None and not json:
        out.print()
        say(f"Kept in {folder}; look at it with: fedquilt report {folder}", style="dim")
    if not outcome.finished:
        raise typer.Exit(130)


def show(outcome: Outcome, quilt: bool) -> None:
    """The summary and the plan, for people."""
    from fedquilt.report.quilt import Quilt
    from fedquilt.runs.alarms import in_short
    from fedquilt.runs.looking import other_tests

    run, summary = outcome.run, outcome.summary
    out.print(summary_table([summary]))
    out.print()
    out.print(what_it_says(summary), style="dim")
    for told in other_tests(summary):
        out.print(f"{told[0].upper()}{told[1:]}.", style="dim")
    for key in ("nothing_split", "compression"):
        if key in summary:
            out.print(summary[key], style="dim")
    if "privacy" in summary:
        out.print(in_full(summary))
    if summary.get("alarms"):
        note(in_short(summary["alarms"]))
    if "trouble" in summary:
        note(summary["trouble"])
    if summary["refused_updates"]:
        note(f"{summary['refused_updates']} updates were refused since they held NaN, infinite or misshapen values")
    out.print(f"\nWho shares what (engine {summary['engine']} on {summary['device']}):")
    out.print(Quilt(run.plan, [c.name for c in run.federation.scenario.clients]) if quilt else str(run.plan))


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The summary, the clients' last rows and the last plan, for machines."""
    run, rows = outcome.run, outcome.run.rows
    last = max((row["round"] for row in rows), default=0)
    return {
        "finished": outcome.finished,
        "summary": run.summary,
        "clients": [row for row in rows if row["round"] == last],
        "plan": run.plan.to_json(),
    }
