"""Layers with another body inside a stack compute what PyTorch's own compute."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from fedquilt.layers.norms import padding
from fedquilt.layers.prepare import cross_entropies, prepare_one, prepare_stack, stackable


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return [y.detach(), *torch.autograd.grad(loss, [x, *module.parameters()])]


@settings(max_examples=40, deadline=None)
@given(
    dimensions=st.sampled_from([1, 2]),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    pad=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    bias=st.booleans(),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_convolutions_as_matrix_products(
    dimensions: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    pad: tuple[int, int],
    bias: bool,
    channels: tuple[int, int],
) -> None:
    kind = nn.Conv1d if dimensions == 1 else nn.Conv2d
    a, b = channels
    conv = kind(a, b, kernel[:dimensions], stride[:dimensions], pad[:dimensions], bias=bias)  # type: ignore[arg-type]
    ours = prepare_stack(copy.deepcopy(conv), gpu=True)
    assert type(ours) is not type(conv)
    x = torch.randn(2, a, *(7, 9)[:dimensions])
    for found, wanted in zip(gradients(ours, x), gradients(conv, x), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("conv", [partial(nn.Conv2d, 2, 3, 3, 2, 1), partial(nn.Conv1d, 2, 3, 3, 2, 1)])
def test_stacked_convolutions_as_matrix_products(conv: partial[nn.Module]) -> None:
    plain = conv()
    ours = prepare_stack(copy.deepcopy(plain), gpu=True)
    shape = (3, 2, 2, 6, 6) if isinstance(plain, nn.Conv2d) else (3, 2, 2, 6)
    x = torch.randn(shape)
    stack = {name: torch.randn(3, *p.shape) for name, p in plain.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, module: nn.Module) -> Tensor:
        out: Tensor = functional_call(module, parameters, (x,))
        return out.square().sum()

    found = vmap(grad(partial(loss, module=ours)))(stack, x)
    for i in range(3):
        wanted = grad(partial(loss, module=plain))({name: p[i] for name, p in stack.items()}, x[i])
        for name, value in wanted.items():
            torch.testing.assert_close(found[name][i], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(1, 1, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
        nn.Conv3d(1, 1, 3),
        nn.ConvTranspose2d(1, 1, 3),
    ],
)
def test_other_convolutions_stay_as_they_are(conv: nn.Module) -> None:
    assert type(prepare_stack(copy.deepcopy(conv), gpu=True)) is type(conv)


IN_GROUPS = [
    (partial(nn.Conv2d, 4, 4, 3, padding=1, groups=4, bias=False), (4, 5, 6)),
    (partial(nn.Conv2d, 4, 8, 3, 2, 1, groups=4), (4, 7, 6)),
    (partial(nn.Conv2d, 4, 6, (3, 2), (1, 2), (0, 1), (2, 1), groups=2), (4, 7, 6)),
    (partial(nn.Conv1d, 4, 4, 3, 2, 1, groups=2), (4, 9)),
]
DILATED = [(partial(nn.Conv2d, 2, 3, 3, 1, 2, 2), (2, 7, 6)), (partial(nn.Conv1d, 2, 3, 3, 2, 0, 3), (2, 9))]


def compare_in_stacks(plain: nn.Module, ours: nn.Module, shape: tuple[int, ...], twice: bool = True) -> None:
    """Gradients, and gradients of their size, of three clients at once and of each by PyTorch's own layer."""
    x = torch.randn(3, 2, *shape)
    stack = {name: torch.randn(3, *p.shape) for name, p in plain.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, module: nn.Module) -> Tensor:
        out: Tensor = functional_call(module, parameters, (x,))
        return (out.square() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()

    def slope(parameters: dict[str, Tensor], x: Tensor, module: nn.Module) -> Tensor:
        found, to_x = grad(partial(loss, module=module), argnums=(0, 1))(parameters, x)
        return torch.stack([value.square().sum() for value in (to_x, *found.values())]).sum()

    for function in (loss, slope) if twice else (loss,):
        found = vmap(grad(partial(function, module=ours), argnums=(0, 1)))(stack, x)
        for i in range(3):
            mine = {name: p[i] for name, p in stack.items()}
            wanted = grad(partial(function, module=plain), argnums=(0, 1))(mine, x[i])
            torch.testing.assert_close(found[1][i], wanted[1], atol=1e-3, rtol=1e-4)
            for name, value in wanted[0].items():
                torch.testing.assert_close(found[0][name][i], value, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(("conv", "shape"), IN_GROUPS + DILATED)
def test_convolutions_in_groups_and_dilated(conv: partial[nn.Module], shape: tuple[int, ...], gpu: bool) -> None:
    torch.manual_seed(2)  # second derivatives of single precision: of some draws sums cancel to few digits
    plain = conv()
    ours = prepare_stack(copy.deepcopy(plain), gpu=gpu)
    assert (type(ours) is type(plain)) == (not gpu and plain.groups == 1)
    x = torch.randn(shape)
    torch.testing.assert_close(ours(x), plain(x))  # a sample by itself
    compare_in_stacks(plain, ours, shape)


def test_a_shared_input_and_a_shared_weight_in_a_stack_of_convolutions_in_groups() -> None:
    """What is the same for all clients is not stacked, and each client has the gradient of its own part."""
    plain = nn.Conv2d(4, 4, 3, groups=4)
    ours = prepare_stack(copy.deepcopy(plain), gpu=False)
    x, weights = torch.randn(2, 4, 5, 5), torch.randn(3, 4, 1, 3, 3)

    def to_weight(weight: Tensor, module: nn.Module) -> Tensor:
        out: Tensor = functional_call(module, {"weight": weight}, (x,))
        return out.square().sum()

    def to_input(x: Tensor, module: nn.Module) -> Tensor:
        out: Tensor = module(x)
        return out.square().sum()

    found = vmap(grad(partial(to_weight, module=ours)))(weights)
    for i in range(3):
        torch.testing.assert_close(found[i], grad(partial(to_weight, module=plain))(weights[i]), atol=1e-3, rtol=1e-4)
    inputs = torch.randn(3, 2, 4, 5, 5)
    found = vmap(grad(partial(to_input, module=ours)))(inputs)
    for i in range(3):
        torch.testing.assert_close(found[i], grad(partial(to_input, module=plain))(inputs[i]), atol=1e-3, rtol=1e-4)


ADAPTIVE = [
    (nn.AdaptiveAvgPool2d(1), (3, 5, 7)),
    (nn.AdaptiveAvgPool2d(2), (3, 4, 6)),
    (nn.AdaptiveAvgPool2d((3, 2)), (3, 7, 5)),  # windows overlap
    (nn.AdaptiveAvgPool2d((None, 4)), (3, 3, 2)),  # more windows than there are pixels
    (nn.AdaptiveAvgPool1d(1), (3, 7)),
    (nn.AdaptiveAvgPool1d(3), (3, 7)),
]


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(("pool", "shape"), ADAPTIVE)
def test_adaptive_pools_in_stacks(pool: nn.Module, shape: tuple[int, ...], gpu: bool) -> None:
    ours = prepare_stack(copy.deepcopy(pool), gpu=gpu)
    assert type(ours) is not type(pool)
    x = torch.randn(shape)
    torch.testing.assert_close(ours(x), pool(x))
    compare_in_stacks(pool, ours, shape)


def test_relu6_at_its_corners() -> None:
    plain = nn.ReLU6()
    ours = prepare_stack(nn.ReLU6(), gpu=False)
    x = torch.tensor([-1.0, 0.0, 1e-3, 3.0, 6.0, 7.0, math.nan])
    for found, wanted in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("norm", [partial(nn.BatchNorm2d, 3), partial(nn.BatchNorm2d, 3, affine=False)])
def test_stacked_norms_differentiate_twice(norm: partial[nn.Module]) -> None:
    plain = norm(track_running_stats=False)
    compare_in_stacks(plain, prepare_stack(copy.deepcopy(plain), gpu=False), (3, 4, 5))


def test_a_norm_of_numbers_far_from_zero() -> None:
    """Of channels whose mean is a thousand times their deviation, in double as the judge."""
    x = torch.randn(64, 3, 4) + 1000.0
    ours = prepare_stack(nn.BatchNorm1d(3), gpu=False)
    for found, wanted in zip(gradients(ours, x), gradients(nn.BatchNorm1d(3).double(), x.double()), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=2e-3, rtol=2e-3)


POOLS = [
    (nn.MaxPool1d(2), (3, 2, 7)),
    (nn.MaxPool1d(2), (3, 6)),  # no batch: channels and length
    (nn.MaxPool2d(2), (2, 3, 5, 8)),
    (nn.MaxPool2d((2, 2), 2), (3, 4, 4)),
    (nn.AvgPool1d(3), (2, 2, 10)),
    (nn.AvgPool2d(2), (2, 3, 7, 6)),
    (nn.AvgPool2d((2, 3)), (2, 3, 5, 7)),
]


@pytest.mark.parametrize("swap", [partial(prepare_stack, gpu=True), partial(prepare_stack, gpu=False), prepare_one])
@pytest.mark.parametrize(("pool", "shape"), POOLS)
def test_pools_side_by_side(pool: nn.Module, shape: tuple[int, ...], swap: Callable[[nn.Module], nn.Module]) -> None:
    ours = swap(copy.deepcopy(pool))
    assert type(ours) is not type(pool)
    equals = torch.randint(-2, 3, shape).float()  # many are equal: the first of them is the maximum
    for x in (equals, torch.randn(shape)):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, wanted = ours(a), pool(b)
        torch.testing.assert_close(out, wanted)
        weight = torch.randn_like(wanted)
        (out * weight).sum().backward()
        (wanted * weight).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
    x.view(-1)[0] = math.nan
    torch.testing.assert_close(ours(x), pool(x), equal_nan=True)


@pytest.mark.parametrize("kind", [nn.MaxPool1d, nn.MaxPool2d])
def test_pools_of_what_a_model_has_masked(kind: type[nn.Module]) -> None:
    """Between two infinities the first is the maximum, and gradients stay numbers."""
    x = torch.full((1, 2, 4, 4), -math.inf)
    x[0, 0, 1, 2] = 3.0
    x = x if kind is nn.MaxPool2d else x[0]
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, wanted = prepare_one(kind(2))(a), kind(2)(b)
    torch.testing.assert_close(out, wanted)
    out.backward(torch.ones_like(out))
    wanted.backward(torch.ones_like(wanted))
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(("pool", "shape"), POOLS)
def test_stacked_pools(pool: nn.Module, shape: tuple[int, ...], gpu: bool) -> None:
    ours = prepare_stack(copy.deepcopy(pool), gpu=gpu)
    x = torch.randn(3, *shape)
    found = vmap(grad(lambda one: ours(one).square().sum()))(x)
    for i in range(3):
        torch.testing.assert_close(found[i], grad(lambda one: pool(one).square().sum())(x[i]))


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool1d(3),
        nn.MaxPool1d(2, 1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.AvgPool2d(2, 1),
        nn.AvgPool2d(2, divisor_override=3),
        nn.AvgPool1d(2, ceil_mode=True),
    ],
)
def test_other_pools_stay_as_they_are(pool: nn.Module) -> None:
    assert type(prepare_stack(copy.deepcopy(pool), gpu=True)) is type(pool)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 2, 5), (3, 5)], ids=["samples", "sequences", "one sample"])
