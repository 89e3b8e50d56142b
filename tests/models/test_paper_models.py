"""The papers' networks: they run under vmap(grad), their units are named, and the LSTM equals PyTorch's."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from fedquilt.families.units import cut
from fedquilt.models import LSTM, MODELS, ModflCifar, ModflStl, modfl_hapt, modfl_realworld, modfl_wisdm

SMALLER: dict[str, dict[str, Any]] = {
    "mobilenet-v2": {"width": 0.25, "dropout": 0.0},
    "fedem-cnn": {"hidden": 64},
    "modfl-stl": {"pixels": 32},
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](**SMALLER.get(name, {})).eval()


def shape_of(net: nn.Module) -> tuple[int, ...]:
    return cast("tuple[int, ...]", net.input_shape)


@pytest.mark.parametrize("name", MODELS)
def test_a_stack_of_clients_has_the_gradients_of_each_alone(name: str) -> None:
    nets = [make(name) for _ in range(2)]
    for net in nets[1:]:
        for p in net.parameters():
            p.data += 0.01 * torch.randn_like(p)
    parameters, buffers = stack_module_state(nets)
    x = torch.randn(2, 3, *shape_of(nets[0]))
    y = torch.tensor([[0, 1, 0], [1, 1, 0]])

    def loss(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(nets[0], (p, b), (x,)), y)

    stacked = vmap(grad(loss))(parameters, buffers, x, y)
    for k, net in enumerate(nets):
        alone = torch.autograd.grad(F.cross_entropy(net(x[k]), y[k]), list(net.parameters()))
        for (key, _), own in zip(net.named_parameters(), alone, strict=True):
            torch.testing.assert_close(stacked[key][k], own, rtol=2e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_units_cover_every_tensor_once(name: str) -> None:
    net = make(name)
    units = cut(net)
    held = [t for unit in units for t in (*unit.parameters, *unit.buffers)]
    assert sorted(held) == sorted([n for n, _ in net.named_parameters()] + [n for n, _ in net.named_buffers()])
    assert len(units) >= 2


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_gives_logits(name: str) -> None:
    net = make(name)
    out = net(torch.zeros(2, *shape_of(net)))
    assert out.ndim == 2
    assert out.shape[0] == 2


@pytest.mark.parametrize("last", [True, False])
def test_lstm_equals_pytorchs(last: bool) -> None:
    torch.manual_seed(1)
    theirs = nn.LSTM(3, 5, batch_first=True)
    ours = LSTM(3, 5, last=last)
    with torch.no_grad():
        values = dict(theirs.named_parameters())
        ours.weight_ih.copy_(values["weight_ih_l0"])
        ours.weight_hh.copy_(values["weight_hh_l0"])
        ours.bias.copy_(values["bias_ih_l0"] + values["bias_hh_l0"])
    x = torch.randn(4, 20, 3)
    states, (end, _) = theirs(x)
    torch.testing.assert_close(ours(x), end[0] if last else states)
    (mine,) = torch.autograd.grad(ours(x).square().sum(), ours.weight_hh)
    (other,) = torch.autograd.grad((end[0] if last else states).square().sum(), values["weight_hh_l0"])
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("last", [True, False])
def test_lstm_has_the_second_derivatives_of_its_loop(last: bool) -> None:
    """By itself it is PyTorch's layer in one piece, which methods that learn from gradients differentiate twice."""
    net, x = LSTM(3, 5, last=last), torch.randn(6, 20, 3)
    weights, curves = list(net.parameters()), []
    for forward in (net, net._loop):
        slopes = torch.autograd.grad(forward(x).square().sum(), weights, create_graph=True)
        curves.append(torch.autograd.grad(torch.cat([s.flatten() for s in slopes]).square().sum(), weights))
    for found, expected in zip(*curves, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("builders", [(ModflCifar, ModflStl), (modfl_hapt, modfl_realworld), (modfl_hapt, modfl_wisdm)])
def test_one_seed_gives_unlike_devices_the_same_operation_module(builders: tuple[type[nn.Module], ...]) -> None:
    nets = []
    for builder in builders:
        torch.manual_seed(3)
        nets.append(builder())
    first, second = (cast(nn.Module, net.operation).state_dict() for net in nets)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_modfl_sizes_are_the_papers() -> None:
    shapes = [tuple(p.shape) for n, p in modfl_realworld().named_parameters() if n.endswith(("weight", "weight_ih"))]
    assert shapes == [(96, 6), (32, 24), (16, 32), (16, 16), (5, 16)]
    weights = [tuple(p.shape)[:2] for n, p in ModflCifar().named_parameters() if n.endswith("weight")]
    assert weights == [(32, 3), (64, 32), (128, 64), (256, 8192), (128, 256), (64, 128), (9, 64)]


def test_mobilenet_has_the_papers_size() -> None:
    count = sum(p.numel() for p in MODELS["mobilenet-v2"](classes=1000).parameters())
    assert count == 3_504_872  # as published for 1000 classes


def test_a_network_that_cannot_be_says_so() -> None:
    with pytest.raises(ValueError, match="8 x 8 or 4 x 4"):
        MODELS["digits"](pixels=5)
    with pytest.raises(ValueError, match="do not go with 4 x 4"):
        MODELS["small-cnn"](filters=(8, 8, 8), pixels=4)
