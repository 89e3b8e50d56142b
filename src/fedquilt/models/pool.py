"""A pool of module blocks, the router that sets the gates between them, and what a client assembles (FedMN).

Wang et al. 2022, sections II-A, II-D and II-E. Layers: encoders, then fully connected blocks, then linear outputs.
Nothing here branches on the value of a tensor, so a pool and its router run under `torch.func.vmap`, one client a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedquilt.families.copies import copy_of
from fedquilt.models.gates import Gates, active_blocks, block_names, check_blocks, layers_of, paths, sample_gates

Joint = Literal["product", "concat"]
_CHUNK = 128  # samples a client's router looks at together outside training


class ModulePool(nn.Module):
    """A pool of encoders, fully connected blocks and linear outputs; `forward(x, gates)` predicts along open gates.

    `encoder` builds one encoder, with fresh weights at each call, that gives `features` numbers a sample. Blocks
    between encoders and outputs are linear layers of `width` (default: `features`) with ReLU and dropout. A block's
    input is the mean of the outputs below it, weighted by the gates (eq. 11); a block that no open gate reaches is
    silent: it counts in no mean above it.

    >>> pool = ModulePool(lambda: nn.Linear(4, 8), blocks=[2, 3, 2], features=8, classes=5)
    >>> pool(torch.zeros(6, 4), torch.ones(paths([2, 3, 2]))).shape
    torch.Size([6, 5])
    """

    def __init__(
        self,
        encoder: Callable[[], nn.Module],
        blocks: Sequence[int] = (3, 3, 3),
        *,
        features: int,
        classes: int,
        width: int | None = None,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        check_blocks(blocks)
        self.blocks = tuple(blocks)
        width = features if width is None else width
        self.encoder = nn.ModuleList(encoder() for _ in range(blocks[0]))
        self.block = nn.ModuleDict()
        size = features
        for layer, n in enumerate(blocks[1:-1], start=1):
            self.block[str(layer)] = nn.ModuleList(
                nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Dropout(dropout)) for _ in range(n)
            )
            size = width
        self.output = nn.ModuleList(nn.Linear(size, classes) for _ in range(blocks[-1]))
        # Means over blocks are small where blocks are random; He et al.'s weights keep the signal's size better than
        # PyTorch's, and the pool then learns at the learning rates that plain networks like.
        for layers in self.block.values():
            for block in cast(nn.ModuleList, layers):
                nn.init.kaiming_normal_(cast(nn.Linear, cast(nn.Sequential, block)[0]).weight)
        for block in self.output:
            nn.init.kaiming_normal_(cast(nn.Linear, block).weight, nonlinearity="linear")

    def layers(self) -> list[list[nn.Module]]:
        """The blocks, layer by layer."""
        between = [list(cast(nn.ModuleList, layer)) for layer in self.block.values()]
        return [list(self.encoder), *between, list(self.output)]

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        inputs: Sequence[Tensor] | Tensor = [x] * self.blocks[0]
        reached = torch.ones(self.blocks[0], dtype=gates.dtype, device=gates.device)
        for layer, matrix in zip(self.layers(), layers_of(gates, self.blocks), strict=True):
            out = torch.stack([block(value) for block, value in zip(layer, inputs, strict=True)])  # (n_l, batch, size)
            if out.ndim != 3:
                shape = tuple(out.shape[1:])
                raise ValueError(
                    f"an encoder gave outputs of shape {shape}, not (batch, features): end it with nn.Flatten()"
                )
            flow = matrix * reached.unsqueeze(-1)  # (n_l, n_{l+1})
            total = flow.sum(dim=0)
            reached = (total > 0).to(gates.dtype)
            inputs = torch.einsum("kj,kbd->jbd", flow / torch.where(total > 0, total, 1.0), out)
        return inputs[0]


class Router(nn.Module):
    """From a client's samples and labels to the logits of its gates (eq. 7-10); `forward(x, y, mask)` gives (E,).

    `joint="product"` is eq. 8: the mean over samples of phi_x(x) * phi_y(y), mapped to the logits, sees which labels go
    with which samples. `joint="concat"` is eq. 9: averaged, a linear layer on [phi_x(x), phi_y(y)] sees the samples and
    the labels apart. `normalise` brings what enters the last layer to unit length, as section IV-B has it: each
    sample's concatenation (which lets a trace of the joint distribution in, through the length), or the client's mean
    product. `start` is the first probability of every path: above 1/2 the gates begin open.

    Two things make the product work where only the joint distribution differs. Labels are centred (one-hot less
    1 / classes): otherwise the part of the mean that all clients have in common, E phi_x * E phi_y, is many times what
    tells them apart, and all learn one route. And the mean is brought to unit length, times the root of its size, so
    that what tells them apart moves the logits by about 1 from the start.

    >>> router = Router(lambda: nn.Linear(4, 8), features=8, classes=3, paths=21)
    >>> router(torch.randn(10, 4), torch.arange(10) % 3).shape
    torch.Size([21])
    """

    def __init__(
        self,
        encoder: Callable[[], nn.Module],
        *,
        features: int,
        classes: int,
        paths: int,
        joint: Joint = "product",
        normalise: bool = True,
        start: float = 0.6,
    ) -> None:
        super().__init__()
        if joint not in ("product", "concat"):
            raise ValueError(f"joint='{joint}' is not known; take 'product' or 'concat'")
        if not 0 < start < 1:
            raise ValueError(f"start={start} is the first probability of a path; it must be between 0 and 1")
        self.joint, self.normalise, self.classes = joint, normalise, classes
        self.phi_x = encoder()
        self.phi_y = nn.Linear(classes, features, bias=joint == "concat")
        self.head = nn.Linear(features if joint == "product" else 2 * features, paths)
        nn.init.constant_(self.head.bias, math.log(start / (1 - start)))

    def extra_repr(self) -> str:
        return f"joint={self.joint!r}, normalise={self.normalise}"

    def embed(self, x: Tensor, y: Tensor) -> Tensor:
        """The joint embedding of each sample with its label, (n, size)."""
        labels = (y.unsqueeze(-1) == torch.arange(self.classes, device=y.device)).to(self.phi_y.weight.dtype)
        if self.joint == "product":
            return cast(Tensor, self.phi_x(x) * self.phi_y(labels - 1 / self.classes))
        both = torch.cat([self.phi_x(x), self.phi_y(labels)], dim=-1)
        return F.normalize(both, dim=-1) if self.normalise else both

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(y, dtype=self.head.weight.dtype) if mask is None else mask
        # All of a client's samples may be more than memory holds; a training batch stays whole for its batch norms.
        size = len(y) if self.training else _CHUNK
        parts = [slice(at, at + size) for at in range(0, len(y), size)]
        total = torch.stack([mask[part] @ self.embed(x[part], y[part]) for part in parts]).sum(dim=0)
        mean = total / mask.sum().clamp_min(1.0)
        if self.joint == "product" and self.normalise:
            mean = F.normalize(mean, dim=-1) * math.sqrt(mean.shape[-1])
        # The head is linear: applied to the mean it gives the mean of what it gives to each sample.
        return cast(Tensor, self.head(mean))


class RoutedNetwork(nn.Module):
    """A pool, its router and the client's route: what a FedMN client trains, and an ordinary classifier to others.

    `forward(x)` predicts along `route`, the client's binary decision; all paths are open until it is made.
    `forward(x, y=y)` gives the router's logits for these samples, and `forward(x, logits=logits, noise=noise)` predicts
    with gates drawn from them, as in training, along the paths `within` if these are given.

    >>> net = RoutedNetwork(lambda: nn.Linear(4, 8), [2, 2], features=8, classes=3)
    >>> x, y = torch.randn(5, 4), torch.arange(5) % 3
    >>> logits = net(x, y=y)
    >>> logits.shape, net(x).shape, net(x, logits=logits, noise=torch.rand(6)).shape
    (torch.Size([6]), torch.Size([5, 3]), torch.Size([5, 3]))
    """

    route: Tensor

    def __init__(
        self,
        encoder: Callable[[], nn.Module],
        blocks: Sequence[int] = (3, 3, 3),
        *,
        features: int,
        classes: int,
        width: int | None = None,
        dropout: float = 0.2,
        joint: Joint = "product",
        normalise: bool = True,
        start: float = 0.6,
        gates: Gates = "relaxed",
    ) -> None:
        super().__init__()
        if gates not in ("relaxed", "straight-through"):
            raise ValueError(f"gates='{gates}' is not known; take 'relaxed' or 'straight-through'")
        self.gates = gates
        self.pool = ModulePool(encoder, blocks, features=features, classes=classes, width=width, dropout=dropout)
        self.router = Router(
            encoder,
            features=features,
            classes=classes,
            paths=paths(blocks),
            joint=joint,
            normalise=normalise,
            start=start,
        )
        self.register_buffer("route", torch.ones(paths(blocks)))
        self.units = {name: [f"pool.{name}"] for name in block_names(blocks)}
        self.units |= {"router": ["router"], "route": ["route"]}

    def extra_repr(self) -> str:
        return f"blocks={list(self.pool.blocks)}, gates={self.gates!r}"

    def assembled(self) -> Assembled:
        """The client's network as an ordinary module, without the router and the blocks its route leaves out."""
        return assembled(self.pool, self.route)

    def forward(
        self,
        x: Tensor,
        *,
        y: Tensor | None = None,
        mask: Tensor | None = None,
        logits: Tensor | None = None,
        noise: Tensor | None = None,
        temperature: Tensor | float = 1.0,
        within: Tensor | None = None,
    ) -> Tensor:
        if y is not None:
            return cast(Tensor, self.router(x, y, mask))
        if logits is None or noise is None:
            return cast(Tensor, self.pool(x, self.route))
        gates = sample_gates(logits, noise, temperature, self.pool.blocks, self.gates, within)
        return cast(Tensor, self.pool(x, gates))


