"""`fedquilt deploy`: a federation on real machines, from the command line."""

from __future__ import annotations

import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fedquilt.cli import deploy_members, deploy_runs
from fedquilt.cli import options as opt
from fedquilt.cli.deploy_words import Settings, flower, say, until_ended, warn

deploy_app = typer.Typer(help="The same methods on a real network, on Flower.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")]


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
    secure_sums: opt.SecureSums = False,
    no_tls: Annotated[bool, typer.Option("--no-tls", help="No encryption, no keys. Not for a real network.")] = False,
    no_authentication: Annotated[
        bool, typer.Option("--no-authentication", help="Let anybody join under any name. Not for a real network.")
    ] = False,
) -> None:
    """Make a federation: certificates of a private authority, a key for each client, configuration."""
    with flower():
        from fedquilt.deploy.ops.create import create, create_from_scenario
        from fedquilt.deploy.ops.processes import free_port
        from fedquilt.deploy.project import Address
    from fedquilt.cli.scenario import find
    from fedquilt.cli.settings import assign, spec_of
    from fedquilt.secure import SecureSums

    hosts, authentication = tuple(host or ["localhost"]), not (no_authentication or no_tls)
    address = Address(listen, port or free_port(), hosts, not no_tls, authentication)
    source = None if scenario is None else find(scenario)
    specs = {"secure": spec_of(SecureSums)} | ({} if source is None else {"scenario": spec_of(source.builder)})
    told = assign(settings or (), specs, [])
    secure = SecureSums(**told["secure"]) if secure_sums or told["secure"] else None
    if source is not None:
        project = create_from_scenario(folder, source.build(seed, told["scenario"]), address, secure=secure)
    elif client and model:
        project = create(folder, client, model, classes, address, secure=secure)
    else:
        raise ValueError("give --scenario NAME, or your own clients with --client NAME (each) and --model REFERENCE")
    warn(address.warning)
    own = "" if scenario is not None else " --data my.npz"
    say(f"{folder} holds a federation of {len(project.clients)} clients; each has a folder of its own there")
    say(f"  here:            fedquilt deploy server {folder}")
    say(f"  on each device:  fedquilt deploy client {folder}/clients/{project.clients[0]}{own}")
    say(f"  here again:      fedquilt deploy run {project.spec.scenario} METHOD --dir {folder}")


@deploy_app.command()
def server(
    folder: Folder,
    without_nginx: Annotated[
        bool, typer.Option("--without-nginx", help="No gate in front; only where nobody else can reach the port.")
    ] = False,
    status_port: Annotated[
        int | None, typer.Option(metavar="N", help="Serve a status page and /metrics on this port.")
    ] = None,
    status_listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The interface for that; who reaches it sees all names and runs.")
    ] = "127.0.0.1",
) -> None:
    """Run the server until it is ended: SuperLink on the loopback address, nginx in front of it."""
    with flower():
        from fedquilt.deploy.ops.server_processes import ServerSide
        from fedquilt.deploy.ops.status_page import served
        from fedquilt.deploy.project import Project

    project = Project.read(folder)
    warn(project.server.warning)
    page = nullcontext() if status_port is None else served(project, status_port, status_listen)
    with until_ended(), ServerSide(project, gate=not without_nginx) as running, page as at:
        warn(running.warning)
        where = f"{project.server.hosts[0]}:{project.server.port}"
        say(f"the federation listens on {where}; {len(project.clients)} clients may join. End with Ctrl-C.")
        if at is not None:
            say(f"how it stands: http://{status_listen}:{at}/ and, for Prometheus, http://{status_listen}:{at}/metrics")
        for sentence in running.watch():
            say(f"{time.strftime('%H:%M:%S')} {sentence}")


@deploy_app.command()
def client(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="The client's folder, DIR/clients/NAME.")],
    data: Annotated[Path | None, typer.Option(help="Its data: x_train, y_train, ... (else data.npz there).")] = None,
) -> None:
    """Run a client until it is ended, or several in one process. Their data stay here."""
    with flower():
        from fedquilt.deploy.ops.client_processes import LOG, become_keeper
        from fedquilt.deploy.project import Node, loose

        if find_spec("flwr") is None:
            raise ModuleNotFoundError("no flwr", name="flwr")
    if data is not None and len(folders) > 1:
        raise ValueError("--data goes with one client; several have their data.npz each in its own folder")
    nodes = [Node.read(folder) for folder in folders]
    all_data = [data or folder / "data.npz" for folder in folders]
    for file in all_data:
        if not file.is_file():
            raise FileNotFoundError(f"the data file {file} does not exist; name it with --data")
    for warning in dict.fromkeys(node.warning for node in nodes):
        warn(warning)
    for node in nodes:
        warn(loose(node.folder / "node.key"))
    say(f"talking to {nodes[0].host}:{nodes[0].port}; details are in {folders[0] / LOG}. End with Ctrl-C.")
    become_keeper(folders, all_data)


for command in (
    *(deploy_runs.run, deploy_runs.follow, deploy_runs.status),
    *(deploy_members.add, deploy_members.remove, deploy_members.rekey, deploy_members.renew),
):
    deploy_app.command()(command)
