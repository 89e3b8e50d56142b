"""Models of all kinds, each in a few lines, and what is promised about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from model_parts import (
    Cells,
    FrozenNorm,
    Hooked,
    Made,
    NormByAnotherName,
    NormWithOwnForward,
    Picky,
    Replaced,
    Residual,
    SqueezeAndExcite,
    Stateful,
    Tied,
    attention,
    chain,
    doubled,
    frozen,
    image,
    materialised,
    partly_frozen,
    recurrent,
    scripted,
    transformer,
    two_inputs,
    waiting_hook,
    weight,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Promise = Literal["stacked", "one by one", "apart", "refused"]
Builder = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    """A model and its promise: stacked and equal to a plain loop, one by one or each client apart, said, or refused.

    `says` is what the warning or the refusal says. `even` is the promise for clients of one size, where it is another.
    `by_hand` False: the model draws, so that engines are compared with the sequential one. `gpu` False: it does not run
    on a GPU, or draws there from another generator. `rounds` is 1 where a plain loop would keep something in Python
    from one round to the next.
    """

    build: Builder
    promise: Promise = "stacked"
    says: str = ""
    shape: tuple[int, ...] = (6,)
    words: int = 0
    even: Promise | None = None
    sizes: tuple[int, ...] = (11, 7)
    by_hand: bool = True
    gpu: bool = True
    rounds: int = 2
    atol: float = 5e-6


PLAIN: dict[str, Case] = {
    "MLP": Case(lambda: chain(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))),
    "weight tying": Case(Tied),
    "shared layer": Case(
        lambda: Made(lambda m, x: m.head(m.a(m.a(x).tanh())), a=nn.Linear(6, 6), head=nn.Linear(6, 3))
    ),
    "tied autoencoder": Case(
        lambda: Made(lambda m, x: m.head(m.a(x).tanh() @ m.a.weight), a=nn.Linear(6, 4), head=nn.Linear(6, 3))
    ),
    "attention": Case(lambda: attention(True), shape=(5, 4)),
    "attention, time first": Case(lambda: attention(False), shape=(5, 4)),
    "transformer": Case(lambda: transformer(True), shape=(5, 4)),
    "transformer, time first": Case(lambda: transformer(False), shape=(5, 4)),
    "transformer, norm first": Case(lambda: transformer(True, norm_first=True), shape=(5, 4)),
    "embedding": Case(
        lambda: Made(lambda m, x: m.head(m.e(x).mean(1)), e=nn.Embedding(9, 4), head=nn.Linear(4, 3)), words=9
    ),
    "embedding, padding_idx": Case(
        lambda: Made(lambda m, x: m.head(m.e(x).mean(1)), e=nn.Embedding(9, 4, padding_idx=0), head=nn.Linear(4, 3)),
        words=9,
    ),
    "embedding bag": Case(
        lambda: Made(lambda m, x: m.head(m.e(x)), e=nn.EmbeddingBag(9, 4), head=nn.Linear(4, 3)), words=9
    ),
    "GRU": Case(lambda: recurrent(nn.GRU(3, 4, batch_first=True), 4), shape=(5, 3)),
    "LSTM": Case(lambda: recurrent(nn.LSTM(3, 4, batch_first=True), 4), shape=(5, 3)),
    "LSTM both ways": Case(lambda: recurrent(nn.LSTM(3, 4, batch_first=True, bidirectional=True), 8), shape=(5, 3)),
    "LSTM cells": Case(Cells, shape=(5, 3)),
    "group norm": Case(lambda: chain(nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3))),
    "layer norm": Case(lambda: chain(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))),
    "RMS norm": Case(lambda: chain(nn.Linear(6, 6), nn.RMSNorm(6), nn.Linear(6, 3))),
    "instance norm": Case(lambda: image(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True)), shape=(2, 6, 6)),
    "local response norm": Case(lambda: image(nn.Conv2d(2, 3, 3), nn.LocalResponseNorm(2)), shape=(2, 6, 6)),
    "batch norm": Case(lambda: chain(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))),
    "batch norm, momentum None": Case(
        lambda: chain(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3))
    ),
    "batch norm, not affine": Case(lambda: chain(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))),
    "batch norm, no statistics": Case(
        lambda: chain(nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    ),
    "batch norm, run twice": Case(
        lambda: Made(
            lambda m, x: m.head(m.n(m.n(m.a(x)).tanh())), a=nn.Linear(6, 5), n=nn.BatchNorm1d(5), head=nn.Linear(5, 3)
        )
    ),
    "batch norm, subclass": Case(lambda: chain(nn.Linear(6, 5), NormByAnotherName(5), nn.Linear(5, 3))),
    "batch norm, frozen": Case(lambda: chain(nn.Linear(6, 5), FrozenNorm(5), nn.Linear(5, 3))),
    "weight norm": Case(lambda: chain(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))),
    "orthogonal": Case(
        lambda: chain(parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley"), nn.Tanh(), nn.Linear(6, 3))
    ),
    "own function with a rule": Case(
        lambda: Made(lambda m, x: m.head(doubled(m.a(x), True)), a=nn.Linear(6, 5), head=nn.Linear(5, 3))
    ),
    "forward hooks": Case(lambda: Hooked("forward")),
    "activation hook": Case(lambda: Hooked("activation")),
    "no_grad inside": Case(
        lambda: Made(
            lambda m, x: m.head(x) * torch.no_grad()(m.a)(x).sum(1, keepdim=True),
            a=nn.Linear(6, 5),
            head=nn.Linear(6, 3),
        )
    ),
    "partly frozen": Case(partly_frozen),
    "buffers of all kinds": Case(
        lambda: Made(
            lambda m, x: m.head((x * m.flags)[:, m.places] + m.shift),
            head=nn.Linear(6, 3),
            flags=torch.arange(6) % 2 == 0,
            places=torch.arange(6).flip(0),
            shift=torch.ones(6),
        )
    ),
    "parameters of no dimensions, and empty": Case(
        lambda: Made(
            lambda m, x: m.head(x) * m.scale + m.nothing.sum(),
            head=nn.Linear(6, 3),
            scale=nn.Parameter(torch.tensor(1.5)),
            nothing=nn.Parameter(torch.zeros(0, 3)),
        )
    ),
    "unused layer": Case(lambda: Made(lambda m, x: m.head(x), a=nn.Linear(2, 2), head=nn.Linear(6, 3))),
    "parameter list and dict": Case(
        lambda: Made(
            lambda m, x: x @ m.list[0] @ m.dict["b"],
            list=nn.ParameterList([weight(6, 4)]),
            dict=nn.ParameterDict({"b": weight(4, 3)}),
        )
    ),
    "PReLU": Case(lambda: chain(nn.Linear(6, 5), nn.PReLU(5), nn.Linear(5, 3))),
    "bilinear": Case(lambda: Made(lambda m, x: m.b(x[:, :3], x[:, 3:]), b=nn.Bilinear(3, 3, 3))),
    "topk": Case(lambda: Made(lambda m, x: m.head(x.topk(4, dim=1).values), head=nn.Linear(4, 3))),
    "writes on its input": Case(lambda: Made(lambda m, x: m.head(x.sub_(0.5).div_(0.25)), head=nn.Linear(6, 3))),
    "activation in place first": Case(lambda: chain(nn.ReLU(inplace=True), nn.Linear(6, 3))),
    "materialised lazy layers": Case(materialised),
    "autocast": Case(
        lambda: Made(
            lambda m, x: torch.autocast(x.device.type, torch.bfloat16)(lambda: m.head(m.a(x).tanh()))().float(),
            a=nn.Linear(6, 5),
            head=nn.Linear(5, 3),
        ),
        atol=5e-3,
    ),
}

IMAGES: dict[str, Case] = {
    "conv1d": Case(lambda: image(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.MaxPool1d(2), shape=(2, 8)), shape=(2, 8)),
    "conv2d": Case(lambda: image(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)), shape=(2, 6, 6)),
    "conv3d": Case(lambda: image(nn.Conv3d(1, 2, 2), shape=(1, 3, 3, 3)), shape=(1, 3, 3, 3)),
    "depthwise": Case(lambda: image(nn.Conv2d(2, 4, 3, groups=2)), shape=(2, 6, 6)),
    "dilated": Case(lambda: image(nn.Conv2d(2, 3, 2, dilation=2)), shape=(2, 6, 6)),
    "circular padding": Case(lambda: image(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")), shape=(2, 6, 6)),
    "reflect padding": Case(lambda: image(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")), shape=(2, 6, 6)),
    "same padding": Case(lambda: image(nn.Conv2d(2, 3, 3, padding="same")), shape=(2, 6, 6)),
    "transposed": Case(lambda: image(nn.ConvTranspose2d(2, 3, 3, stride=2)), shape=(2, 6, 6)),
    "pixel shuffle": Case(lambda: image(nn.Conv2d(2, 4, 3), nn.PixelShuffle(2)), shape=(2, 6, 6)),
    "upsample": Case(
        lambda: image(nn.Conv2d(2, 3, 3), nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)),
        shape=(2, 6, 6),
    ),
    "adaptive pools": Case(
        lambda: image(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(2)), shape=(2, 6, 6)
    ),
    "max pool, odd": Case(lambda: image(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2)), shape=(2, 6, 6)),
    "max pool, overlapping": Case(
        lambda: image(nn.Conv2d(2, 3, 2), nn.MaxPool2d(3, 2, ceil_mode=True)), shape=(2, 6, 6)
    ),
    "max pool, ties": Case(lambda: image(nn.Conv2d(2, 3, 3), nn.Hardtanh(0, 0.1), nn.MaxPool2d(2)), shape=(2, 6, 6)),
    "average pool as a function, padded": Case(
        lambda: image(nn.Conv2d(2, 3, 3), Made(lambda m, x: F.avg_pool2d(x, 2, padding=1))), shape=(2, 6, 6)
    ),
    "average pool, padded": Case(lambda: image(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2, padding=1)), shape=(2, 6, 6)),
    "LP pool": Case(lambda: image(nn.Conv2d(2, 3, 3), nn.Softplus(), nn.LPPool2d(2, 2)), shape=(2, 6, 6)),
    "ResNet": Case(lambda: image(nn.Conv2d(2, 3, 3), Residual(3), nn.AdaptiveAvgPool2d(1)), shape=(2, 6, 6)),
    "MobileNet": Case(
        lambda: image(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.Hardswish(),
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            SqueezeAndExcite(4),
            nn.Conv2d(4, 5, 1),
            nn.BatchNorm2d(5),
        ),
        shape=(2, 6, 6),
    ),
}

LAYOUTS: dict[str, Case] = {
    "fft of a parameter": Case(
        lambda: Made(lambda m, x: x @ torch.fft.fft(m.w).real @ m.v, w=weight(6, 6), v=weight(6, 3))
    ),
    "einsum of three": Case(
        lambda: Made(lambda m, x: torch.einsum("bi,ji,kj->bk", x, m.w, m.v), w=weight(5, 6), v=weight(3, 5))
    ),
    "permuted images": Case(
        lambda: Made(
            lambda m, x: m.f(m.c(x.permute(0, 3, 1, 2)).mean((2, 3))), c=nn.Conv2d(2, 4, 3), f=nn.Linear(4, 3)
        ),
        shape=(6, 6, 2),
    ),
    "channels last": Case(
        lambda: Made(
            lambda m, x: m.f(m.c(x.to(memory_format=torch.channels_last)).mean((2, 3))),
            c=nn.Conv2d(2, 4, 3),
            f=nn.Linear(4, 3),
        ),
        promise="one by one",
        says="cannot be stacked",
        shape=(2, 6, 6),
    ),
    "ConvNeXt": Case(
        lambda: Made(
            lambda m, x: m.f((x + m.b(m.a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).mean((2, 3))),
            a=nn.Conv2d(2, 2, 3, padding=1, groups=2),
            b=nn.Linear(2, 2),
            f=nn.Linear(2, 3),
        ),
        shape=(2, 6, 6),
    ),
    "bmm with a transposed weight": Case(
        lambda: Made(lambda m, x: torch.bmm(x.expand(2, *x.shape), m.w.transpose(1, 2)).sum(0), w=weight(2, 3, 6))
    ),
    "complex of two parameters": Case(
        lambda: Made(
            lambda m, x: (x.to(torch.complex64) @ torch.complex(m.a, m.b)).abs(), a=weight(6, 3), b=weight(6, 3)
        )
    ),
    "sum of a parameter": Case(lambda: Made(lambda m, x: m.head(x) * m.p.sum(), head=nn.Linear(6, 3), p=weight(4, 5))),
    "parameters that lie transposed": Case(
        lambda: Made(lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(3, 6).t() * 0.5))
    ),
}

MIXES = "mixes the samples of a batch"
ONE_BY_ONE: dict[str, Case] = {
    "instance norm, tracking": Case(
        lambda: image(nn.InstanceNorm2d(2, track_running_stats=True), nn.Conv2d(2, 3, 3)),
        "one by one",
        MIXES,
        shape=(2, 6, 6),
        even="stacked",
    ),
    "batch norm with its own forward": Case(
        lambda: chain(nn.Linear(6, 5), NormWithOwnForward(5), nn.Linear(5, 3)), "one by one", MIXES, even="stacked"
    ),
    "batch mean": Case(
        lambda: Made(lambda m, x: m.head(x - x.mean(0)), head=nn.Linear(6, 3)), "one by one", MIXES, even="stacked"
    ),
    "normalised over the batch": Case(
        lambda: Made(lambda m, x: m.head(F.normalize(x, dim=0)), head=nn.Linear(6, 3)),
        "one by one",
        MIXES,
        even="stacked",
    ),
    "batch mean and a buffer of big numbers": Case(
        lambda: Made(lambda m, x: m.head(x - x.mean(0)), head=nn.Linear(6, 3), positions=torch.arange(5000)),
        "one by one",
        MIXES,
        even="stacked",
    ),
    "SyncBatchNorm": Case(
        lambda: chain(nn.Linear(6, 5), nn.SyncBatchNorm(5), nn.Linear(5, 3)), "one by one", MIXES, even="stacked"
    ),
    "buffer replaced": Case(Replaced, "one by one", MIXES, even="stacked"),
    "batch norm over a folded batch": Case(
        lambda: Made(
            lambda m, x: m.head(m.n(x.reshape(-1, 3)).reshape(len(x), -1)), n=nn.BatchNorm1d(3), head=nn.Linear(12, 3)
        ),
        "one by one",
        "cannot be stacked",
        shape=(4, 3),
        sizes=(22, 18),
        even="stacked",
    ),
    "batch norm over two halves": Case(
        lambda: Made(
            lambda m, x: m.head(torch.cat(m.n(torch.cat([x[:, 0], x[:, 1]])).chunk(2), 1)),
            n=nn.BatchNorm1d(3),
            head=nn.Linear(6, 3),
        ),
        "one by one",
        "cannot be stacked",
        shape=(2, 3),
        sizes=(22, 18),
        even="stacked",
    ),
    "spectral norm": Case(
        lambda: chain(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3)),
        "one by one",
        "cannot be stacked",
    ),
    "old spectral norm": Case(
        lambda: chain(nn.utils.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3)),
        "apart",
        "cannot be stacked",
    ),
    "own function without a rule": Case(
        lambda: Made(lambda m, x: m.head(doubled(m.a(x), False)), a=nn.Linear(6, 5), head=nn.Linear(5, 3)),
        "one by one",
        "cannot be stacked",
    ),
    "decides by data": Case(Picky, "one by one", "cannot be stacked"),
    "one_hot": Case(
        lambda: Made(lambda m, x: m.head(F.one_hot(x, 9).float().mean(1)), head=nn.Linear(9, 3)),
        "one by one",
        "cannot be stacked",
        words=9,
    ),
    "checkpointed": Case(
        lambda: Made(
            lambda m, x: m.head(checkpoint(m.a, x, use_reentrant=False).tanh()), a=nn.Linear(6, 5), head=nn.Linear(5, 3)
        ),
        "one by one",
        "cannot be stacked",
    ),
    "compiled part": Case(
        lambda: Made(
            lambda m, x: m.head(m.a(x).tanh()), a=torch.compile(nn.Linear(6, 5), backend="eager"), head=nn.Linear(5, 3)
        ),
        "one by one",
        "cannot be stacked",
    ),
    "full backward hook": Case(lambda: Hooked("backward"), "one by one", "cannot be stacked"),
    "parameter hook": Case(lambda: Hooked("parameter"), "one by one", "has a hook"),
    "all frozen": Case(lambda: frozen(nn.Linear(6, 3))),
    "embedding, max_norm": Case(
        lambda: Made(lambda m, x: m.head(m.e(x).mean(1)), e=nn.Embedding(9, 4, max_norm=0.5), head=nn.Linear(4, 3)),
        "one by one",
        "max_norm",
        words=9,
        even="stacked",
    ),
    "embedding, sparse": Case(
        lambda: Made(lambda m, x: m.head(m.e(x).mean(1)), e=nn.Embedding(9, 4, sparse=True), head=nn.Linear(4, 3)),
        "one by one",
        "cannot be stacked",
        words=9,
    ),
    **{
        f"state outside: {kind}": Case(
            partial(Stateful, kind),
            "apart",
            "cannot be stacked",
            sizes=(11, 10, 9),
            rounds=1,
            gpu=kind != "plain tensor",
        )
        for kind in ("random", "numpy", "generator", "list", "dict", "np.int64", "int", "plain tensor")
    },
}

DRAWING: dict[str, Case] = {
    "dropout": Case(lambda: chain(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)), by_hand=False),
    "dropout in place": Case(
        lambda: chain(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Dropout(0.5, inplace=True), nn.Linear(5, 3)),
        by_hand=False,
    ),
    "dropout of channels": Case(lambda: image(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.5)), shape=(2, 6, 6), by_hand=False),
    "dropout, time first": Case(
        lambda: Made(
            lambda m, x: m.head(m.d(m.a(x.transpose(0, 1))).sum(0)),
            a=nn.Linear(3, 4),
            d=nn.Dropout(0.5),
            head=nn.Linear(4, 3),
        ),
        shape=(5, 3),
        by_hand=False,
    ),
    "dropout over a folded batch": Case(
        lambda: Made(
            lambda m, x: m.head(m.d(m.a(x.flatten(0, 1))).view(len(x), 5, 4).sum(1)),
            a=nn.Linear(3, 4),
            d=nn.Dropout(0.5),
            head=nn.Linear(4, 3),
        ),
        shape=(5, 3),
        by_hand=False,
    ),
    "dropout over a folded batch, time first": Case(
        lambda: Made(
            lambda m, x: m.head(m.d(m.a(x.transpose(0, 1).flatten(0, 1))).view(5, len(x), 4).sum(0)),
            a=nn.Linear(3, 4),
            d=nn.Dropout(0.5),
            head=nn.Linear(4, 3),
        ),
        "one by one",
        "depends on how long a batch is",
        shape=(5, 3),
        even="stacked",
        by_hand=False,
    ),
    "alpha dropout": Case(
        lambda: chain(nn.Linear(6, 5), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(5, 3)), by_hand=False
    ),
    "feature alpha dropout": Case(
        lambda: image(nn.Conv2d(2, 4, 3), nn.FeatureAlphaDropout(0.3)), shape=(2, 6, 6), by_hand=False
    ),
    "attention with dropout": Case(lambda: attention(True, 0.3), shape=(5, 4), by_hand=False),
    "attention with dropout, time first": Case(lambda: attention(False, 0.3), shape=(5, 4), by_hand=False),
    "transformer with dropout": Case(lambda: transformer(True, p=0.2), shape=(5, 4), by_hand=False),
    "transformer with dropout, time first": Case(lambda: transformer(False, p=0.2), shape=(5, 4), by_hand=False),
    "GRU with dropout": Case(
        lambda: recurrent(nn.GRU(3, 4, 2, batch_first=True, dropout=0.4), 4), shape=(5, 3), by_hand=False
    ),
    "LSTM with dropout": Case(
        lambda: recurrent(nn.LSTM(3, 4, 2, batch_first=True, dropout=0.4, bidirectional=True), 8),
        shape=(5, 3),
        by_hand=False,
    ),
    "dropout as a function": Case(
        lambda: Made(lambda m, x: m.head(F.dropout(m.a(x), 0.5, m.training)), a=nn.Linear(6, 5), head=nn.Linear(5, 3)),
        by_hand=False,
    ),
    "noise": Case(
        lambda: Made(
            lambda m, x: m.head(x + torch.randn_like(x) * torch.rand(6, device=x.device)), head=nn.Linear(6, 3)
        ),
        by_hand=False,
    ),
    "stochastic depth": Case(
        lambda: Made(
            lambda m, x: m.head(x + m.a(x) * x.new_empty(len(x), 1).bernoulli_(0.5)),
            a=nn.Linear(6, 6),
            head=nn.Linear(6, 3),
        ),
        by_hand=False,
    ),
    "gumbel softmax": Case(
        lambda: Made(lambda m, x: m.head(F.gumbel_softmax(m.a(x), 0.7)), a=nn.Linear(6, 5), head=nn.Linear(5, 3)),
        by_hand=False,
    ),
    "RReLU": Case(lambda: chain(nn.Linear(6, 5), nn.RReLU(), nn.Linear(5, 3)), by_hand=False),
    "permutation": Case(
        lambda: Made(lambda m, x: m.head(x[:, torch.randperm(6, device=x.device)]), head=nn.Linear(6, 3)),
        "one by one",
        "draws random numbers",
        by_hand=False,
        gpu=False,
    ),
}


REFUSED: dict[str, Case] = {
    "complex parameters": Case(
        lambda: nn.Linear(6, 3, dtype=torch.complex64), "refused", "'weight' is torch.complex64"
    ),
    "half parameters": Case(lambda: nn.Linear(6, 3).half(), "refused", r"'weight' is torch\.float16"),
    "double parameters": Case(lambda: nn.Linear(6, 3).double(), "refused", r"'weight' is torch\.float64"),
    "two inputs": Case(two_inputs, "refused", "client 'c0': its model cannot take its samples"),
    "tuple output": Case(
        lambda: Made(lambda m, x: (m.head(x), x), head=nn.Linear(6, 3)),
        "refused",
        "client 'c0': its model gives a tuple",
    ),
    "old weight norm": Case(
        lambda: chain(nn.utils.weight_norm(nn.Linear(6, 3))),
        "refused",
        r"client 'c0': layer '0' of its model holds 'weight', .*parametrizations\.weight_norm",
    ),
    "sparse buffer": Case(
        lambda: Made(lambda m, x: m.head(x), head=nn.Linear(6, 3), b=torch.eye(6).to_sparse()),
        "refused",
        "client 'c0': its model has a sparse buffer 'b'; make it dense",
    ),
    "DataParallel": Case(
        lambda: chain(nn.DataParallel(nn.Linear(6, 3))),
        "refused",
        "client 'c0': layer '0' of its model is a DataParallel; give the module inside it",
    ),
    "scripted": Case(
        lambda: chain(scripted()), "refused", "client 'c0': layer '0' of its model is compiled to TorchScript"
    ),
    "lazy layers without a shape": Case(lambda: nn.LazyLinear(3), "refused", "client 'c0': its model has lazy layers"),
    "hook that waits for an accumulated gradient": Case(
        waiting_hook, "refused", "client 'c0': its model has a hook on 'weight'.* use register_hook"
    ),
}

CASES: dict[str, Case] = PLAIN | IMAGES | LAYOUTS | ONE_BY_ONE | DRAWING | REFUSED