def test_stacked_linear_layers(shape: tuple[int, ...], bias: bool) -> None:
    plain = nn.Linear(5, 2, bias=bias)
    ours = prepare_stack(copy.deepcopy(plain), gpu=False)
    x = torch.randn(shape)
    stack = {name: torch.randn(3, *p.shape) for name, p in plain.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, module: nn.Module) -> Tensor:
        out: Tensor = functional_call(module, parameters, (x,))
        return out.square().sum()

    found = vmap(grad(partial(loss, module=ours), argnums=(0, 1)))(stack, x)
    for i in range(3):
        wanted = grad(partial(loss, module=plain), argnums=(0, 1))({name: p[i] for name, p in stack.items()}, x[i])
        torch.testing.assert_close(found[1][i], wanted[1])
        for name, value in wanted[0].items():
            torch.testing.assert_close(found[0][name][i], value)


def test_stacked_cross_entropy_is_cross_entropy() -> None:
    logits, y = torch.randn(3, 4, 5), torch.randint(0, 5, (3, 4))

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return (cross_entropies(logits, y) * torch.arange(4.0)).sum()

    with stackable(torch.device("cpu")):
        slopes, values = vmap(grad_and_value(loss))(logits, y)
    for i in range(3):
        slope, value = grad_and_value(loss)(logits[i], y[i])  # outside of a stack: PyTorch's own
        torch.testing.assert_close(values[i], value)
        torch.testing.assert_close(slopes[i], slope)


