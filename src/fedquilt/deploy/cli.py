"""`fedquilt deploy`: a federation on real machines, from the command line."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

deploy_app = typer.Typer(help="The same methods on a real network, on Flower.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The federation's folder.")]
Where = Annotated[Path, typer.Option("--dir", "-d", help="The federation's folder.")]


@deploy_app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for the federation.")],
    scenario: Annotated[str | None, typer.Option(help="Make the clients of this scenario, each with its data.")] = None,
    client: Annotated[list[str] | None, typer.Option(help="A client of your own; give this once for each.")] = None,
    model: Annotated[str, typer.Option(help="Their model: file.py:function or package.module:function.")] = "",
    classes: Annotated[int, typer.Option(help="How many classes there are, for clients of your own.")] = 2,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the scenario, key=value.")] = None,
    seed: Annotated[int, typer.Option(help="The scenario's seed.")] = 0,
    host: Annotated[list[str] | None, typer.Option(help="A name or address clients reach the server by.")] = None,
    listen: Annotated[str, typer.Option(help="The interface to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port clients reach; 0 takes a free one.")] = 8443,
    no_tls: Annotated[bool, typer.Option("--no-tls", help="Switch encryption off. Not for a real network.")] = False,
    no_authentication: Annotated[
        bool, typer.Option("--no-authentication", help="Let anybody join under any name. Not for a real network.")
    ] = False,
) -> None:
    """Make a federation: certificates of a private authority, a key for each client, configuration."""
    from fedquilt.deploy.create import create, create_from_scenario
    from fedquilt.deploy.processes import free_port
    from fedquilt.deploy.project import Address

    with sentences():
        address = Address(
            listen, port or free_port(), tuple(host or ["localhost"]), not no_tls, not (no_authentication or no_tls)
        )
        if scenario is not None:
            from fedquilt.scenarios import build

            made = build(scenario, seed=seed, **pairs(settings))
            project = create_from_scenario(folder, made, address)
        elif client and model:
            project = create(folder, client, model, classes, address)
        else:
            raise ValueError(
                "give --scenario NAME, or your own clients with --client NAME (each) and --model REFERENCE"
            )
        warn(address.warning)
        typer.echo(f"{folder}: a federation of {len(project.clients)} clients")
        typer.echo(f"  here:            fedquilt deploy server {folder}")
        data = "" if scenario is not None else " --data my.npz"
        typer.echo(f"  on each device:  fedquilt deploy client {folder}/clients/NAME{data}")
        typer.echo(f"  here again:      fedquilt deploy run {project.terms.scenario} METHOD --dir {folder}")


@deploy_app.command()
def server(
    folder: Folder,
    without_nginx: Annotated[
        bool, typer.Option("--without-nginx", help="No gate in front; only where nobody else can reach the port.")
    ] = False,
) -> None:
    """Run the server until it is ended: SuperLink on the loopback address, nginx in front of it."""
    from fedquilt.deploy.project import Project
    from fedquilt.deploy.server_side import ServerSide

    with sentences(), ends_on_signals():
        project = Project.read(folder)
        warn(project.server.warning)
        with ServerSide(project, gate=not without_nginx) as running:
            warn(running.warning)
            where = f"{project.server.hosts[0]}:{project.server.port}"
            typer.echo(f"the federation listens on {where}; {len(project.clients)} clients may join. End with Ctrl-C.")
            while all(service.alive for service in running.services):
                time.sleep(0.5)
            dead = next(service for service in running.services if not service.alive)
            raise RuntimeError(f"{dead.name} ended by itself; the end of {dead.log}:\n{dead.tail()}")


@deploy_app.command()
def client(
    folder: Annotated[Path, typer.Argument(help="The client's folder, DIR/clients/NAME.")],
    data: Annotated[
        Path | None, typer.Option(help="Its data: x_train, y_train, ... (default: data.npz there).")
    ] = None,
) -> None:
    """Run a client until it is ended. Its data stay here; a process that dies is started again."""
    import subprocess
    import sys

    from fedquilt.deploy.client_side import keep_running
    from fedquilt.deploy.project import Node

    with sentences(), ends_on_signals():
        node = Node.read(folder)
        warn(node.warning)
        data = data or folder / "data.npz"
        # In a process of its own, so that this one, which only watches, stays small.
        check = [sys.executable, "-m", "fedquilt.deploy.worker", str(folder), str(data), "--check"]
        if subprocess.run(check, check=False).returncode:
            raise typer.Exit(1)
        typer.echo(f"it talks to {node.host}:{node.port}; its log is {folder / 'node.log'}. End with Ctrl-C.")
        for _ in keep_running(node, data):
            typer.echo(f"{time.strftime('%H:%M:%S')} started")


@deploy_app.command()
def run(
    scenario: Annotated[str | None, typer.Argument(help="The federation's scenario, as in federation.toml.")] = None,
    method: Annotated[str | None, typer.Argument(help="The method.")] = None,
    folder: Where = Path("."),
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    seed: Annotated[int, typer.Option(help="The seed.")] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the method, key=value.")] = None,
    training: Annotated[list[str] | None, typer.Option("--train", help="A training setting, key=value.")] = None,
    readout: Annotated[list[str] | None, typer.Option(help="A read-out; give this once for each.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run that did not finish.")] = False,
) -> None:
    """Run a method on the federation; results come back as an ordinary run directory in DIR/runs."""
    from fedquilt.deploy.project import Project
    from fedquilt.deploy.runs import follow, latest_spec, new_spec, start_run

    with sentences():
        project = Project.read(folder)
        if resume:
            spec = latest_spec(project)
        elif scenario is None or method is None:
            raise ValueError("name the scenario and the method, or give --resume")
        elif scenario != project.terms.scenario:
            raise ValueError(f"{folder} is a federation of the scenario '{project.terms.scenario}', not '{scenario}'")
        else:
            spec = new_spec(
                project, method, rounds=rounds, seed=seed, settings=pairs(settings), training=pairs(training),
                readouts=readout or None,
            )  # fmt: skip
        number = start_run(project, spec)
        typer.echo(f"{spec['run']} {'goes on' if resume else 'has started'}")
        summary = follow(project, spec, number, tell_exchange)
        score = summary["accuracy_mean"]
        typer.echo(
            f"{summary['readout']} accuracy on {summary['split']}: " + ("none" if score is None else f"{score:.4f}")
        )
        typer.echo(f"the run is in {spec['folder']}")


@deploy_app.command()
def status(folder: Where = Path(".")) -> None:
    """Say who is there and how the runs stand."""
    from fedquilt.deploy.operator import Operator
    from fedquilt.deploy.project import Project

    with sentences():
        project = Project.read(folder)
        try:
            with Operator(project) as operator:
                seen = operator.nodes()
            typer.echo(f"server   running, {project.server.hosts[0]}:{project.server.port}")
        except OSError:
            seen = {}
            typer.echo("server   not running")
        states = {name: seen.get(number, "unknown") for number, name in project.nodes().items()}
        for name in project.clients:
            typer.echo(f"client   {name:<24} {states.get(name, 'never seen')}")
        for path in sorted(project.runs.glob("*/status.json"), key=lambda path: path.stat().st_mtime):
            found = json.loads(path.read_text())
            at = f"round {found['round']} of {found['rounds']}" if "round" in found else found.get("error", "")
            typer.echo(f"run      {path.parent.name:<40} {found['state']}, {at}{left_out(path.parent)}")


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

    typer.echo(
        f"round {line['round']:>4}  {len(line['answered'])} of {len(line['asked'])} answered in {line['seconds']:.1f} s"
        + "".join(f"; {name} left out: {REASONS[code]}" for name, code in line["refused"].items())
    )


def pairs(settings: list[str] | None) -> dict[str, Any]:
    """key=value settings; a value is read as TOML would, and is a text otherwise.

    >>> pairs(["clients=8", "linkage=average", "shares=[0.5, 1]"])
    {'clients': 8, 'linkage': 'average', 'shares': [0.5, 1]}
    """
    import tomllib

    found: dict[str, Any] = {}
    for setting in settings or ():
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"'{setting}' is no setting; write key=value")
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    return found


def warn(sentence: str | None) -> None:
    """Prints a warning, if there is one."""
    if sentence:
        typer.secho(f"WARNING: {sentence}", fg=typer.colors.YELLOW, bold=True, err=True)


@contextmanager
def sentences() -> Iterator[None]:
    """Turns errors that have a sentence into that sentence; all others are bugs and keep their traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flwr", "cryptography", "tomli_w"):
            raise
        typer.secho("fedquilt deploy needs Flower: pip install 'fedquilt[deploy]'", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        typer.secho(str(text), fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Lets a termination request end the command as Ctrl-C does, so that its processes are ended too."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
