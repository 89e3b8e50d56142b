"""What the tests of deployment share: a post that needs no network, and federations to send over it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deploy_models
import numpy as np

from fedquilt.client import Change, Client
from fedquilt.core.federation import Federation
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.device.local import LocalTransport as Local
from fedquilt.deploy.ops.client_processes import start_nodes
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.processes import Service
from fedquilt.deploy.ops.runs import follow, new_spec, start_run
from fedquilt.deploy.ops.server_processes import ServerSide
from fedquilt.deploy.project import Address, Project, Rounds, Transfer
from fedquilt.deploy.server.coordinator import make_federation
from fedquilt.deploy.server.declarations import declare
from fedquilt.deploy.transport.transport import Answer
from fedquilt.engines.settings import Training
from fedquilt.runs.result import Run
from fedquilt.runs.run import run
from fedquilt.scenario import Scenario


class LocalPost(Local):
    """A post to devices in this process, and accidents.

    `accident(client, round, letter, device)` may give back an answer of its own, or None to let things go well.
    """

    def __init__(self, project: Project) -> None:
        super().__init__(project)
        self.accident: Callable[[str, int, bytes, Device], Answer | None] = lambda *_: None

    def answer(self, name: str, round_: int, letter: bytes) -> Answer:
        return self.accident(name, round_, letter, self.devices[name]) or super().answer(name, round_, letter)


def federate(
    folder: Path,
    scenario: Scenario,
    method: str,
    rounds: int,
    seed: int = 0,
    transfer: Transfer | None = None,
    rules: Rounds | None = None,
    **options: Any,
) -> tuple[Federation, LocalPost]:
    """A federation of a scenario's clients over the local post."""
    project = create_from_scenario(folder, scenario, Address(), rules, transfer)
    post = LocalPost(project)
    secret = options.pop("secret", None)
    spec = {"run": "test", "method": method, "rounds": rounds, "seed": seed, **options}
    return make_federation(project, spec, post, declare(project, spec, post), secret=secret), post


class Network:
    """A federation of real processes on this machine; leaving the context ends them all."""

    def __init__(self, project: Project, but: Sequence[str] = ()) -> None:
        self.project, self.but = project, but
        self.server = ServerSide(project, gate=shutil.which("nginx") is not None)
        self.nodes: dict[str, Service] = {}

    def __enter__(self) -> Network:
        self.server.__enter__()
        try:
            for name in set(self.project.clients) - set(self.but):
                self.start(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.process.terminate()  # all at once, then each in turn
        for node in self.nodes.values():
            node.stop()
        self.server.__exit__(None, None, None)

    def start(self, name: str) -> None:
        folder = self.project.client_folder(name)
        self.nodes[name] = start_nodes([folder], [folder / "data.npz"])

    def run(self, method: str, **options: Any) -> tuple[Path, dict[str, Any]]:
        spec = new_spec(self.project, method, **options)
        return Path(spec["folder"]), follow(self.project, spec, start_run(self.project, spec))


def simulate(scenario: Scenario, method: str, rounds: int, seed: int = 0, **options: Any) -> Run:
    """The same in a simulation."""
    return run(scenario, method, rounds, seed, device="cpu", engine="sequential", alone=False, **options)


def row_key(row: Mapping[str, Any]) -> tuple[int, str, str, str]:
    return row["round"], row["client"], row["readout"], row["split"]


def same_rows(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Asserts that two runs gave every client the same scores after every round."""
    mine, other = ({row_key(row): row for row in rows} for rows in (ours, theirs))
    assert set(mine) == set(other)
    for key, row in mine.items():
        assert row["samples"] == other[key]["samples"], key
        assert row.keys() == other[key].keys(), key
        for name in {"accuracy", "f1"} & row.keys():
            assert abs(row[name] - other[key][name]) < 1e-5, key
        for name in {"loss", "training_loss", "rmse", "mae", "r2", "perplexity"} & row.keys():
            assert (row[name] is None) == (other[key][name] is None), (key, name)
            assert row[name] is None or math.isclose(row[name], other[key][name], rel_tol=1e-3, abs_tol=1e-5), key


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


def digits_with_public(
    clients: int = 4, unlike: bool = False, changes: bool = False, each: int = 60, hidden: int = 24
) -> Scenario:
    """Digits dealt out to clients, some kept by the server; on wish unlike models, and changes in rounds 2 and 3."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = (pixels.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    public, rest = order[:80], order[80:]
    made = []
    for i in range(clients):
        # Half of the clients know the lower digits, half the upper ones, and all the middle.
        own = tuple(range(7)) if i % 2 == 0 else tuple(range(3, 10))
        mine = [j for j in rest[i::clients] if labels[j] in own][:each]
        train, test = mine[: each * 2 // 3], mine[each * 2 // 3 :]
        other = (unlike and i % 2) or hidden != 24
        model = partial(deploy_models.dense, hidden) if other else partial(deploy_models.convolving, 8)
        planned: dict[int, Change] = {}
        if changes and i == 0:
            planned = {
                2: Change(train=(x[train[:20]], labels[train[:20]])),
                3: Change(partial(deploy_models.dense, 12)),
            }
        made.append(
            Client(
                f"client-{i}",
                model,
                (x[train[4:]], labels[train[4:]]),
                (x[train[:4]], labels[train[:4]]),
                (x[test], labels[test]),
                {"device": "b" if unlike and i % 2 else "a", "cohort": "ab"[i % 2]},
                own,
                planned,
            )
        )
    training = Training(rounds=4, epochs=1, batch=16, lr=0.1, momentum=0.9)
    return Scenario(
        "digits-public",
        made,
        training,
        (x[public[:50]], labels[public[:50]]),
        (x[public[50:]], labels[public[50:]]),
        [str(d) for d in range(10)],
    )


class PowerCut(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def cut_at(moment: int) -> Callable[..., None]:
    """An accident of a post: the power goes when so many letters have passed."""
    passed = itertools.count(1)

    def cut(*_: object) -> None:
        if next(passed) == moment:
            raise PowerCut

    return cut
