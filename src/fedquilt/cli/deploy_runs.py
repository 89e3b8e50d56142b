"""`fedquilt deploy run`, `follow` and `status`: runs on a federation that is up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt._util.metric import metric_of
from fedquilt.cli.deploy_words import Settings, Where, flower, say
from fedquilt.cli.output import working
from fedquilt.cli.tables import in_full

if TYPE_CHECKING:
    from fedquilt.deploy.project import Project


def run(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="As in federation.toml; with --resume, the run's name.")
    ] = None,
    method: Annotated[
        str | None, typer.Argument(metavar="METHOD", help="See fedquilt list methods; or path/to/file.py:Class.")
    ] = None,
    folder: Where = Path("."),
    rounds: Annotated[int | None, typer.Option("--rounds", "-r", metavar="N", help="How many rounds.")] = None,
    seed: Annotated[int, typer.Option("--seed", "-s", metavar="N", help="Everything random follows from it.")] = 0,
    settings: Settings = None,
    readouts: Annotated[str | None, typer.Option(metavar="NAME,...", help="See fedquilt list readouts.")] = None,
    merge: Annotated[str, typer.Option(metavar="NAME", help="See fedquilt list merges.")] = "mean",
    evaluate_every: Annotated[int, typer.Option(metavar="N", help="Measure every N rounds, and at the end.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run: that of the name given, or the last unfinished one.")
    ] = False,
    from_round: Annotated[
        int | None, typer.Option(metavar="N", help="With --resume: go on after round N, one of the last five.")
    ] = None,
) -> None:
    """Run a method on the federation; results come back as an ordinary run directory in DIR/runs."""
    with flower(), working("starting the run ..."):
        from fedquilt.deploy.ops.runs import latest_spec, named_spec, new_spec, start_run
        from fedquilt.deploy.project import Project

        project = Project.read(folder)
        if from_round is not None and not resume:
            raise ValueError("--from-round goes with --resume")
        if resume:
            spec = latest_spec(project) if scenario is None else named_spec(project, scenario)
        elif scenario is None or method is None:
            raise ValueError("name the scenario and the method, or give --resume")
        elif scenario != project.spec.scenario:
            raise ValueError(f"{folder} is a federation of the scenario '{project.spec.scenario}', not '{scenario}'")
        else:
            chosen = choose(method, merge, settings or ())
            names = [name.strip() for name in readouts.split(",")] if readouts else None
            spec = new_spec(
                project, method, rounds=rounds, seed=seed, readouts=names, evaluate_every=evaluate_every, **chosen
            )
        number = start_run(project, spec, from_round)
    say(f"{spec['run']} {'goes on' if resume else 'has started'}")
    watch(project, spec, number, stop=True)


def follow(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Its name; else the last one started.")] = None,
    folder: Where = Path("."),
) -> None:
    """Look at a run that is going on; Ctrl-C ends the looking, not the run."""
    with flower():
        from fedquilt.deploy.ops.runs import latest_spec, named_spec, number_of
        from fedquilt.deploy.project import Project

    project = Project.read(folder)
    spec = latest_spec(project, finished=True) if run is None else named_spec(project, run)
    say(f"{spec['run']}, from here on")
    watch(project, spec, number_of(spec), stop=False)


def watch(project: Project, spec: Mapping[str, Any], number: int, stop: bool) -> None:
    """Tells what a run does until it ends. Whoever started it goes on with it where its leader is lost, and Ctrl-C
    `stop`s it."""
    from fedquilt.deploy.ops.run_facts import to_look_at
    from fedquilt.deploy.ops.runs import follow as look_at
    from fedquilt.deploy.ops.runs import see_through, stop_run
    from fedquilt.deploy.server.run_folder import RemoteRunFolder

    try:
        summary = (see_through if stop else look_at)(project, spec, number, tell_exchange, say=say)
    except KeyboardInterrupt:
        if stop:
            stop_run(project, spec)
            say(f"stopped; go on with `{RemoteRunFolder(spec['folder']).again}`")
        raise typer.Exit(130) from None
    for told in what_came(summary, to_look_at(Path(spec["folder"]))):
        say(told)
    if "compression" in summary:
        say(summary["compression"])
    if "privacy" in summary:
        say(in_full(summary))
    say(f"Kept in {spec['folder']}; look at it with: fedquilt report {spec['folder']}")


def what_came(summary: Mapping[str, Any], fallen: Sequence[str]) -> list[str]:
    """A finished run in a few sentences, and what to look at.

    >>> s = {"readout": "received", "split": "test", "clients_measured": 4}
    >>> what_came(s | {"accuracy_mean": 0.84, "accuracy_std": 0.1, "accuracy_worst_decile": 0.7}, ["a fell"])
    ['received accuracy on test data: 84.0 ± 10.0 % over 4 clients, worst decile 70.0 %', 'Look at: a fell.']
    """
    from fedquilt.runs.alarms import in_short

    metric = metric_of(summary)
    mean, spread, worst = (summary.get(f"{metric.name}_{what}") for what in ("mean", "std", "worst_decile"))
    told = f"{summary['readout']} {metric.name} on {summary['split']} data: "
    if mean is None or spread is None:
        return [f"{told}none"]
    told += f"{metric.around(mean, spread)}{metric.unit} over {summary['clients_measured']} clients"
    more = [in_short(fallen), *(str(summary.get(key, "")) for key in ("nothing_split", "trouble"))]
    return [f"{told}, worst decile {metric.show(worst)}{metric.unit}", *filter(None, more)]


def status(folder: Where = Path(".")) -> None:
    """Say who is there and how the runs stand."""
    with flower():
        from fedquilt.deploy.ops.run_facts import facts_of, run_folders, to_look_at
        from fedquilt.deploy.ops.sent_away import sent_away
        from fedquilt.deploy.ops.superlink import who_is_there
        from fedquilt.deploy.project import Project

    project = Project.read(folder)
    there = who_is_there(project)
    where = f"{project.server.hosts[0]}:{project.server.port}"
    say("server   " + (f"running, {where}" if there is not None else "not running"))
    for name in project.clients:
        say(f"client   {name:<24} {(there or {}).get(name, 'not seen')}")
    for line in sent_away(project):
        say(f"refused  {line}")
    for place in run_folders(project):
        run = facts_of(place)
        state = "interrupted; --resume goes on" if run.state == "interrupted" else run.state
        counts = Counter(client for client, _ in run.refused.elements())
        left_out = "".join(f"; {name} left out {count}x" for name, count in counts.items())
        say(f"run      {run.name:<40} {state}, {run.note or f'round {run.round} of {run.rounds}'}{left_out}")
        for told in to_look_at(place):
            say(f"look at  {told}")


def choose(method: str, merge: str, settings: list[str] | tuple[()]) -> dict[str, dict[str, Any]]:
    """The user's settings, each for the part that knows its name: the method, training, the merge, privacy, ..."""
    from fedquilt.cli.settings import assign, spec_of
    from fedquilt.engines.settings import Training
    from fedquilt.methods.find import find
    from fedquilt.privacy import Privacy
    from fedquilt.sharing import Compression, merge_of

    kind = find(method)
    all_values = {"training": spec_of(Training), "merge": spec_of(merge_of(merge)), "dp": spec_of(Privacy)}
    all_values["compress"] = spec_of(Compression)
    placed = assign(settings, {**all_values, kind.name: spec_of(kind)}, [kind.name])
    return {
        "settings": placed[kind.name],
        "training": placed["training"],
        "merge": {"name": merge, **placed["merge"]},
        **({"dp": Privacy(**placed["dp"]).text} if placed["dp"] else {}),
        **({"compress": Compression(**placed["compress"]).text} if placed["compress"] else {}),
    }


def tell_exchange(line: Mapping[str, Any]) -> None:
    """One line of progress."""
    from fedquilt.deploy.transport.wire import REASONS

    what = f"round {line['round']:>4}" if line["what"] == "round" else f"{line['what']:>10}"
    details = line.get("details", {})
    say(
        f"{what}  {len(line['answered'])} of {len(line['asked'])} answered in {line['seconds']:.1f} s"
        + "".join(f"; {name} left out: {details.get(name) or REASONS[code]}" for name, code in line["refused"].items())
    )
