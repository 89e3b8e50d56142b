"""The kernels in Triton's interpreter on a CPU, beside PyTorch in double precision. `test_stacked_products` runs it by
itself, since Triton asks when it is imported whether to interpret.

It shows what a kernel reads, adds up and writes, not how a GPU rounds nor that one can be compiled.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from fedquilt.layers import kernels, step_kernels

SHAPES = [  # clients, images, height, width, channels in and out, kernel, padding
    (3, 2, 6, 5, 3, 10, (3, 3), (1, 1)),
    (1, 1, 1, 3, 17, 1, (1, 2), (0, 1)),
    (2, 2, 5, 5, 16, 9, (2, 3), (0, 1)),
    (2, 1, 6, 6, 32, 70, (3, 3), (-1, 2)),
    (2, 11, 8, 8, 5, 3, (5, 5), (2, 2)),  # a sum long enough to be divided
    (2, 0, 6, 6, 3, 4, (3, 3), (1, 1)),
]


def close(found: Tensor, wanted: Tensor) -> None:
    scale = max(1.0, float(wanted[wanted.isfinite()].abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=2e-5 * scale, equal_nan=True)


def padded(images: Tensor, pad: tuple[int, int]) -> Tensor:
    """Images (n, h, w, c) of a client in double precision, channels first, with so many zeros around them."""
    return F.pad(images.double().movedim(-1, 1), (pad[1], pad[1], pad[0], pad[0]))


def convolutions() -> None:
    for k, n, height, width, given, made, kernel, pad in SHAPES:
        x, bias = torch.randn(k, n, height, width, given), torch.randn(k, made)
        weight = torch.randn(k, made, *kernel, given)
        y = kernels.convolve(x, weight, bias, pad, "ieee")
        gradient = torch.randn_like(y)
        to_weight, to_bias = kernels.correlate(x, gradient, kernel, pad, "ieee")
        rows = kernels.windows(x, kernel, pad)
        close(kernels.convolve(x, weight, None, pad, "ieee"), y - bias[:, None, None, None])
        close(to_bias, gradient.double().sum((1, 2, 3)))
        close((rows.double() @ weight.double().flatten(2).mT).view(y.shape), y - bias[:, None, None, None])
        for client in range(k if n else 0):
            around, first = padded(x[client], pad), weight[client].double().permute(0, 3, 1, 2)
            close(y[client].movedim(-1, 1), F.conv2d(around, first, bias[client].double()))
            grads = gradient[client].double().movedim(-1, 1)
            close(to_weight[client].permute(0, 3, 1, 2), conv2d_weight(around, first.shape, grads))


def products() -> None:
    sizes = [(1, 1, 3, 1), (3, 33, 17, 65), (2, 16, 0, 9), (2, 5, 700, 200), (1, 64, 31, 130)]
    for (k, m, inner, n), how in itertools.product(sizes, ("plain", "turned", "in common", "every other")):
        a, b = torch.randn(k, m, inner), torch.randn(k, inner, n)
        if how == "turned":
            a, b = torch.randn(k, inner, m).mT, torch.randn(k, n, inner).mT
        elif how == "in common":
            a, b = a[:1].expand(k, m, inner), b[:1].expand(k, inner, n)
        elif how == "every other":
            a, b = torch.randn(k, m, 2 * inner)[:, :, ::2], torch.randn(inner, k, n).movedim(1, 0)
        close(kernels.multiply(a, b), a.double() @ b.double())
    a, b = torch.rand(2, 20, 300), torch.rand(2, 300, 70) + 1
    a[0, 3, 7], a[1, 5, 299] = math.inf, math.nan  # it stays in its row
    close(kernels.multiply(a, b), a.double() @ b.double())


def pieces() -> None:
    """More clients than a launch counts."""
    x, weight, bias = torch.randn(5, 2, 4, 4, 3), torch.randn(5, 4, 3, 3, 3), torch.randn(5, 4)

    def all_of_them() -> list[Tensor]:
        y = kernels.convolve(x, weight, bias, (1, 1), "ieee")
        rows = kernels.windows(x, (3, 3), (1, 1))
        product = kernels.multiply(rows, weight[:1].expand(weight.shape).flatten(2).mT)
        return [y, *kernels.correlate(x, y, (3, 3), (1, 1), "ieee"), rows, product]

    whole, kernels._CLIENTS = all_of_them(), 2
    assert all(torch.equal(found, wanted) for found, wanted in zip(all_of_them(), whole, strict=True))


def steps() -> None:
    """Optimisers beside PyTorch's; what is infinite and not moved stays."""
    hows: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adam, {}),
    ]
    for kind, how in hows:
        ours, lr, betas = torch.randn(2500), torch.tensor(0.01), (0.9, 0.999)
        if not how.get("weight_decay"):
            ours[3] = -math.inf
        theirs = ours.double().requires_grad_()
        peer, first, second = kind([theirs], lr=0.01, **how), torch.zeros(2500), torch.zeros(2500)  # type: ignore[call-arg]
        for step in range(1, 4):
            theirs.grad = torch.randn(2500).double()
            theirs.grad[3] = 0
            gradient, decay = theirs.grad.float(), how.get("weight_decay", 0.0)
            peer.step()
            if kind is torch.optim.SGD:
                momentum = how.get("momentum", 0.0)
                step_kernels.sgd(ours, gradient, first if momentum else None, lr, momentum, "nesterov" in how, decay)
            else:
                corrections = 1 - torch.tensor(betas, dtype=torch.float64) ** step
                apart = kind is torch.optim.AdamW
                step_kernels.adam(ours, gradient, first, second, corrections, lr, betas, decay, 1e-8, apart)
        close(ours, theirs.detach())


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # NumPy's, of how the interpreter calls it and of what is infinite
    torch.manual_seed(0)
    for check in (convolutions, products, steps, pieces):
        check()
        print(check.__name__)
