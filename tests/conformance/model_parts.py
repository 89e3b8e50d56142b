"""The parts that the models of the table are made of."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Made(nn.Module):
    """A module of some parts and a function that runs them."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.5)


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Residual(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(wide, wide, 3, padding=1), nn.Conv2d(wide, wide, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)])

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norms[0](self.a(x)).relu()
        return F.relu(x + self.norms[1](self.b(inside)))


class SqueezeAndExcite(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        gates: Tensor = self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()
        return x * gates


class NormWithOwnForward(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class NormByAnotherName(nn.BatchNorm1d):
    pass


class FrozenNorm(nn.BatchNorm1d):
    """Keeps its statistics whatever mode the model is in."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(False)
        return self


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class DoubledInStacks(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def doubled(x: Tensor, in_stacks: bool) -> Tensor:
    twice: Tensor = (DoubledInStacks if in_stacks else Doubled).apply(x)  # type: ignore[no-untyped-call]
    return twice


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), 4), x.new_zeros(len(x), 4))
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        scores: Tensor = self.head(state[0])
        return scores


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.b(self.a(x).tanh()).tanh())
        return scores


def tripled(module: nn.Module, into: Any, out: Any) -> Any:
    return (into[0] * 3,)


class Hooked(nn.Module):
    """Hooks of some kind on the first layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.kind = kind
        if kind == "forward":
            self.a.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
            self.a.register_forward_hook(lambda module, given, out: out * 1.5 + self.head.bias.sum())
        if kind == "backward":
            self.a.register_full_backward_hook(tripled)
        if kind == "parameter":
            self.a.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.a(x.clone().requires_grad_() if self.kind == "backward" else x).tanh()
        if self.kind == "activation" and inside.requires_grad:
            inside.register_hook(lambda gradient: gradient * 0.5)
        scores: Tensor = self.head(inside)
        return scores


class Replaced(nn.Module):
    """Puts a new tensor where a buffer was."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        scores: Tensor = self.head(x - self.mean)
        return scores


class Stateful(nn.Module):
    """Decides by something of its own in Python, which no parameter or buffer holds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.random, self.numpy = random.Random(3), np.random.default_rng(3)
        self.list, self.dict, self.number, self.whole = [0], {"n": 0}, np.int64(0), 0
        self.generator = torch.Generator().manual_seed(1)
        self.plain = {"mean": torch.zeros(6)}

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "plain tensor":
            self.plain["mean"] = 0.5 * self.plain["mean"] + 0.5 * x.detach()[0]
            x = x - self.plain["mean"]
        elif self._decided():
            x = self.a(x).tanh() + x
        scores: Tensor = self.head(x)
        return scores

    def _decided(self) -> bool:
        if self.kind == "random":
            return self.random.random() < 0.5
        if self.kind == "generator":
            return bool(torch.rand((), generator=self.generator) < 0.5)
        if self.kind == "numpy":
            return bool(self.numpy.random() < 0.5)
        if self.kind == "list":
            self.list[0] += 1
        elif self.kind == "dict":
            self.dict["n"] += 1
        elif self.kind == "np.int64":
            self.number = np.int64(self.number + 1)
        else:
            self.whole += 1
        return (self.list[0] + self.dict["n"] + int(self.number) + self.whole) % 2 == 0


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x)
        return scores * 2 if float(scores.detach().sum()) > 0 else scores


def materialised() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))
    model(torch.zeros(2, 6))
    return model


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    return model


def transformer(batch_first: bool, norm_first: bool = False, p: float = 0.0) -> nn.Module:
    inner = nn.TransformerEncoderLayer(4, 2, 6, p, batch_first=batch_first, norm_first=norm_first)
    encoder = nn.TransformerEncoder(inner, 1, enable_nested_tensor=False)
    swap = not batch_first
    return Made(
        lambda m, x: m.head(m.e(x.transpose(0, 1)).transpose(0, 1)[:, 0] if swap else m.e(x)[:, 0]),
        e=encoder,
        head=nn.Linear(4, 3),
    )


def attention(batch_first: bool, p: float = 0.0) -> nn.Module:
    layer = nn.MultiheadAttention(4, 2, dropout=p, batch_first=batch_first)
    swap = not batch_first

    def run(m: Any, x: Tensor) -> Any:
        x = x.transpose(0, 1) if swap else x
        out = m.a(x, x, x)[0]
        return m.head((out.transpose(0, 1) if swap else out).flatten(1))

    return Made(run, a=layer, head=nn.Linear(20, 3))


def recurrent(layer: nn.Module, wide: int) -> nn.Module:
    return Made(lambda m, x: m.head(m.r(x)[0][:, -1]), r=layer, head=nn.Linear(wide, 3))


def image(*layers: nn.Module, shape: tuple[int, ...] = (2, 6, 6)) -> nn.Module:
    """Layers on images, then a linear layer of the size that comes out."""
    body = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        wide = body.eval()(torch.zeros(2, *shape)).shape[1]
    return nn.Sequential(*body.train(), nn.Linear(wide, 3))


def two_inputs() -> nn.Module:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores: Tensor = self.head(x + y)
            return scores

    return Two()


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: nn.Module = torch.jit.script(nn.Linear(6, 3))
        return made


def waiting_hook() -> nn.Module:
    model = nn.Linear(6, 3)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model
