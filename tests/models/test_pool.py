"""Module pools and gates: numbers worked out by hand, and what gates put to use."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedquilt.models.gates import (
    Gates,
    active_blocks,
    binary_concrete,
    block_names,
    decide,
    keep_one_path,
    paths,
    sample_gates,
)
from fedquilt.models.pool import Joint, ModulePool, RoutedNetwork, Router, assembled, split_head


class Times(nn.Module):
    """An encoder or block of one weight."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def by_hand() -> ModulePool:
    """Two encoders, two blocks, one output, each a factor: 1, 3 | 2, 5 (then ReLU) | 10."""
    pool = ModulePool(lambda: Times(1.0), [2, 2, 1], features=1, classes=1, dropout=0.0)
    with torch.no_grad():
        pool.encoder[1].factor.fill_(3.0)  # type: ignore[operator]
        for j, factor in enumerate((2.0, 5.0)):
            linear = pool.block["1"][j][0]  # type: ignore[index]
            linear.weight.fill_(factor)
            linear.bias.zero_()
        pool.output[0].weight.fill_(10.0)  # type: ignore[operator]
        pool.output[0].bias.zero_()  # type: ignore[operator]
    return pool


def test_a_pool_of_four_factors_gives_the_means_of_eq_11() -> None:
    pool, x = by_hand(), torch.ones(1, 1)
    # gates: e0->b0 e0->b1 e1->b0 e1->b1 | b0->o b1->o | o->prediction
    # All open: both blocks get (1 + 3) / 2 = 2, give 4 and 10; the output gets 7, gives 70.
    assert pool(x, torch.ones(7)).item() == pytest.approx(70.0)
    # e0 -> b0 only and b0 -> o only: 1 -> 2 -> 20.
    assert pool(x, torch.tensor([1.0, 0, 0, 0, 1, 0, 1])).item() == pytest.approx(20.0)
    # Relaxed: b0 gets (1/2 * 1 + 1/4 * 3) / (3/4) = 5/3, gives 10/3; b1 gets 3, gives 15;
    # o gets (1 * 10/3 + 1/2 * 15) / (3/2) = 65/9, gives 650/9; the last gate alone in its mean has no effect.
    gates = torch.tensor([0.5, 0.0, 0.25, 1.0, 1.0, 0.5, 0.3])
    assert pool(x, gates).item() == pytest.approx(650 / 9)


def test_a_block_that_nothing_reaches_is_silent_even_where_its_own_gate_is_open() -> None:
    pool, x = by_hand(), torch.ones(1, 1)
    with torch.no_grad():
        pool.block["1"][1][0].bias.fill_(100.0)  # type: ignore[index]
    # b1 has no open gate below it; its bias must not reach the output, nor may it count in the mean.
    assert pool(x, torch.tensor([1.0, 0, 0, 0, 1, 1, 1])).item() == pytest.approx(20.0)
    # Nothing leads through at all: the prediction is zero, not NaN.
    assert pool(x, torch.zeros(7)).item() == 0.0


def test_blocks_of_a_layer_are_different_objects_with_different_weights() -> None:
    pool = ModulePool(lambda: nn.Linear(4, 6), [3, 3, 3], features=6, classes=5)
    for layer in pool.layers():
        for a, b in itertools.combinations(layer, 2):
            assert a is not b
            first, second = next(iter(a.parameters())), next(iter(b.parameters()))
            assert first.data_ptr() != second.data_ptr()
            assert not torch.equal(first, second)


def test_the_number_and_names_of_gates_and_blocks() -> None:
    assert paths([3, 3, 3]) == 3 * 3 + 3 * 3 + 3
    assert paths([2, 5]) == 15
    assert block_names([2, 1, 2]) == ("encoder.0", "encoder.1", "block.1.0", "output.0", "output.1")
    assert block_names([1, 1, 1, 1]) == ("encoder.0", "block.1.0", "block.2.0", "output.0")


@pytest.mark.parametrize("blocks", [[3], [2, 0, 2], []])
def test_a_list_that_is_no_pool_is_refused(blocks: list[int]) -> None:
    with pytest.raises(ValueError, match="is no pool"):
        ModulePool(lambda: nn.Linear(1, 1), blocks, features=1, classes=2)