def routed(model: nn.Module, blocks: Sequence[int], classes: int, width: int | None, **how: Any) -> RoutedNetwork:
    """A client's model as a pool whose encoders have its weights; one that is a `RoutedNetwork` is taken as it is.

    `width` is that of blocks between encoders and outputs (None: as the model's last hidden layer); `how` are further
    settings of a `RoutedNetwork`.

    >>> routed(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), [2, 2], 3, None).pool.blocks
    (2, 2)
    """
    if isinstance(model, RoutedNetwork):
        return model
    encoder, features, hidden = split_head(model, len(blocks) - 1)
    return RoutedNetwork(encoder, blocks, features=features, classes=classes, width=width or hidden, **how)


def split_head(model: nn.Module, layers: int) -> tuple[Callable[[], nn.Module], int, int]:
    """A classifier's encoder: how to build one, how many features it gives, and the width of its last hidden layer.

    The encoder is the model without its linear layers at the top, at most `layers` of them and leaving one layer with
    parameters in place; activations between them stay. Each call of the builder gives a new encoder with the model's
    own weights, so that pretrained ones survive. Encoders that start alike do not stay so: the gates above them differ.

    >>> build, features, width = split_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), layers=2)
    >>> build()
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Identity()
    )
    >>> features, width
    (8, 8)
    """
    owners = [(path, module) for path, module in model.named_modules() if any(True for _ in module.parameters(False))]
    head = list(itertools.takewhile(lambda owner: isinstance(owner[1], nn.Linear), reversed(owners)))
    head = head[: min(layers, len(owners) - 1)]
    if not head:
        raise ValueError(
            f"{type(model).__name__} does not end with a linear layer above other layers, so its encoder cannot be "
            "told from its head; build the client's model as a RoutedNetwork with an encoder of your own"
        )
    bare = copy_of(model)
    for path, _ in head:
        parent, _, child = path.rpartition(".")
        setattr(bare.get_submodule(parent), child, nn.Identity())

    def build() -> nn.Module:
        return copy_of(bare)

    return build, cast(nn.Linear, head[-1][1]).in_features, cast(nn.Linear, head[0][1]).in_features


