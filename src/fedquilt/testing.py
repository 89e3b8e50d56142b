"""What a method must do to be trusted, as checks that anybody can run on a method of their own.

>>> from fedquilt.methods import FedAvg
>>> from fedquilt.testing import check_method
>>> check_method(FedAvg(), only=["traffic", "private"])
['traffic', 'private']
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fedquilt._util.suggest import did_you_mean
from fedquilt.client import Client
from fedquilt.core.federation import Federation
from fedquilt.engines.parallel import can_fork
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import Instructions, Update
from fedquilt.interface.method import Method
from fedquilt.methods.find import in_library
from fedquilt.runs.checkpoint import federation_state, load, restore_federation, save
from fedquilt.runs.onboarding import onboard
from fedquilt.runs.run import run
from fedquilt.scenario import Scenario
from fedquilt.sharing.traffic import BYTES

ROUNDS = 3
TOLERANCE = 2e-5
SIZES = (11, 7, 9, 12, 8, 10)
Make = Callable[..., Scenario]


class SmallNet(nn.Module):
    """A network of two modules, of a few layers and of one, for six numbers and, usually, three classes."""

    def __init__(self, width: int = 8, outputs: int = 3) -> None:
        super().__init__()
        self.configuration = nn.Sequential(
            nn.LayerNorm(6), nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh()
        )
        self.operation = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.operation(self.configuration(x))
        return out


def small_scenario(unlike: bool = False, share: float = 1.0, task: str = "classification") -> Scenario:
    """Six clients of unlike sizes, with traits and public samples; on wish every second one has a wider network.

    With the task regression there is a number to predict in the place of a class.

    >>> [client.samples for client in small_scenario().clients]
    [11, 7, 9, 12, 8, 10]
    """
    draw, classes = torch.Generator().manual_seed(5), task == "classification"
    centres = 1.5 * torch.randn(3, 6, generator=draw)

    def samples(count: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        y = torch.arange(count) % 3
        x = centres[y] + torch.randn(count, 6, generator=draw)
        return x, (y + shift) % 3 if classes else x[:, 0] - (y + shift) % 3 + 0.5

    clients = [
        Client(
            f"client-{i}",
            partial(SmallNet, 12 if unlike and i % 2 else 8, 3 if classes else 1),
            samples(size, i % 2),
            samples(6, i % 2),
            samples(9, i % 2),
            {"device": f"gen{i % 2 + 1}", "cohort": ("north", "south")[i // 3]},
        )
        for i, size in enumerate(SIZES)
    ]
    training = Training(rounds=ROUNDS, epochs=2, batch=4, lr=0.1, share=share)
    return Scenario("small", clients, training, samples(12), samples(9), ("a", "b", "c") if classes else (), task=task)


def check_method(
    method: Method, only: Sequence[str] | None = None, task: Literal["classification", "regression"] = "classification"
) -> list[str]:
    """Check a method on small federations; an AssertionError says what does not hold. Gives the checks that were made.

    The checks, by name: *engines* (all of them give the same numbers), *resume* (a run that was stopped ends in the
    same bits), *private* (only what the plan says leaves a client), *traffic* (what is counted is what was sent),
    *participation* (whoever is not chosen stays as it is), *unlike* (clients of unlike architectures, or a sentence
    that says why not), *newcomer* (a client that joins later gets its place, and nobody else is moved) and *network*
    (on devices that speak by letters, the numbers of a simulation; where the extra `deploy` is installed). With
    `task="regression"` its clients have a number to predict.
    """
    make: Make = partial(small_scenario, task=task)
    names = list(CHECKS) if only is None else list(only)
    for name in names:
        if name not in CHECKS:
            raise ValueError(did_you_mean(name, CHECKS, "check"))
    return [name for name in names if CHECKS[name](method, make) is not False]


def _require(holds: bool, otherwise: str) -> None:
    """Not a statement, which Python leaves out where it optimises."""
    if not holds:
        raise AssertionError(otherwise)


def _federation(scenario: Scenario, method: Method, engine: str = "sequential") -> Federation:
    return Federation(scenario, method, device="cpu", engine=engine, readouts=())


def _rows(federation: Federation) -> dict[str, Tensor]:
    """Every client's numbers, by name."""
    return {
        client.name: row.clone()
        for family_state in federation.simulation.family_states
        for client, row in zip(family_state.clients, family_state.store.all(), strict=True)
    }