def walk(gates: Tensor, blocks: list[int]) -> set[int]:
    """Active blocks the slow way: every complete path, block by block."""
    starts = [sum(blocks[:at]) for at in range(len(blocks))]
    edges, at = {}, 0
    for layer, n in enumerate(blocks):
        for k, j in itertools.product(range(n), range(blocks[layer + 1] if layer + 1 < len(blocks) else 1)):
            edges[layer, k, j] = bool(gates[at] > 0.5)
            at += 1
    used: set[int] = set()
    for path in itertools.product(*(range(n) for n in blocks)):
        steps = zip(range(len(blocks)), path, (*path[1:], 0), strict=True)
        if all(edges[step] for step in steps):
            used |= {start + j for start, j in zip(starts, path, strict=True)}
    return used


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(0, 10_000), st.floats(0.1, 0.9))
def test_active_blocks_are_those_on_complete_paths_and_one_is_always_kept(
    blocks: list[int], seed: int, share: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    gates = (torch.rand(5, paths(blocks), generator=draw) < share).float()
    probabilities = torch.rand(5, paths(blocks), generator=draw)
    kept = keep_one_path(gates, probabilities, blocks)
    for row in range(5):
        before = walk(gates[row], blocks)
        assert set(active_blocks(gates, blocks)[row].nonzero().flatten().tolist()) == before
        if before:
            assert torch.equal(kept[row], gates[row])
        else:
            assert walk(kept[row], blocks)
            assert bool((kept[row] >= gates[row]).all())
    assert torch.equal(kept, vmap(lambda g, p: keep_one_path(g, p, blocks))(gates, probabilities))


def test_the_path_opened_is_the_most_probable_one() -> None:
    # [2, 2, 1]: e0->b0 .9, e0->b1 .2, e1->b0 .3, e1->b1 .8; b0->o .3, b1->o .4; o .1
    # e0-b0-o .9*.3 = .27, e1-b1-o .8*.4 = .32: the second, though e0->b0 is the likeliest step.
    pi = torch.tensor([0.9, 0.2, 0.3, 0.8, 0.3, 0.4, 0.1])
    assert keep_one_path(torch.zeros(7), pi, [2, 2, 1]).tolist() == [0, 0, 0, 1, 0, 1, 1]
    # A decision opens what is above 1/2 (both first steps) and completes the path.
    assert decide(pi.logit(), [2, 2, 1]).tolist() == [1, 0, 0, 1, 0, 1, 1]


def test_binary_concrete_by_hand() -> None:
    # eps = .75: log(.75 / .25) = log 3; Pi = .2: log(.2 / .8) = -log 4; tau = 1/2: sigmoid(2 log(3/4)) = 9 / (9 + 16).
    value = binary_concrete(torch.tensor(math.log(0.25)), torch.tensor(0.75), 0.5)
    assert value.item() == pytest.approx(9 / 25)
    # Cold, it is a Bernoulli draw: 1 with probability Pi.
    draws = binary_concrete(torch.full((20_000,), math.log(0.25)), torch.rand(20_000), 0.01)
    assert (draws > 0.5).float().mean().item() == pytest.approx(0.2, abs=0.01)


def test_straight_through_gates_are_binary_and_carry_the_relaxed_gradient() -> None:
    logits, noise = torch.tensor([0.4, -0.3, 0.2, 0.1, 0.5, -0.2]), torch.full((6,), 0.5)
    relaxed = grad(lambda v: sample_gates(v, noise, 0.7, [2, 2]).sum())(logits)
    through = grad(lambda v: sample_gates(v, noise, 0.7, [2, 2], "straight-through").sum())(logits)
    assert sample_gates(logits, noise, 0.7, [2, 2], "straight-through").tolist() == [1, 0, 1, 1, 1, 0]
    assert torch.allclose(relaxed, through)
    # All closed by the draw: one path is opened.
    closed = sample_gates(torch.full((6,), -1.0), noise, 0.7, [2, 2], "straight-through")
    assert active_blocks(closed, [2, 2]).sum() == 2


def test_router_by_hand() -> None:
    # One feature, two classes, one path; phi_x(x) = x, phi_y = (1, -1), head 2 z + 0.
    # Samples (3, label 0), (1, label 1): centred labels are (1/2, -1/2) and (-1/2, 1/2), so phi_y is 1 and -1.
    # Mean product (3 - 1) / 2 = 1, logit 2, Pi = sigmoid(2). Labels exchanged: -1, logit -2.
    router = Router(nn.Identity, features=1, classes=2, paths=1, normalise=False, start=0.5)
    with torch.no_grad():
        router.phi_y.weight.copy_(torch.tensor([[1.0, -1.0]]))
        router.head.weight.fill_(2.0)
    x, y = torch.tensor([[3.0], [1.0]]), torch.tensor([0, 1])
    assert router(x, y).item() == pytest.approx(2.0)
    assert router(x, 1 - y).item() == pytest.approx(-2.0)
    # Padding does not count.
    padded = torch.cat([x, torch.tensor([[50.0]])]), torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, 0.0])
    assert router(*padded).item() == pytest.approx(2.0)