class Assembled(nn.Module):
    """A client's network as its gates assemble it: active blocks only, an ordinary module. See `assembled`."""

    def __init__(self, pool: ModulePool, gates: Tensor) -> None:
        super().__init__()
        active = active_blocks(gates, pool.blocks).split_with_sizes(list(pool.blocks))
        self.kept = [[j for j, on in enumerate(layer.tolist()) if on] for layer in active]  # each layer's blocks
        if not self.kept[0]:
            raise ValueError("these gates leave no complete path open; open one with keep_one_path")
        self.layers = nn.ModuleList(
            nn.ModuleList(copy_of(layer[j]) for j in kept) for layer, kept in zip(pool.layers(), self.kept, strict=True)
        )
        self.inputs = []  # for each block of a layer, then for the prediction: where in the layer below its inputs are
        steps = layers_of(gates > 0.5, pool.blocks)
        for below, above, matrix in zip(self.kept, [*self.kept[1:], [0]], steps, strict=True):
            self.inputs.append([[at for at, k in enumerate(below) if matrix[k, j]] for j in above])

    def forward(self, x: Tensor) -> Tensor:
        values = [x] * len(self.kept[0])
        for layer, inputs in zip(self.layers, self.inputs, strict=True):
            out = [block(value) for block, value in zip(cast(nn.ModuleList, layer), values, strict=True)]
            values = [torch.stack([out[at] for at in places]).mean(dim=0) for places in inputs]
        return values[0]


def assembled(pool: ModulePool, gates: Tensor) -> Assembled:
    """The network that binary gates assemble from a pool, without its inactive blocks; its outputs are the same.

    >>> pool = ModulePool(lambda: nn.Linear(4, 8), [2, 2], features=8, classes=3)
    >>> net = assembled(pool, torch.tensor([1., 0., 1., 0.,  1., 0.]))
    >>> net.kept
    [[0, 1], [0]]
    """
    return Assembled(pool, gates.detach().cpu()).train(pool.training)