def _held(federation: Federation) -> dict[str, Tensor]:
    """The server's values, by unit and shape."""
    return {
        str(key): circle_values.column(key)
        for circle_values in federation.server.all_values
        for key in circle_values.keys
    }


def _same(one: dict[str, Tensor], other: dict[str, Tensor], what: str, tolerance: float = 0.0) -> None:
    for name, numbers in one.items():
        gap = float((numbers - other[name]).abs().max()) if numbers.numel() else 0.0
        _require(gap <= tolerance, f"{what}: '{name}' is off by {gap:.2g}")


def check_engines(method: Method, make: Make = small_scenario) -> None:
    """All engines give the same numbers."""
    found = {}
    for engine in ("sequential", "vectorised", *(("parallel", "parallel-stacks") if can_fork() else ())):
        federation = _federation(make(), method, engine)
        try:
            federation.run()
            found[engine] = _rows(federation)
        finally:
            federation.close()
    for engine, rows in found.items():
        _same(rows, found["sequential"], f"the engine '{engine}' differs from 'sequential'", TOLERANCE)


def check_resume(method: Method, make: Make = small_scenario) -> None:
    """A federation that was kept after a round and put back goes on to the same bits."""
    scenario = make(share=0.5)
    straight, kept = _federation(scenario, method), _federation(scenario, method)
    kept.step(evaluate=False)
    with tempfile.TemporaryDirectory() as folder:
        tensors: dict[str, Tensor] = {}
        text = federation_state(kept, tensors)
        save(Path(folder), tensors, text)
        found = load(Path(folder))
        assert found is not None
        again = _federation(scenario, method)
        restore_federation(again, *found)
        straight.run()
        again.run()
    _same(_rows(again), _rows(straight), "what was stopped and went on differs from what ran through")
    _same(_held(again), _held(straight), "the server has other values after a stop")


def _tapped(federation: Federation) -> list[tuple[Instructions, Update]]:
    """The messages that pass from now on, copied."""
    passed: list[tuple[Instructions, Update]] = []
    handed = federation.simulation.run

    def tapped(down: Instructions) -> Update:
        up = handed(down)
        passed.append((copy.deepcopy(down), copy.deepcopy(up)))
        return up

    federation.simulation.run = tapped  # type: ignore[method-assign]
    return passed


def _sent(up: Update) -> dict[int, dict[str, int]]:
    """How many numbers of which units each client sent."""
    sent: dict[int, dict[str, int]] = {i: {} for i in up.ids}
    for block in up.blocks:
        places = range(len(up.ids)) if block.places is None else block.places.tolist()
        for place in places:
            sent[up.ids[place]] |= dict(zip(block.units, block.sizes, strict=True))
    return sent


def check_private(method: Method, make: Make = small_scenario) -> None:
    """What leaves a client is what the plan says, and nothing else."""
    federation = _federation(make(), method)
    passed = _tapped(federation)
    for _ in range(ROUNDS):
        plan = federation.server.plan
        passed.clear()
        federation.step(evaluate=False)
        for _, up in passed:
            for i, units in _sent(up).items():
                beyond = [unit for unit in units if not bool(plan.sends(unit)[i])]
                _require(not beyond, f"client {i} sent {beyond}, which the plan keeps at home:\n{plan}")


