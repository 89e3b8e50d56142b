"""How much memory clients take over a frozen base: it grows with their adapters, not with the base.

A transformer of about 20 million parameters rests; clients train adapters of rank 8 on the attention's neighbours, the
two linear layers of each block, and a head. Each line is a process of its own that runs two rounds of FedIT and tells
the most memory it had. `--train` lets the base train, for comparison: then it is in every client's row. Run it with

    python benchmarks/adapters.py                     # 2, 10 and 50 clients
    python benchmarks/adapters.py --clients 2 10 --train
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from functools import partial

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.models import with_lora

WIDTH, BLOCKS, TOKENS, CLASSES = 384, 11, 8, 10


class Encoder(nn.Module):
    """A transformer over a few tokens."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x).mean(1))
        return out


def build(train: bool) -> nn.Module:
    return Encoder() if train else with_lora(Encoder(), ["blocks.layers.*.linear?"], rank=8, head=["head"])


def measured(clients: int, train: bool, engine: str, at_once: int) -> dict[str, float]:
    """Two rounds, and what they took."""
    draw = torch.Generator().manual_seed(0)

    def samples(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, TOKENS, WIDTH, generator=draw), torch.arange(count) % CLASSES

    made = [fq.Client(f"c{i}", partial(build, train), samples(8), test=samples(4)) for i in range(clients)]
    training = fq.Training(rounds=2, epochs=1, batch=4, lr=0.01)
    scenario = fq.Scenario("adapters", made, training, label_names=tuple("abcdefghij"))
    method = fq.methods.FedAvg() if train else fq.methods.FedIT()
    federation = fq.Federation(scenario, method, device="cpu", engine=engine, clients_at_once=at_once)
    before = _peak()
    traffic = [federation.step().traffic.total_up for _ in range(2)]
    layout = federation.simulation.family_states[0].family.layout
    base = sum(parameter.numel() for parameter in federation.model("c0").parameters())
    found: dict[str, float] = {"clients": clients, "parameters": base, "row": layout.width, "sent_mb": traffic[0] / 1e6}
    return found | {"built_mb": before, "peak_mb": _peak()}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 10, 50])
    parser.add_argument("--train", action="store_true", help="let the base train")
    parser.add_argument("--engine", default="vectorised")
    parser.add_argument(
        "--at-once", type=int, default=2, help="clients in a stack, whose activations are there at once"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.clients[0], given.train, given.engine, given.at_once)))
        return
    for clients in given.clients:
        words = [str(clients), "--one", "--engine", given.engine, "--at-once", str(given.at_once)]
        command = [sys.executable, __file__, "--clients", *words, *(["--train"] if given.train else [])]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{found['clients']:3d} clients over {found['parameters'] / 1e6:.1f} M parameters: rows of {found['row']}, "
            f"{found['sent_mb']:.1f} MB sent a round, {found['built_mb']:.0f} MB when built, {found['peak_mb']:.0f} MB "
            "at most"
        )


if __name__ == "__main__":
    main()
