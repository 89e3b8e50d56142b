"""`fedquilt deploy`: a federation on real machines, from the command line."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

deploy_app = typer.Typer(help="The same methods on a real network, on Flower.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")]
Where = Annotated[Path, typer.Option("--dir", "-d", metavar="DIR", help="The federation's folder.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE...", help="Settings, as in a run.")]


@deploy_app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the federation.")],
    scenario: Annotated[str | None, typer.Option(help="Make this scenario's clients, each with its data.")] = None,
    settings: Settings = None,
    seed: Annotated[int, typer.Option(help="The scenario's seed.")] = 0,
    client: Annotated[list[str] | None, typer.Option(help="A client of your own; give this once for each.")] = None,
    model: Annotated[str, typer.Option(help="Their model: file.py:function or package.module:function.")] = "",
    classes: Annotated[int, typer.Option(help="How many classes there are, for clients of your own.")] = 2,
    host: Annotated[list[str] | None, typer.Option(help="A name or address clients reach the server by.")] = None,
    listen: Annotated[str, typer.Option(help="The interface to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port clients reach; 0 takes a free one.")] = 8443,
    no_tls: Annotated[bool, typer.Option("--no-tls", help="No encryption, no keys. Not for a real network.")] = False,
    no_authentication: Annotated[
        bool, typer.Option("--no-authentication", help="Let anybody join under any name. Not for a real network.")
    ] = False,
) -> None:
    """Make a federation: certificates of a private authority, a key for each client, configuration."""
    with flower():
        from fedquilt.deploy.create import create, create_from_scenario
        from fedquilt.deploy.processes import free_port
        from fedquilt.deploy.project import Address

    hosts, authentication = tuple(host or ["localhost"]), not (no_authentication or no_tls)
    address = Address(listen, port or free_port(), hosts, not no_tls, authentication)
    if scenario is not None:
        from fedquilt.cli.scenario import find
        from fedquilt.cli.settings import route, shelf_of

        source = find(scenario)
        told = route(settings or (), {"scenario": shelf_of(source.builder)}, [])["scenario"]
        project = create_from_scenario(folder, source.build(seed, told), address)
    elif client and model:
        project = create(folder, client, model, classes, address)
    else:
        raise ValueError("give --scenario NAME, or your own clients with --client NAME (each) and --model REFERENCE")
    warn(address.warning)
    own = "" if scenario is not None else " --data my.npz"
    say(f"{folder} holds a federation of {len(project.clients)} clients; each has a folder of its own there")
    say(f"  here:            fedquilt deploy server {folder}")
    say(f"  on each device:  fedquilt deploy client {folder}/clients/{project.clients[0]}{own}")
    say(f"  here again:      fedquilt deploy run {project.terms.scenario} METHOD --dir {folder}")


@deploy_app.command()
def server(
    folder: Folder,
    without_nginx: Annotated[
        bool, typer.Option("--without-nginx", help="No gate in front; only where nobody else can reach the port.")
    ] = False,
) -> None:
    """Run the server until it is ended: SuperLink on the loopback address, nginx in front of it."""
    with flower():
        from fedquilt.deploy.project import Project
        from fedquilt.deploy.server_side import ServerSide

    project = Project.read(folder)
    warn(project.server.warning)
    with until_ended(), ServerSide(project, gate=not without_nginx) as running:
        warn(running.warning)
        where = f"{project.server.hosts[0]}:{project.server.port}"
        say(f"the federation listens on {where}; {len(project.clients)} clients may join. End with Ctrl-C.")
        running.watch()


@deploy_app.command()
def client(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The client's folder, DIR/clients/NAME.")],
    data: Annotated[Path | None, typer.Option(help="Its data: x_train, y_train, ... (else data.npz there).")] = None,
) -> None:
    """Run a client until it is ended. Its data stay here; a process that dies is started again."""
    with flower():
        import flwr  # noqa: F401

        from fedquilt.deploy.client_side import check, keep_running
        from fedquilt.deploy.project import Node

    node = Node.read(folder)
    warn(node.warning)
    data = data or folder / "data.npz"
    with until_ended():
        say(check(node, data))
        say(f"it talks to {node.host}:{node.port}; its log is {folder / 'node.log'}. End with Ctrl-C.")
        for _ in keep_running(node, data):
            say(f"{time.strftime('%H:%M:%S')} started")


@deploy_app.command()
def run(
    scenario: Annotated[str | None, typer.Argument(metavar="SCENARIO", help="As in federation.toml.")] = None,
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run that did not finish.")] = False,
) -> None:
    """Run a method on the federation; results come back as an ordinary run directory in DIR/runs."""
    with flower():
        from fedquilt.deploy.project import Project
        from fedquilt.deploy.runs import follow, latest_spec, new_spec, start_run, stop_run

    project = Project.read(folder)
    if resume:
        spec = latest_spec(project)
    elif scenario is None or method is None:
        raise ValueError("name the scenario and the method, or give --resume")
    elif scenario != project.terms.scenario:
        raise ValueError(f"{folder} is a federation of the scenario '{project.terms.scenario}', not '{scenario}'")
    else:
        chosen = choose(method, merge, settings or ())
        names = [name.strip() for name in readouts.split(",")] if readouts else None
        spec = new_spec(
            project, method, rounds=rounds, seed=seed, readouts=names, evaluate_every=evaluate_every, **chosen
        )
    number = start_run(project, spec)
    say(f"{spec['run']} {'goes on' if resume else 'has started'}")
    try:
        summary = follow(project, spec, number, tell_exchange)
    except KeyboardInterrupt:
        stop_run(project, number)
        say("stopped; go on with `fedquilt deploy run --resume`")
        raise typer.Exit(130) from None
    score = summary.get("accuracy_mean")
    say(f"{summary['readout']} accuracy on {summary['split']}: " + ("none" if score is None else f"{score:.4f}"))
    say(f"Kept in {spec['folder']}; look at it with: fedquilt report {spec['folder']}")


@deploy_app.command()
def status(folder: Where = Path(".")) -> None:
    """Say who is there and how the runs stand."""
    with flower():
        from fedquilt.deploy.operator import who_is_there
        from fedquilt.deploy.project import Project

    project = Project.read(folder)
    there = who_is_there(project)
    where = f"{project.server.hosts[0]}:{project.server.port}"
    say("server   " + (f"running, {where}" if there is not None else "not running"))
    for name in project.clients:
        say(f"client   {name:<24} {(there or {}).get(name, 'not seen')}")
    for path in sorted(project.runs.glob("*/status.json"), key=lambda path: path.stat().st_mtime):
        found = json.loads(path.read_text())
        at = f"round {found['round']} of {found['rounds']}" if "round" in found else found.get("error", "")
        say(f"run      {path.parent.name:<40} {found['state']}, {at}{left_out(path.parent)}")


def choose(method: str, merge: str, settings: list[str] | tuple[()]) -> dict[str, dict[str, Any]]:
    """The user's settings, each for the part that knows its name: the method, training or the merge."""
    from fedquilt.cli.settings import route, shelf_of
    from fedquilt.cli.speak import Refused
    from fedquilt.methods.find import find
    from fedquilt.names import unknown
    from fedquilt.sharing import MERGES
    from fedquilt.training.settings import Training

    kind = find(method)
    if merge not in MERGES:
        raise Refused(unknown(merge, MERGES, "merge"))
    shelves = {"training": shelf_of(Training), "merge": shelf_of(MERGES[merge]), kind.name: shelf_of(kind)}
    placed = route(settings, shelves, [kind.name])
    return {
        "settings": placed[kind.name],
        "training": placed["training"],
        "merge": {"name": merge, **placed["merge"]},
    }


