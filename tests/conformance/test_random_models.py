"""Modules put together at random, samples and parameters that lie in any order: engines beside a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import fedavg, scenario_of
from test_conformance import compare, trained
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq

SIDES = (2, 3)  # of a sample; every block takes (n, 2, 3) and gives the same


class Block(nn.Module):
    """A layer, and how samples come to it and go on."""

    def __init__(self, layer: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer, x)


class Product(nn.Module):
    """A weight in an einsum, whose gradient lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,oi->bto", x, self.w)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Block(nn.Linear(6, 6), lambda m, x: m(x.flatten(1)).view(-1, *SIDES)),
    "last": lambda: Block(nn.Linear(3, 3), lambda m, x: m(x)),
    "tanh": nn.Tanh,
    "relu": lambda: nn.LeakyReLU(0.1, inplace=True),
    "convolution": lambda: Block(nn.Conv1d(2, 2, 3, padding=1), lambda m, x: m(x)),
    "permuted convolution": lambda: Block(
        nn.Conv1d(3, 3, 1), lambda m, x: m(x.permute(0, 2, 1)).permute(0, 2, 1)
    ),
    "residual": lambda: Block(nn.Linear(3, 3), lambda m, x: x + m(x).tanh()),
    "layer norm": lambda: nn.LayerNorm(3),
    "batch norm": lambda: nn.BatchNorm1d(2),
    "group norm": lambda: nn.GroupNorm(1, 2),
    "einsum": Product,
    "attention": lambda: Block(nn.MultiheadAttention(3, 1, batch_first=True), lambda m, x: m(x, x, x)[0]),
    "GRU": lambda: Block(nn.GRU(3, 3, batch_first=True), lambda m, x: m(x)[0]),
    "normalised": lambda: Block(nn.Identity(), lambda m, x: F.normalize(x, dim=2)),
}  # fmt: skip


def laid_out(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The same numbers, with dimensions in another order in memory."""
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(*order).contiguous().permute(*back)


def any_order(dimensions: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sampled_from(list(permutations(range(dimensions))))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    names=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=4),
    samples=any_order(3),
    flipped=st.booleans(),
    sizes=st.sampled_from([(8, 8), (11, 7), (4, 15)]),
    momentum=st.sampled_from([0.0, 0.9]),  # Adam would blow up what rounding leaves of gradients that are 0
)
def test_engines_give_what_a_plain_loop_gives(
    names: list[str], samples: tuple[int, ...], flipped: bool, sizes: tuple[int, ...], momentum: float
) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(BLOCKS[name]() for name in names), nn.Flatten(), nn.Linear(6, 3))
        for parameter in model.parameters():
            order = tuple(reversed(range(parameter.ndim))) if flipped else tuple(range(parameter.ndim))
            parameter.data = laid_out(parameter.data, order) if parameter.ndim > 1 else parameter.data
        return model

    training = fq.Training(rounds=2, batch=4, lr=0.02, momentum=momentum)
    scenario = scenario_of(
        build, sizes, lambda n, generator: laid_out(torch.randn(n, *SIDES, generator=generator), samples), training
    )
    expected = fedavg(scenario, 2)
    for engine in ("sequential", "vectorised"):
        compare(trained(scenario, 2, engine)[0], expected, 2e-5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    names=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=0, max_size=2),
    drops=st.lists(st.sampled_from(["layer", "channels", "function", "alpha", "noise"]), min_size=1, max_size=3),
    samples=any_order(3),
)
def test_engines_draw_the_same_numbers(names: list[str], drops: list[str], samples: tuple[int, ...]) -> None:
    drawing: dict[str, Callable[[], nn.Module]] = {
        "layer": lambda: nn.Dropout(0.3),
        "channels": lambda: nn.Dropout1d(0.3),
        "function": lambda: Block(nn.Identity(), lambda m, x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1)),
        "alpha": lambda: nn.AlphaDropout(0.3),
        "noise": lambda: Block(nn.Identity(), lambda m, x: x + 0.1 * torch.randn_like(x) * torch.rand(())),
    }

    def build() -> nn.Module:
        kinds = BLOCKS | drawing
        return nn.Sequential(*(kinds[name]() for name in [*drops, *names]), nn.Flatten(), nn.Linear(6, 3))

    scenario = scenario_of(
        build, (11, 7), lambda n, generator: laid_out(torch.randn(n, *SIDES, generator=generator), samples),
        fq.Training(rounds=2, batch=4, lr=0.02),
    )  # fmt: skip
    compare(trained(scenario, 2, "vectorised")[0], trained(scenario, 2, "sequential")[0], 2e-5)
