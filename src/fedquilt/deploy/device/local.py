"""Devices in this process: the letters of a deployment without a network, to rehearse with and to test by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedquilt.deploy.device.device import Device
from fedquilt.deploy.project import Project
from fedquilt.deploy.transport.transport import Answer, Patience


class LocalTransport:
    """Every client of a project on a device in this process: a letter is handed over and its answer comes back.

    `down` and `up` have every byte that passed, by client.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self.devices = {name: self.device(name) for name in project.clients}
        self.down: dict[str, list[bytes]] = {name: [] for name in project.clients}
        self.up: dict[str, list[bytes]] = {name: [] for name in project.clients}

    def device(self, name: str) -> Device:
        """A client's device as it is when it has just been started."""
        folder = self.project.client_folder(name)
        return Device(folder, folder / "data.npz")

    def members(self) -> set[str]:
        """All of them."""
        return set(self.devices)

    def reachable(self) -> set[str]:
        """All of them."""
        return set(self.devices)

    def exchange(self, letters: Mapping[str, bytes], round_: int, patience: Patience) -> Iterator[Answer]:
        """Hands each letter over and gives its answer."""
        for name, letter in letters.items():
            self.down[name].append(letter)
            answer = self.answer(name, round_, letter)
            self.up[name].append(answer.content)
            yield answer

    def answer(self, name: str, round_: int, letter: bytes) -> Answer:
        """What a client's device says to a letter."""
        return Answer(name, self.devices[name].handle(letter))
