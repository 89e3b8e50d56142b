"""A recorded step without what does nothing in it: the same bits from fewer operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fedquilt as fq
from fedquilt.engines import recording
from fedquilt.engines.simplify import simplified
from fedquilt.layers.prepare import cross_entropies, stackable

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (6,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.MaxPool1d(2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)), (2, 8),
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
}  # fmt: skip


def step_of(name: str) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """The gradients of three clients' models as a function of tensors, and such tensors."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    module = make()
    names = [name for name, _ in module.named_parameters()]

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropies(functional_call(module, parameters, (x.clone(),)), y).mean()

    def gradients(*tensors: Tensor) -> list[Tensor]:
        *stacks, x, y = tensors
        with stackable(torch.device("cpu")):
            return list(vmap(grad(loss))(dict(zip(names, stacks, strict=True)), x, y).values())

    stacks = [torch.stack([torch.randn_like(p) for _ in range(3)]) for p in module.parameters()]
    return gradients, [*stacks, torch.randn(3, 4, *shape), torch.randint(0, 3, (3, 4))]


def operations(program: torch.fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_from_fewer_operations(name: str) -> None:
    step, tensors = step_of(name)
    before, after = make_fx(step)(*tensors), simplified(make_fx(step)(*tensors))
    assert operations(after) < 0.8 * operations(before)
    others = [torch.randn_like(t) if t.is_floating_point() else torch.randint(0, 3, t.shape) for t in tensors]
    for inputs in (tensors, others, tensors):  # what was kept as a constant is the same each time
        for mine, theirs, plain in zip(after(*inputs), before(*inputs), step(*inputs), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            torch.testing.assert_close(mine, plain, rtol=0, atol=0)


def test_a_copy_that_is_handed_out_stays_one() -> None:
    program = simplified(make_fx(lambda x: [x.clone().view(2, 2).t(), torch.ones_like(x), x + 1])(torch.zeros(4)))
    given = torch.zeros(4)
    copy, ones, _ = program(given)
    copy.add_(5)
    ones.add_(5)
    assert given.tolist() == [0, 0, 0, 0]
    assert program(given)[1].tolist() == [1, 1, 1, 1]


def test_another_layout_is_no_view_of_the_same_shape() -> None:
    turned = torch.randn(3, 2).t()
    program = simplified(make_fx(lambda x: x.clone(memory_format=torch.contiguous_format) * 2)(turned))
    assert program(turned).is_contiguous()


def test_what_writes_stays_as_it_is() -> None:
    def writes(x: Tensor) -> Tensor:
        own = x.clone()
        own.add_(1)
        return own * x

    program = simplified(make_fx(writes)(torch.ones(3)))
    assert program(torch.ones(3)).tolist() == [2, 2, 2]


def test_what_is_drawn_is_drawn_anew() -> None:
    program = simplified(make_fx(lambda x: x + torch.rand(3))(torch.zeros(3)))
    assert program(torch.zeros(3)).tolist() != program(torch.zeros(3)).tolist()


def test_constants_lie_where_what_they_are_like_does() -> None:
    elsewhere = torch.zeros(3, device="meta")
    program = simplified(make_fx(lambda x: x + torch.ones_like(x))(elsewhere))
    assert operations(program) == 1
    assert program(elsewhere).device == elsewhere.device


def test_a_run_has_the_bits_of_one_whose_steps_are_only_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def models() -> list[dict[str, Tensor]]:
        scenario = fq.scenarios.build("digits", clients=6)
        run = fq.run(scenario, "fedprox", rounds=6, engine="vectorised", device="cpu", alone=False)
        return [run.model(client.name).state_dict() for client in scenario.clients]

    short = models()
    monkeypatch.setattr(recording, "simplified", lambda program: program)
    for mine, theirs in zip(short, models(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("classes", [1, 2, 6, 10, 15, 16, 40])
def test_cross_entropies_in_stacks_are_pytorchs(classes: int) -> None:
    make = torch.Generator().manual_seed(classes)
    logits = torch.randn(3, 50, classes, generator=make) * torch.tensor([1.0, 30.0, 300.0])[:, None, None]
    y = torch.randint(0, classes, (3, 50), generator=make)
    with stackable(torch.device("cpu")):
        losses = vmap(cross_entropies)(logits, y)
        slopes = vmap(grad(lambda z, t: cross_entropies(z, t).sum()))(logits, y)
    exact = logits.double().requires_grad_()
    theirs = torch.nn.functional.cross_entropy(exact.flatten(0, 1), y.flatten(), reduction="none")
    theirs.sum().backward()
    torch.testing.assert_close(losses.flatten().double(), theirs, rtol=1e-6, atol=1e-5)
    assert exact.grad is not None
    torch.testing.assert_close(slopes.double(), exact.grad, rtol=1e-5, atol=1e-6)
