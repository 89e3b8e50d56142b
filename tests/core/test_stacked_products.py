"""Products of a stack by kernels of our own: on a CPU what they are to compute, in stacks, derived once and twice, and
where Triton is the kernels as it interprets them; on a GPU the kernels themselves beside double precision.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.engines.optim import Optimiser
from fedquilt.layers import stacked_products
from fedquilt.layers.prepare import prepare_stack
from fedquilt.layers.stacked_products import convolution, convolves, product

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPES = [  # images, height, width, channels in and out, kernel, padding
    (3, 8, 8, 3, 32, (3, 3), (1, 1)),
    (2, 7, 6, 32, 16, (3, 3), (1, 1)),
    (4, 9, 1, 9, 20, (5, 1), (0, 0)),
    (2, 5, 5, 16, 9, (2, 3), (0, 1)),
    (1, 6, 6, 5, 70, (3, 3), (2, 2)),
    (2, 6, 5, 64, 40, (3, 3), (1, 1)),
]


def plainly(x: Tensor, weight: Tensor, bias: Tensor | None, pad: tuple[int, int]) -> Tensor:
    """PyTorch's convolution of a client, channels last at both ends."""
    return F.conv2d(x.movedim(-1, 1), weight.permute(0, 3, 1, 2), bias, padding=pad).movedim(1, -1)


def slopes(conv: Any, pad: tuple[int, int], x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """A client's outputs, gradients, and gradients of these gradients' size."""

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = conv(x, weight, bias, pad)
        total: Tensor = (y.square() * torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y)).sum()
        return total

    def size(*given: Tensor) -> Tensor:
        return torch.stack([part.square().sum() for part in grad(loss, argnums=(0, 1, 2))(*given)]).sum()

    given = (x, weight, bias)
    once, twice = (grad(function, argnums=(0, 1, 2))(*given) for function in (loss, size))
    return conv(*given, pad), conv(x, weight, None, pad), *once, *twice


def off(found: Tensor, wanted: Tensor) -> float:
    """How far numbers are from those in double precision, as a share of their size."""
    return float((found.double() - wanted).norm() / wanted.norm())


def compare(shape: tuple[Any, ...], device: str, most: float) -> None:
    n, height, width, given, made, kernel, pad = shape
    draw = torch.Generator().manual_seed(1)  # of the second derivatives of some draws, sums cancel to few digits
    x = torch.randn(3, n, height, width, given, generator=draw)
    weight = torch.randn(3, made, *kernel, given, generator=draw)
    bias = torch.randn(3, made, generator=draw)
    stack = vmap(lambda *given: slopes(convolution, pad, *given))(x.to(device), weight.to(device), bias.to(device))
    wanted = vmap(lambda *given: slopes(plainly, pad, *given))(x.double(), weight.double(), bias.double())
    for found, right in zip(stack, wanted, strict=True):
        assert off(found.cpu(), right) < most
    alone = slopes(convolution, pad, x[1].to(device), weight[1].to(device), bias[1].to(device))
    for found, right in zip(alone, wanted, strict=True):
        assert off(found.cpu(), right[1]) < most


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stack_of_convolutions_and_its_gradients_twice(shape: tuple[Any, ...]) -> None:
    compare(shape, "cpu", 1e-5)


def test_kernels_as_triton_interprets_them_on_a_cpu() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpreted_kernels.py")
    where = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["convolutions", "products", "steps", "pieces"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("precision", "most"), [("ieee", 1e-5), ("tf32", 5e-3)])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_kernels_of_convolutions(device: str, shape: tuple[Any, ...], precision: str, most: float) -> None:
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, conv.fp32_precision = conv.fp32_precision, precision
    try:
        compare(shape, device, most)
    finally:
        conv.fp32_precision = before


