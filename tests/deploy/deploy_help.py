"""What the tests of deployment share: a post that needs no network, and federations to send over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fedquilt.deploy.create import create_from_scenario
from fedquilt.deploy.device import Device
from fedquilt.deploy.lead import declare, make_federation
from fedquilt.deploy.post import Answer
from fedquilt.deploy.project import Address, Project, Rounds, Transfer
from fedquilt.deploy.remote import RemoteFederation
from fedquilt.scenario import Scenario


class LocalPost:
    """Devices in this process: a letter is handed over and its answer comes back, unless an accident happens.

    `accident(client, round, letter, device)` may give back an answer of its own, or None to let things go well.
    `seen` has every byte that passed, by client.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self.devices = {name: self.device(name) for name in project.clients}
        self.accident: Callable[[str, int, bytes, Device], Answer | None] = lambda *_: None
        self.down: dict[str, list[bytes]] = {name: [] for name in project.clients}
        self.up: dict[str, list[bytes]] = {name: [] for name in project.clients}

    def device(self, name: str) -> Device:
        """A client's device as it is when it has just been started."""
        folder = self.project.client_folder(name)
        return Device(folder, folder / "data.npz")

    def reachable(self) -> set[str]:
        return set(self.devices)

    def exchange(self, letters: Mapping[str, bytes], round_: int, timeout: float) -> Iterator[Answer]:
        for name, letter in letters.items():
            self.down[name].append(letter)
            answer = self.accident(name, round_, letter, self.devices[name])
            if answer is None:
                answer = Answer(name, self.devices[name].handle(letter))
            self.up[name].append(answer.content)
            yield answer


def federate(
    folder: Path,
    scenario: Scenario,
    method: str,
    rounds: int,
    seed: int = 0,
    transfer: Transfer | None = None,
    rules: Rounds | None = None,
) -> tuple[RemoteFederation, LocalPost]:
    """A federation of a scenario's clients over the local post."""
    project = create_from_scenario(folder, scenario, Address(), rules, transfer)
    post = LocalPost(project)
    spec = {"run": "test", "method": method, "rounds": rounds, "seed": seed}
    return make_federation(project, spec, post, declare(project, spec, post)), post
