"""The same scenario, method and seed give the same numbers over letters as in a simulation: the border is real.

Here letters are handed over in this process; `test_deploy_network.py` sends the same ones over a network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from functools import partial

import torch
from _pytest.mark import ParameterSet
from deploy_help import digits_with_public, federate, same_rows
from torch import nn

from fedquilt import Client, Training
from fedquilt._util.toml import values_of
from fedquilt.core.evaluation import look_at, measure
from fedquilt.core.federation import Federation
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.methods import FedAvg
from fedquilt.readouts import READOUTS, Vote
from fedquilt.runs.rebuilding import make_method, make_readouts
from fedquilt.scenario import Scenario
from fedquilt.scenarios import build
from fedquilt.tasks import Task, Tokens
from fedquilt.testing import small_scenario

ROUNDS = 4


def more(*values: Any) -> ParameterSet:
    """A variant for the longer tests."""
    return pytest.param(*values, marks=pytest.mark.deploy)


KINDS = [
    ("fedavg", {}, {"unlike": True}),
    ("modfl", {"split": 2}, {"unlike": True}),
    ("feddl", {"interval": 1}, {}),
    ("fedmn", {"blocks": [2, 2]}, {}),
    ("score-sharing", {}, {"unlike": True, "changes": True}),
    more("fedavg", {}, {}),
    more("modfl", {"split": 2, "by": {"configuration": "device", "operation": "found"}, "cohorts": 2, "every": 1}, {}),
    more("feddl", {"interval": 1, "linkage": "average"}, {}),
    more("feddl", {"interval": 1}, {"unlike": True}),
    more("fedmn", {"blocks": {"a": [2, 2], "b": [2, 2]}}, {"unlike": True}),
    more("score-sharing", {}, {"unlike": True}),
    more("fedper", {}, {}),
    more("local", {}, {}),
]


def compare(folder: Path, scenario: Scenario, method: str, settings: dict[str, Any], readouts: list[str]) -> None:
    training = scenario.training.but({"rounds": ROUNDS})
    simulated = Federation(
        scenario, make_method(method, values_of(settings)), training, device="cpu", engine="sequential",
        readouts=make_readouts(readouts),
    )  # fmt: skip
    deployed, _ = federate(folder, scenario, method, ROUNDS, settings=settings, readouts=readouts)
    theirs: list[dict[str, Any]] = []
    ours: list[dict[str, Any]] = []
    for _ in range(ROUNDS):
        expected, got = simulated.step(), deployed.step()
        assert deployed.server.plan == simulated.server.plan, f"plans after round {expected.round}"
        assert got.traffic.total_up == expected.traffic.total_up
        assert got.traffic.total_down == expected.traffic.total_down
        values = {key: circle_values for circle_values in simulated.server.all_values for key in circle_values.keys}
        for circle_values in deployed.server.all_values:
            for key in circle_values.keys:
                torch.testing.assert_close(circle_values.column(key), values[key].column(key), rtol=1e-4, atol=1e-5)
        theirs += [row for evaluation in expected.evaluations for row in evaluation.rows()]
        ours += [row for evaluation in got.evaluations for row in evaluation.rows()]
    ours += [row for evaluation in deployed.evaluate(last=True) for row in evaluation.rows()]
    same_rows(ours, theirs)
    assert remote(deployed).left_out == {}


@pytest.mark.parametrize(("method", "settings", "how"), KINDS)
def test_letters_change_no_number(tmp_path: Path, method: str, settings: dict[str, Any], how: dict[str, Any]) -> None:
    compare(tmp_path / "fed", digits_with_public(**how), method, settings, ["received", "adapted"])


def test_every_read_out_works_on_a_device(tmp_path: Path) -> None:
    names = [name for name in READOUTS if name not in ("best-of-last", "vote")] + ["best-of-last-2"]
    compare(tmp_path / "fed", digits_with_public(), "fedavg", {}, names)


def test_on_a_device_the_vote_knows_no_other_client(tmp_path: Path) -> None:
    scenario = digits_with_public()
    training = scenario.training.but({"rounds": 1})
    simulated = Federation(scenario, FedAvg(), training, device="cpu", engine="sequential")
    deployed, _ = federate(tmp_path / "fed", scenario, "fedavg", 1, readouts=["vote"])
    simulated.step(), deployed.step()
    found = {e.split: e.counts for e in deployed.evaluate(last=True) if e.readout == "vote"}
    for number in range(len(scenario.clients)):
        by_itself = look_at(simulated.simulation, simulated.server.instructions([number]), last=True)
        for (_, split), (counts, *_) in measure(by_itself, [Vote()]).items():
            assert torch.equal(counts.to_dense()[0], found[split][number])


@pytest.mark.parametrize("task", ["regression", Tokens(lead="perplexity")])
def test_numbers_and_tokens_go_over_letters(tmp_path: Path, task: str | Task) -> None:
    if isinstance(task, str):
        scenario = small_scenario(task=task)
    else:
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(0, 3, (4, 9, 5), generator=draw)
        clients = [
            Client(f"c{i}", partial(nn.Embedding, 3, 3), (x[i], (x[i] + i) % 3), test=(x[i], (x[i] + i) % 3))
            for i in range(4)
        ]
        scenario = Scenario("tokens", clients, Training(lr=0.5), task=task)
    compare(tmp_path / "fed", scenario, "ditto", {}, ["received", "adapted"])


def test_the_bundled_scenario(tmp_path: Path) -> None:
    compare(tmp_path / "fed", build("digits", clients=8), "modfl", {}, ["received", "adapted"])