def check_traffic(method: Method, make: Make = small_scenario) -> None:
    """The bytes that are counted are those of the messages."""
    federation = _federation(make(share=0.5), method)
    passed = _tapped(federation)
    for _ in range(ROUNDS):
        passed.clear()
        report = federation.step(evaluate=False)
        up = sum(BYTES * sum(units.values()) for _, up in passed for units in _sent(up).values())
        up += sum(value.numel() * value.element_size() for _, each in passed for value in each.reports.values())
        counted = report.traffic.total_up
        _require(counted == up, f"round {report.round}: {counted} bytes up are counted, {up} were sent")


def check_participation(method: Method, make: Make = small_scenario) -> None:
    """Whoever is not chosen in a round stays as it is."""
    federation = _federation(make(share=0.5), method)
    names = [client.name for client in federation.scenario.clients]
    for _ in range(ROUNDS):
        before = _rows(federation)
        report = federation.step(evaluate=False)
        after = _rows(federation)
        resting = {names[i] for i in range(len(names))} - {names[i] for i in report.participants}
        _same({n: before[n] for n in resting}, after, "a client that was not chosen has changed")


def check_unlike(method: Method, make: Make = small_scenario) -> None:
    """Clients of unlike architectures take part, or a sentence says why not."""
    try:
        _federation(make(unlike=True), method).run()
    except (ValueError, TypeError) as error:
        _require(len(str(error)) > 30, f"unlike architectures are refused, but not in a sentence: {error}")


def check_newcomer(method: Method, make: Make = small_scenario) -> None:
    """A client that joins a finished run gets a place in its plan, and nobody else's is touched."""
    scenario = make()
    others = replace(scenario, clients=scenario.clients[:-1])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        before = run(others, method, alone=False, engine="sequential", device="cpu", out=out).plan
        joined = onboard(out, scenario.clients[-1], visits=1, scenario=others)
    _require(joined.plan.clients == len(scenario.clients), "the plan with a newcomer is not for everyone")
    for unit, plan in before.units.items():
        for name in ("circle", "matrix"):
            old, new = getattr(plan, name, None), getattr(joined.plan[unit], name, None)
            if old is not None and new is not None and old.ndim == 1:
                same = (old[:, None] == old) == (new[: len(old), None] == new[: len(old)])
                _require(bool(same.all()), f"a newcomer regroups the others' {unit}: let `enrol` keep what was found")


def check_network(method: Method, make: Make = small_scenario) -> bool:
    """Devices that speak by letters give the numbers of a simulation; False where this cannot be tried here."""
    if find_spec("cryptography") is None or in_library(method.name) is not type(method):
        return False
    from fedquilt.deploy.device.local import LocalTransport
    from fedquilt.deploy.ops.create import create_from_scenario
    from fedquilt.deploy.project import Address
    from fedquilt.deploy.server.coordinator import make_federation
    from fedquilt.deploy.server.declarations import declare
    from fedquilt.runs.settings import method_to

    scenario = make()
    simulated = _federation(scenario, method)
    with tempfile.TemporaryDirectory() as folder:
        project = create_from_scenario(Path(folder) / "project", scenario, Address())
        post = LocalTransport(project)
        spec = {"run": "check", "method": method.name, "settings": method_to(method)["settings"], "rounds": ROUNDS}
        remote = make_federation(project, spec, post, declare(project, spec, post))
        for round_ in range(1, ROUNDS + 1):
            simulated.step(evaluate=False)
            remote.step(evaluate=False)
            what = f"on devices, round {round_} gives other values"
            _same(_held(remote), _held(simulated), what, TOLERANCE)
        _require(remote.server.plan == simulated.server.plan, "on devices another plan is found")
    return True


CHECKS: dict[str, Callable[[Method, Make], bool | None]] = {
    "engines": check_engines,
    "resume": check_resume,
    "private": check_private,
    "traffic": check_traffic,
    "participation": check_participation,
    "unlike": check_unlike,
    "newcomer": check_newcomer,
    "network": check_network,
}