NORMS = [
    partial(nn.BatchNorm1d, 3),
    partial(nn.BatchNorm1d, 3, affine=False),
    partial(nn.BatchNorm1d, 3, momentum=None),
    partial(nn.BatchNorm1d, 3, track_running_stats=False),
    partial(nn.BatchNorm1d, 3, eps=0.1, momentum=0.5),
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("long", [False, True])
def test_padding_changes_no_statistics(norm: partial[nn.Module], long: bool) -> None:
    plain = norm()
    ours = prepare_stack(copy.deepcopy(plain), gpu=False)
    lone = prepare_one(copy.deepcopy(plain))
    for n in (4, 2, 3):
        x = torch.randn(n, 3, 5) if long else torch.randn(n, 3)
        padded = torch.cat([x, torch.full_like(x[:1], 77.0).repeat(6 - n, *[1] * (x.ndim - 1))])
        mask = (torch.arange(6) < n).float()
        wanted = plain(x)
        with padding(mask):
            found = ours(padded)[:n]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lone(x), wanted)
        for one, other in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    before = [buffer.clone() for buffer in ours.buffers()]
    with padding(torch.zeros(6)):  # a step that is all padding
        assert bool(torch.isfinite(ours(padded)).all())
    assert all(torch.equal(one, other) for one, other in zip(ours.buffers(), before, strict=True))


