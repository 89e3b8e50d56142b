"""Clients by hand: plain PyTorch. Of the library's code only the first weights, who takes part and in what order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt._util.randomness import streams
from fedquilt.engines.schedule import orders

Weights = dict[str, Tensor]
Loss = Callable[[Weights], Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def scenario(
    sizes: Sequence[int] = (6, 9, 4), rounds: int = 3, batch: int = 100, groups: int = 1, **training: object
) -> fq.Scenario:
    """Clients with points of three classes; whole data a batch unless said otherwise. Groups name classes otherwise."""
    draw = torch.Generator().manual_seed(3)
    centres = 2 * torch.randn(3, 3, generator=draw)
    clients = []
    for i, size in enumerate(sizes):
        splits = []
        for n in (size, 5, 8):
            y = torch.randint(0, 3, (n,), generator=draw)
            splits.append((centres[y] + 0.5 * torch.randn(n, 3, generator=draw), (y + i % groups) % 3))
        train, validation, test = splits
        clients.append(fq.Client(f"c{i}", net, train, validation, test))
    how = fq.Training(**{"rounds": rounds, "epochs": 1, "batch": batch, "lr": 0.3, **training})  # type: ignore[arg-type]
    return fq.Scenario("plain", clients, how, label_names=("a", "b", "c"))


def federation(of: fq.Scenario, method: fq.Method, engine: str = "sequential", **more: object) -> fq.Federation:
    return fq.Federation(of, method, device="cpu", engine=engine, **more)  # type: ignore[arg-type]


def loss_of(client: fq.Client) -> Loss:
    """The cross-entropy of a client's training samples as a function of the weights."""
    module = net()
    return lambda weights: F.cross_entropy(functional_call(module, weights, (client.train.x,)), client.train.y)


def gradient(loss: Loss, at: Mapping[str, Tensor]) -> Weights:
    """By ordinary autograd."""
    leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
    loss(leaves).backward()
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def moved(weights: Mapping[str, Tensor], way: Mapping[str, Tensor], far: float) -> Weights:
    return {name: value + far * way[name] for name, value in weights.items()}


def mean(copies: Sequence[Weights], weight: Sequence[float]) -> Weights:
    total = sum(weight)
    return {
        n: sum((w / total * c[n] for c, w in zip(copies, weight, strict=True)), 0 * copies[0][n]) for n in copies[0]
    }


def weights_of(module: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def first_weights(of: fq.Scenario) -> Weights:
    fed = federation(of, fq.methods.Local())
    return weights_of(fed.model("c0"))


def close(one: Mapping[str, Tensor], other: Mapping[str, Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]


def served(fed: fq.Federation) -> Weights:
    """The server's values of a model that is everybody's, by the names of its parameters."""
    layout = fed.simulation.family_states[0].family.layout
    found: Weights = {}
    for unit in layout.units:
        if not unit.state:
            held = fed.server.held(unit.name, torch.tensor([0]))[0].cpu()
            found |= {name.removeprefix("model."): value for name, value in layout.named(unit.name, held).items()}
    return found


def state(fed: fq.Federation, client: int, name: str) -> Tensor:
    """What a method keeps with a client under a name, as one vector."""
    family_state = fed.simulation.family_states[0]
    return family_state.family.layout.take(family_state.store.take([client]), name)[0]


def flat(weights: Weights) -> Tensor:
    return torch.cat([value.flatten() for value in weights.values()])


def order_of(fed: fq.Federation, client: int, round_: int) -> Tensor:
    """The order of a client's samples in the one epoch of a round: what decides what a batch is, or its parts."""
    samples = fed.simulation.family_states[0].samples
    key = np.array([samples.key[client]], dtype=np.uint64)
    return orders(torch.from_numpy(streams(key, round_, 1)), None, samples.count[client])[0, 0]
