"""Federated averaging as anybody would write it: torch.optim, `loss.backward()`, a weighted mean in double precision.

Nothing of the engines is used here; only the order of batches and the first weights are the library's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt._util.randomness import key_of, streams
from fedquilt.engines.schedule import orders

CLASSES = 3
Builder = Callable[[], nn.Module]
Draw = Callable[[int, torch.Generator], Tensor]


def scenario_of(build: Builder, sizes: Sequence[int], draw: Draw, training: fq.Training) -> fq.Scenario:
    """Clients of these sizes with random samples and labels."""
    generator = torch.Generator().manual_seed(5)
    clients = []
    for i, size in enumerate(sizes):
        train, test = (
            (draw(n, generator), torch.randint(0, CLASSES, (n,), generator=generator)) for n in (size, 3 + i)
        )
        clients.append(fq.Client(f"c{i}", build, train, test=test, labels=range(CLASSES)))
    return fq.Scenario("conformance", clients, training)


def first_model(build: Builder) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_of("model", 0))
        return build()


def batches(name: str, count: int, round_: int, training: fq.Training) -> list[Tensor]:
    """Which samples each step of a client takes."""
    key = np.array([key_of(0, name)], dtype=np.uint64)
    order = orders(torch.from_numpy(streams(key, round_, training.epochs)), None, count)[0]  # (epochs, count)
    return [index for epoch in order for index in epoch.split(training.batch)]


def train(model: nn.Module, client: fq.Client, round_: int, training: fq.Training) -> None:
    """One round of a client's local training, in place."""
    optimiser: torch.optim.Optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return
    if training.optimiser == "sgd":
        optimiser = torch.optim.SGD(trained, training.lr, training.momentum, weight_decay=training.weight_decay)
    else:
        optimiser = torch.optim.Adam(trained, training.lr, training.betas, weight_decay=training.weight_decay)
    for index in batches(client.name, client.samples, round_, training):
        optimiser.zero_grad()
        F.cross_entropy(model(client.train.x[index]), client.train.y[index]).backward()
        optimiser.step()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, those left out of a state dict included."""
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def fedavg(scenario: fq.Scenario, rounds: int) -> dict[str, dict[str, Tensor]]:
    """Every client's parameters and buffers after its last local training."""
    found: dict[str, dict[str, Tensor]] = {}
    mean: dict[str, Tensor] = {}
    for round_ in range(1, rounds + 1):
        now = [(client.at(round_), first_model(client.at(round_).model)) for client in scenario.clients]
        for client, model in now:
            with torch.no_grad():
                for name, tensor in tensors(model).items():
                    tensor.copy_(mean[name] if mean else tensor)
            train(model.train(), client, round_, scenario.training)
            found[client.name] = copy.deepcopy(tensors(model))
        total = sum(client.samples for client, _ in now)
        mean = {
            name: torch.stack([found[c.name][name].double() * (c.samples / total) for c, _ in now]).sum(0)
            for name in found[now[0][0].name]
        }
    return found