def left_out(folder: Path) -> str:
    """How many updates a run has left out so far, and of whom."""
    counts: dict[str, int] = {}
    letters = folder / "letters.jsonl"
    for line in letters.read_text().splitlines() if letters.is_file() else ():
        for name in json.loads(line)["refused"]:
            counts[name] = counts.get(name, 0) + 1
    return "".join(f"; {name} left out {count}x" for name, count in counts.items())


def tell_exchange(line: Mapping[str, Any]) -> None:
    """One line of progress."""
    from fedquilt.deploy.wire import REASONS

    what = f"round {line['round']:>4}" if line["what"] == "round" else f"{line['what']:>10}"
    say(
        f"{what}  {len(line['answered'])} of {len(line['asked'])} answered in {line['seconds']:.1f} s"
        + "".join(f"; {name} left out: {REASONS[code]}" for name, code in line["refused"].items())
    )


def say(line: str) -> None:
    """A line that is there at once, also in a log."""
    print(line, flush=True)


def warn(sentence: str | None) -> None:
    """Prints a warning, if there is one."""
    if sentence:
        from fedquilt.cli.speak import note

        note(f"WARNING: {sentence}")


@contextmanager
def flower() -> Iterator[None]:
    """Says how to get Flower where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flwr", "cryptography", "httpx"):
            raise
        raise ModuleNotFoundError("fedquilt deploy needs Flower; get it with: pip install 'fedquilt[deploy]'") from None


@contextmanager
def until_ended() -> Iterator[None]:
    """Lets Ctrl-C and a request to terminate end the command and its processes; either is a good end."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        say("ended")
    finally:
        signal.signal(signal.SIGTERM, before)