def test_a_batch_of_one_value_a_channel() -> None:
    for module in (prepare_stack(nn.BatchNorm1d(3), False), prepare_one(nn.BatchNorm1d(3))):
        assert module(torch.randn(1, 3)).tolist() == [[0.0, 0.0, 0.0]]
        assert dict(module.named_buffers())["running_var"].tolist() == pytest.approx([0.9] * 3)


def test_in_eval_mode_they_are_as_before() -> None:
    plain = nn.BatchNorm2d(2)
    plain(torch.randn(4, 2, 3, 3))
    plain.eval()
    x = torch.randn(2, 2, 3, 3)
    for module in (prepare_stack(copy.deepcopy(plain), False), prepare_one(copy.deepcopy(plain))):
        with padding(torch.zeros(2)):
            assert torch.equal(module(x), plain(x))


def test_second_derivatives_of_stacked_convolutions() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(2, 3, 3, stride=2, padding=1).double()
    ours = prepare_stack(copy.deepcopy(plain), gpu=True)
    x, weight = torch.randn(4, 2, 2, 5, 5).double(), torch.randn(4, 3, 2, 3, 3).double()

    def bent(conv: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of how long the gradient of the weight is, which asks for both kinds of second derivative."""

        def length(weight: Tensor, x: Tensor) -> Tensor:
            def loss(weight: Tensor) -> Tensor:
                y: Tensor = torch.func.functional_call(conv, {"weight": weight}, (x,))
                return y.pow(3).sum()

            gradient: Tensor = torch.func.grad(loss)(weight)
            return gradient.square().sum()

        of_weight, of_x = torch.func.grad(length, argnums=(0, 1))(weight, x)
        return torch.cat([of_weight.flatten(), of_x.flatten()])

    one_by_one = torch.stack([bent(plain, *pair) for pair in zip(x, weight, strict=True)])
    torch.testing.assert_close(torch.func.vmap(lambda x, weight: bent(ours, x, weight))(x, weight), one_by_one)
