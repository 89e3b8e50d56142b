"""What the tests of deployment share: a post that needs no network, and federations to send over it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedquilt.deploy.client_side import NodeProcesses, start_node
from fedquilt.deploy.create import create_from_scenario
from fedquilt.deploy.device import Device
from fedquilt.deploy.lead import declare, make_federation
from fedquilt.deploy.post import Answer
from fedquilt.deploy.project import Address, Node, Project, Rounds, Transfer
from fedquilt.deploy.remote import RemoteFederation
from fedquilt.deploy.runs import follow, new_spec, start_run
from fedquilt.deploy.server_side import ServerSide
from fedquilt.run import Run, run
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


class Network:
    """A federation of real processes on this machine; leaving the context ends them all."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.server = ServerSide(project, gate=shutil.which("nginx") is not None)
        self.nodes: dict[str, NodeProcesses] = {}

    def __enter__(self) -> Network:
        self.server.__enter__()
        try:
            for name in self.project.clients:
                self.start(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.supernode.process.terminate()  # all at once, then each in turn
        for node in self.nodes.values():
            node.stop()
        self.server.__exit__(None, None, None)

    def start(self, name: str) -> None:
        folder = self.project.client_folder(name)
        self.nodes[name] = start_node(Node.read(folder), folder / "data.npz")

    def run(self, method: str, **options: Any) -> tuple[Path, dict[str, Any]]:
        spec = new_spec(self.project, method, **options)
        return Path(spec["folder"]), follow(self.project, spec, start_run(self.project, spec))


def simulate(scenario: Scenario, method: str, rounds: int, seed: int = 0) -> Run:
    """The same in a simulation."""
    return run(scenario, method, rounds, seed, device="cpu", engine="sequential", alone=False)


def row_key(row: Mapping[str, Any]) -> tuple[int, str, str, str]:
    return row["round"], row["client"], row["readout"], row["split"]


def same_rows(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Asserts that two runs gave every client the same scores after every round."""
    mine, other = ({row_key(row): row for row in rows} for rows in (ours, theirs))
    assert set(mine) == set(other)
    for key, row in mine.items():
        assert row["samples"] == other[key]["samples"], key
        assert abs(row["accuracy"] - other[key]["accuracy"]) < 1e-6, key
        assert abs(row["f1"] - other[key]["f1"]) < 1e-5, key


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def processes_of(folder: Path) -> list[str]:
    """Command lines of all processes of this machine that name a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in text:
                found.append(text)
    return found