def test_each_samples_gradients_with_kernels_that_all_share() -> None:
    """What differential privacy for samples asks for: gradients of every sample, in a stack of clients."""
    x, weight = torch.randn(2, 4, 5, 5, 3), torch.randn(2, 6, 3, 3, 3)

    def loss(weight: Tensor, sample: Tensor, conv: Any) -> Tensor:
        total: Tensor = conv(sample[None], weight, None, (1, 1)).square().sum()
        return total

    def each(conv: Any) -> Tensor:
        of_one = vmap(grad(lambda w, s: loss(w, s, conv)), in_dims=(None, 0))
        found: Tensor = vmap(of_one)(weight, x)
        return found

    torch.testing.assert_close(each(convolution), each(plainly), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_each_samples_product_with_a_matrix_that_all_share(device: str) -> None:
    samples, matrix = torch.randn(2, 5, 1, 300, device=device), torch.randn(2, 300, 70, device=device)
    of_one = vmap(lambda row, shared: stacked_products._lean_product(row, shared), in_dims=(0, None))
    torch.testing.assert_close(of_one(samples[0], matrix[0]), samples[0] @ matrix[0], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(vmap(of_one)(samples, matrix), samples @ matrix[:, None], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize(("few", "inner", "made"), [(16, 300, 70), (5, 1000, 33), (64, 128, 600), (1, 4096, 64)])
def test_few_rows_times_a_large_matrix(device: str, few: int, inner: int, made: int) -> None:
    """At the precision of float32, also where its halves are added up by more than one program."""
    assert device == "cpu" or stacked_products.there()  # asked before anything is differentiated, as engines do
    rows, matrix = torch.randn(3, few, inner), torch.randn(3, made, inner)

    def both(rows: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        def loss(rows: Tensor, matrix: Tensor) -> Tensor:
            y: Tensor = stacked_products._LeanProduct.apply(rows, matrix.T)  # type: ignore[no-untyped-call]
            return (y**2).sum()

        return loss(rows, matrix), *grad(loss, argnums=(0, 1))(rows, matrix)

    def right(rows: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        def loss(rows: Tensor, matrix: Tensor) -> Tensor:
            return ((rows @ matrix.T) ** 2).sum()

        return loss(rows, matrix), *grad(loss, argnums=(0, 1))(rows, matrix)

    found = vmap(both)(rows.to(device), matrix.to(device))
    for one, wanted in zip(found, vmap(right)(rows.double(), matrix.double()), strict=True):
        assert off(one.cpu(), wanted) < 2e-6
    again = vmap(both)(rows.to(device), matrix.to(device))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_layers_on_a_gpu_take_the_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of three convolutions and a large linear layer, by kernels and without them."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(1568, 64)
    )
    ours = prepare_stack(copy.deepcopy(plain), gpu=True).to(device)
    x = torch.randn(4, 5, 3, 16, 16, device=device)
    stack = {name: torch.randn(4, *p.shape, device=device) * 0.1 for name, p in ours.named_parameters()}
    assert stacked_products.there()
    assert convolves(x[0], stack["0.weight"][0], (1, 1))
    assert not convolves(x[0], stack["0.weight"][0], (2, 2))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = functional_call(ours, parameters, (x,))
        return y.square().mean()

    by_kernels = vmap(grad(loss))(stack, x)
    monkeypatch.setattr(stacked_products, "there", lambda: False)
    for name, wanted in vmap(grad(loss))(stack, x).items():
        assert off(by_kernels[name], wanted.double()) < 3e-2, name  # TF32 twice over, rounded in another order


@pytest.mark.parametrize(
    "how",
    [
        {"optimiser": "adam", "weight_decay": 0.01},
        {"optimiser": "adamw", "weight_decay": 0.01},
        {"weight_decay": 0.01},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ],
)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_steps_of_large_tensors(device: str, how: dict[str, Any]) -> None:
    """Optimisers by kernels of our own beside PyTorch's in double precision; a small tensor lies beside a large one."""
    torch.manual_seed(0)
    training = fq.Training(lr=0.01, **how)
    start = [torch.randn(3, 2**16 + 7), torch.randn(3, 5)]
    ours = [p.to(device) for p in start]
    optimiser = Optimiser(training, ours)
    assert optimiser.large == {0}
    theirs = [p.double().requires_grad_() for p in start]
    decay, name = training.weight_decay, training.optimiser
    peers: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(theirs, 0.01, training.momentum, 0.0, decay, training.nesterov),
        "adam": lambda: torch.optim.Adam(theirs, 0.01, weight_decay=decay),
        "adamw": lambda: torch.optim.AdamW(theirs, 0.01, weight_decay=decay),
    }
    peer = peers[name]()
    for _ in range(4):
        for p in theirs:
            p.grad = torch.randn_like(p)
        gradients = [p.grad.float().to(device) for p in theirs if p.grad is not None]
        optimiser.step(gradients, torch.tensor(0.01, device=device))
        peer.step()
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.cpu(), wanted.detach().float(), atol=3e-5, rtol=1e-6)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_more_clients_than_a_launch_counts_go_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("fedquilt.layers.kernels")
    x, weight, bias = torch.randn(5, 2, 6, 6, 3), torch.randn(5, 4, 3, 3, 3), torch.randn(5, 4)
    x, weight, bias = (each.to(device) for each in (x, weight, bias))

    def all_of_them() -> list[Tensor]:
        y = kernels.convolve(x, weight, bias, (1, 1), "ieee")
        plain = kernels.convolve(x, weight, None, (1, 1), "ieee")
        gradients = kernels.correlate(x, y, (3, 3), (1, 1), "ieee")
        rows = kernels.windows(x, (3, 3), (1, 1))
        return [y, plain, *gradients, rows, kernels.multiply(rows, weight.flatten(2).mT)]

    whole = all_of_them()
    monkeypatch.setattr(kernels, "_CLIENTS", 2)
    for found, wanted in zip(all_of_them(), whole, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_where_no_kernel_can_be_made_pytorchs_are_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    kernels = pytest.importorskip("fedquilt.layers.step_kernels")
    monkeypatch.setattr(kernels, "sgd", no_compiler)
    stacked_products.there.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="C compiler"):
            assert not stacked_products.there()
        rows, matrix = torch.randn(4, 300, device=device), torch.randn(300, 400, device=device)
        assert torch.equal(product(rows, matrix), rows @ matrix)
    finally:
        stacked_products.there.cache_clear()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_what_is_infinite_and_not_moved_stays(device: str) -> None:
    mask = torch.full((2, 2**16), -torch.inf, device=device)
    optimisers: tuple[Any, ...] = ("sgd", "adam", "adamw")
    for how in optimisers:
        Optimiser(fq.Training(optimiser=how), [mask]).step([torch.zeros_like(mask)], torch.tensor(0.1, device=device))
    assert bool((mask == -torch.inf).all())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_sums_of_nothing_are_zero(device: str) -> None:
    kernels = pytest.importorskip("fedquilt.layers.kernels")
    none = torch.zeros(2, 0, 6, 6, 3, device=device)
    assert not any(bool(each.any()) for each in kernels.correlate(none, none, (3, 3), (1, 1), "ieee"))
    assert not bool(kernels.multiply(torch.zeros(2, 70, 0, device=device), torch.zeros(2, 0, 9, device=device)).any())


def test_on_a_cpu_products_are_pytorchs() -> None:
    rows, matrix = torch.randn(4, 300), torch.randn(300, 400)
    assert torch.equal(product(rows, matrix), rows @ matrix)
    assert not convolves(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), (1, 1))
