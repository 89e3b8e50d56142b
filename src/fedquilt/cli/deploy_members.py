"""`fedquilt deploy add`, `remove`, `rekey` and `renew`: who belongs to a federation, while its server runs or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedquilt.cli.deploy_words import Where, flower, say

Name = Annotated[str, typer.Argument(metavar="NAME", help="The client.")]


def add(
    name: Name,
    folder: Where = Path("."),
    model: Annotated[str, typer.Option(help="Its model, as in init; else that of the first client.")] = "",
) -> None:
    """Add a client to a federation; it joins the run that goes on, and takes part in those that start from now on."""
    with flower():
        from fedquilt.deploy.ops import membership
        from fedquilt.deploy.project import Project

    project = membership.add(Project.read(folder), name, model)
    say(f"'{name}' is a client now; move {project.client_folder(name)} to its device")


def remove(name: Name, folder: Where = Path(".")) -> None:
    """Take a client's key away: from now on it is sent away, in runs that are going on, too."""
    with flower():
        from fedquilt.deploy.ops import membership
        from fedquilt.deploy.project import Project

    membership.remove(Project.read(folder), name)
    say(f"'{name}' is no client any more; its key is worth nothing")


def rekey(
    name: Name,
    folder: Where = Path("."),
    public: Annotated[Path | None, typer.Option(help="The public half of a key that the device made itself.")] = None,
) -> None:
    """Give a client a new key; the old one is worth nothing from now on."""
    with flower():
        from fedquilt.deploy.ops import membership
        from fedquilt.deploy.project import Project

    place = membership.rekey(Project.read(folder), name, public)
    say(f"'{name}' has a new key" + ("" if public else f"; move {place / 'node.key'} to its device and start it again"))


def renew(
    folder: Where = Path("."),
    authority: Annotated[Path | None, typer.Option(help="Where the authority's key is, if not in DIR.")] = None,
) -> None:
    """Make a new certificate for the server; clients need nothing."""
    with flower():
        from fedquilt.deploy.ops import membership
        from fedquilt.deploy.ops.keys import check_certificate
        from fedquilt.deploy.project import Project

    project = Project.read(folder)
    membership.renew(project, authority)
    left = check_certificate(project.server_folder / "server.crt", project.folder)
    say(f"the server has a new certificate, good for {left.days} days")
