"""Helps tests of runs on disk: a small scenario with all that methods need, and runs killed at a given point."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.client import Change
from fedquilt.methods import METHODS
from fedquilt.runs.checkpoint import load

SETTINGS: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.1},
    "modfl": {"by": {"configuration": "device", "operation": "found"}},
    "feddl": {"interval": 1, "decay": 0.5},
    "fedmn": {"blocks": (2, 2)},
    "apfl": {"mix": "logits"},
}
SUITED = [name for name in METHODS if name != "fedbn"]  # it wants norms in units of their own, and refuses these models


class Net(nn.Module):
    """Two modules, a buffer that training writes to, and dropout."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.configuration = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))
        self.operation = nn.Linear(width, 3)
        self.units = {"configuration": ["configuration.*"], "operation": ["operation.*"]}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.operation(self.configuration(x))
        return y


def build(seed: int = 0, clients: int = 5, changes: bool = False) -> fq.Scenario:
    """Five clients of two devices and two cohorts, public samples, half of the clients chosen in a round."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for i in range(clients):
        x, y = torch.randn(30, 6, generator=draw), torch.randint(0, 3, (30,), generator=draw)
        x[torch.arange(30), y] += 2 + i % 2
        more = (torch.randn(9, 6, generator=draw), torch.arange(9) % 3)
        planned = {3: Change(train=more)} if changes else {}
        if changes and i == 1:
            planned[4] = Change(model=narrow)
        made.append(
            fq.Client(
                f"c{i}", Net, (x[:17], y[:17]), (x[17:23], y[17:23]), (x[23:], y[23:]),
                traits={"device": f"d{i % 2}", "cohort": f"k{i // 2 % 2}"}, labels=(0, 1, 2), changes=planned,
            )
        )  # fmt: skip
    public = torch.randn(12, 6, generator=draw)
    labels = torch.arange(12) % 3
    training = fq.Training(rounds=5, epochs=1, batch=6, lr=0.2, share=0.6)
    return fq.Scenario("tiny", made, training, common=(public, labels), public_test=(public + 1, labels))


def narrow() -> nn.Module:
    """A model that one client changes to."""
    return Net(width=3)


def contents(folder: Path) -> dict[str, Any]:
    """All that a finished run says, but for times and machines."""
    found: dict[str, Any] = {}
    for name in ("metrics.jsonl", "plans.jsonl", "traffic.jsonl", "confusion.json"):
        found[name] = (folder / name).read_text()
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("seconds")
    found["summary"] = summary
    for path in sorted((folder / "models").glob("*.safetensors")):
        found[path.name] = {name: value.numpy().tobytes() for name, value in load_file(path).items()}
    return found | {"checkpoint": kept(folder / "checkpoint")}


def kept(folder: Path) -> dict[str, Any]:
    """What a checkpoint says, whichever of its files the rows of clients lie in: later ones hold."""
    checkpoint = load(folder)
    assert checkpoint is not None
    tensors, text = checkpoint
    found: dict[str, Any] = {"round": text["server"]["round"]}
    for before in [*(f"earlier/{at}/" for at in range(len(text["earlier"]))), ""]:
        for name in [name for name in tensors if name.startswith(f"{before}seen/")]:
            family = name.removeprefix(f"{before}seen/")
            for at, row in zip(tensors[name].tolist(), tensors[f"{before}rows/{family}"], strict=True):
                found[f"row {family}/{at}"] = row.numpy().tobytes()
    others = [name for name in tensors if not name.startswith(("earlier/", "seen/", "rows/"))]
    return found | {name: tensors[name].numpy().tobytes() for name in others}


def dies(what: Callable[[], object]) -> int:
    """Run something in a process of its own; its exit code, negative for a signal."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: none of them is needed
        child = os.fork()
    if child == 0:
        try:
            what()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_me() -> None:
    """As kill -9 would."""
    os.kill(os.getpid(), signal.SIGKILL)