def same_marginals() -> tuple[Tensor, Tensor, Tensor]:
    """Samples of four classes, their labels, and the labels of a client who calls each class by the next one's name."""
    draw = torch.Generator().manual_seed(3)
    y = torch.arange(400) % 4
    x = torch.randn(4, 6, generator=draw)[y] + 0.3 * torch.randn(400, 6, generator=draw)
    return x, y, (y + 1) % 4


def test_the_product_tells_apart_clients_whose_marginals_agree_and_the_concatenation_does_not() -> None:
    x, y, other = same_marginals()
    torch.manual_seed(0)

    def gap(router: Router) -> float:
        return float((router(x, y) - router(x, other)).detach().abs().max())

    def build(joint: Joint, normalise: bool) -> Router:
        encoder = lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU())  # noqa: E731
        return Router(encoder, features=16, classes=4, paths=21, joint=joint, normalise=normalise)

    # Eq. 9 as printed: a linear layer, averaged, sees the two marginals only. Zero, up to rounding.
    assert gap(build("concat", normalise=False)) < 1e-5
    # With the normalisation of section IV-B the two halves meet in the length of a sample: a trace, no more.
    assert gap(build("concat", normalise=True)) < 0.1
    assert gap(build("product", normalise=False)) > 0.02
    assert gap(build("product", normalise=True)) > 1.0


@pytest.mark.parametrize("kind", ["relaxed", "straight-through"])
@pytest.mark.parametrize("joint", ["product", "concat"])
def test_the_gradient_reaches_every_part_of_the_router_under_vmap(kind: Gates, joint: Joint) -> None:
    torch.manual_seed(0)
    x, y, other = same_marginals()
    net = RoutedNetwork(lambda: nn.Linear(6, 8), [2, 3, 2], features=8, classes=4, joint=joint, gates=kind)
    clients = {name: p.detach().expand(2, *p.shape).clone() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        logits = functional_call(net, parameters, (x,), {"y": y})
        return nn.functional.cross_entropy(
            functional_call(net, parameters, (x,), {"logits": logits, "noise": noise}), y
        )

    noise = torch.rand(2, paths([2, 3, 2]))
    every = vmap(grad(loss), randomness="different")(clients, torch.stack([x, x]), torch.stack([y, other]), noise)
    for name in ("router.phi_x.weight", "router.phi_y.weight", "router.head.weight", "router.head.bias"):
        assert (every[name].flatten(1).norm(dim=1) > 1e-6).all(), name


def test_an_assembled_network_is_the_pool_along_its_gates_without_the_rest() -> None:
    torch.manual_seed(1)
    blocks = [3, 3, 2, 3]
    pool = ModulePool(lambda: nn.Linear(4, 8), blocks, features=8, classes=5, width=7).eval()
    x = torch.randn(9, 4)
    for _ in range(10):
        gates = decide(torch.randn(paths(blocks)) - 0.7, blocks)
        net = assembled(pool, gates)
        assert torch.allclose(net(x), pool(x, gates), atol=1e-6)
        number = sum(len(kept) for kept in net.kept)
        assert number == int(active_blocks(gates, blocks).sum())
        assert sum(1 for module in net.modules() if isinstance(module, nn.Linear)) == number


def test_an_assembled_network_without_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_one_path"):
        assembled(by_hand(), torch.zeros(7))


def test_a_routed_network_is_cut_into_its_blocks_the_router_and_the_route() -> None:
    net = RoutedNetwork(lambda: nn.Linear(4, 8), [1, 2, 1], features=8, classes=3)
    assert list(net.units) == ["encoder.0", "block.1.0", "block.1.1", "output.0", "router", "route"]


def test_a_classifier_is_split_into_an_encoder_and_a_head_whatever_it_is_made_of() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4))
    for layers, features in ((1, 7), (2, 12), (5, 12)):
        build, size, width = split_head(model, layers)
        assert (size, width) == (features, 7)
        first, second = build(), build()
        assert first(torch.zeros(5, 2, 6)).shape == (5, features)
        # Both have the model's weights, which may be pretrained, and neither is the other.
        kernel, other = (next(iter(e.parameters())).detach().flatten() for e in (first, second))
        assert torch.equal(kernel, model[0].weight.detach().flatten())  # type: ignore[operator]
        assert torch.equal(kernel, other)
        assert first is not second
        assert torch.equal(kernel.sort().values, other.sort().values)
    with pytest.raises(ValueError, match="build the client's model as a RoutedNetwork"):
        split_head(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), 2)


def test_a_router_that_sees_its_samples_in_parts_says_the_same() -> None:
    x, y, _ = same_marginals()
    router = Router(lambda: nn.Linear(6, 8), features=8, classes=4, paths=9)
    assert torch.allclose(router(x, y), router.eval()(x, y), atol=1e-6)
