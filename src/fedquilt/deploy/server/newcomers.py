"""Clients that come when a run is going on: between two rounds they are asked who they are, and offered circles.

A newcomer declares itself as the others did. It trains once with what the method has for somebody it does not know, and
shows what every client was asked for at the run's start; by that the method gives it its circles (`Method.enrol`), and
from then on it takes part. Nobody else is regrouped, and a newcomer that does not answer holds nobody up twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from fedquilt.core.federation import Federation
from fedquilt.core.server import Server
from fedquilt.deploy.device.state import FRESH
from fedquilt.deploy.project import FEDERATION, Project
from fedquilt.deploy.server.answers import Exchange
from fedquilt.deploy.server.declarations import Asked, Declarations, hello
from fedquilt.deploy.server.remote_clients import RemoteClients, remote
from fedquilt.deploy.server.silence import Silence
from fedquilt.deploy.transport.transport import Transport
from fedquilt.interface.messages import ClientInfo, Instructions, Updates

_PATIENCE = 10.0  # seconds that the others wait for a newcomer
Make = Callable[[Project, Declarations], Federation]


class Newcomers:
    """Who may still join a run. `make` makes the federation of those who declared themselves."""

    def __init__(
        self,
        project: Project,
        post: Transport,
        make: Make,
        log: Callable[[Exchange], None],
        say: Callable[[str], None],
    ) -> None:
        self.project, self.post, self.make, self.log, self.say = project, post, make, log, say
        self._changed = 0
        self._silence = Silence()
        self._refusing: set[str] = set()

    def join(self, federation: Federation, declared: Declarations) -> Federation:
        """The federation for the next round, with those who joined as the last of its roster and in `declared`."""
        for name in self._there(federation, declared):
            asked = Asked()
            hello(self.project, federation.terms, self.post, [name], asked, self.log, _PATIENCE)
            if name in asked.refusing:
                self._refuse(name, asked.refusing[name])
            if name not in asked.declared:
                self._silence.note(federation.round + 1, [name], [])
                continue
            try:
                grown = self._grown(federation, {**declared, name: asked.declared[name]}, name)
            except (ValueError, RuntimeError) as error:
                self._refuse(name, str(error))
                continue
            if grown is None:
                self._silence.note(federation.round + 1, [name], [])
                continue
            federation, declared[name] = grown, asked.declared[name]
            self.say(f"client '{name}' joined after round {federation.round}")
        return federation

    def _there(self, federation: Federation, declared: Mapping[str, Any]) -> list[str]:
        """Clients that are there and not in the run; the project's file is read again where it was changed."""
        changed = (self.project.folder / FEDERATION).stat().st_mtime_ns
        if changed != self._changed:
            self.project, self._changed = Project.read(self.project.folder), changed
        missing = set(self.project.clients) - set(declared) - self._refusing
        missing = {name for name in missing if not self._silence.aside(name, federation.round + 1)}
        return sorted(missing & self.post.reachable()) if missing else []

    def _refuse(self, name: str, reason: str) -> None:
        self._refusing.add(name)
        self.say(f"client '{name}' does not join: {reason}")

    def _grown(self, federation: Federation, declared: Declarations, name: str) -> Federation | None:
        """The federation with one client more; None where that one did not show what it has."""
        grown, number = self.make(self.project, declared), len(federation.scenario.clients)
        clients = remote(grown)
        clients.turn(grown.server, federation.round)  # who has changed since the start has changed
        clients.remember(remote(federation).kept())
        clients.accepted[name], clients.told[name] = FRESH, ""
        member = clients.members()[number]
        guest = welcomed(federation.server, member, Updates(federation.round, ()), clients)
        # under secure sums a method learns nothing from single clients, and they show nothing
        shows = grown.terms.secure is None
        ups = clients.introduction(guest, first_asked(guest, number)) if shows else []
        if shows and not ups:
            return None
        known = federation.server
        shown = Updates(federation.round, tuple(ups), clients.sent_models, known.held, known.copies)
        grown.server = welcomed(known, member, shown, clients)
        return grown


def welcomed(server: Server, member: ClientInfo, shown: Updates, clients: RemoteClients) -> Server:
    """A copy of a server with one client more on its roster."""
    found = copy(server)
    found.all_values = [
        replace(values, value=values.value.clone(), known=values.known.clone()) for values in server.all_values
    ]
    found.look, found.guard = clients.sent_models, copy(server.guard)
    found.welcome(member, shown)
    if found.guard is not None:
        found.guard.expects(len(found.roster))
    return found


def first_asked(server: Server, number: int) -> Instructions:
    """What a newcomer is told: the plan's instructions, and to send what everybody was asked for at the start."""
    down, method = server.instructions([number]), server.method
    first = method.plan(method.begin(server.roster), server.roster)
    asked = {unit for unit in server.roster.members[number].units if bool(first.sends(unit)[number])}
    return replace(down, send={unit: torch.ones(1, dtype=torch.bool) for unit in {*down.send, *asked}})
