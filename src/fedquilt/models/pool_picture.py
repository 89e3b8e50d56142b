"""A FedMN client's network to look at: the blocks its route puts to use, as a tree of text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from rich.tree import Tree
from torch import nn

from fedquilt.models.gates import active_blocks, block_names, layers_of
from fedquilt.models.pool import RoutedNetwork

ACTIVE, IDLE, ENDS = "#0072B2", "#BBBBBB", "#E69F00"  # told apart by colour-blind readers too


@dataclass(frozen=True)
class Route:
    """A client's assembled network: `console.print(Route(network))`, or `str(Route(network))` for plain text.

    The tree goes from the prediction down to the encoders. A block that several others use is drawn out once.

    >>> import torch
    >>> network = RoutedNetwork(lambda: nn.Linear(4, 8), [2, 2], features=8, classes=3)
    >>> _ = network.route.copy_(torch.tensor([1.0, 1, 0, 1, 0, 1]))
    >>> print(Route(network, "phone-3"))
    phone-3: 3 of 4 blocks, 107 of 134 parameters
    └── output.1
        ├── encoder.0
        └── encoder.1
    """

    network: RoutedNetwork
    name: str = "network"

    @cached_property
    def active(self) -> list[list[int]]:
        """The blocks in use, layer by layer."""
        blocks = self.network.pool.blocks
        used = active_blocks(self.network.route, blocks).split_with_sizes(list(blocks))
        return [[j for j, on in enumerate(layer.tolist()) if on] for layer in used]

    def steps(self) -> list[tuple[int, int, int]]:
        """Open paths between blocks in use: layer, block and the block above; the prediction is block 0 above all."""
        matrices = layers_of(self.network.route, self.network.pool.blocks)
        above = [*self.active[1:], [0]]
        return [
            (layer, k, j)
            for layer, matrix in enumerate(matrices)
            for k in self.active[layer]
            for j in above[layer]
            if matrix[k, j] > 0.5
        ]

    def title(self) -> str:
        """How much of the pool is in use."""
        layers = self.network.pool.layers()
        sizes = [[sum(p.numel() for p in block.parameters()) for block in layer] for layer in layers]
        used = sum(sizes[layer][j] for layer, kept in enumerate(self.active) for j in kept)
        number, blocks = sum(len(kept) for kept in self.active), sum(self.network.pool.blocks)
        return f"{self.name}: {number} of {blocks} blocks, {used:,} of {sum(map(sum, sizes)):,} parameters"

    def tree(self) -> Tree:
        """The network as a tree to print."""
        names = iter(block_names(self.network.pool.blocks))
        name = [[next(names) for _ in range(n)] for n in self.network.pool.blocks]
        below: dict[tuple[int, int], list[int]] = {}
        for layer, k, j in self.steps():
            below.setdefault((layer + 1, j), []).append(k)
        drawn: set[tuple[int, int]] = set()

        def grow(branch: Tree, layer: int, j: int) -> None:
            for k in below.get((layer, j), []):
                again = (layer - 1, k) in drawn and layer > 1
                twig = branch.add(Text(name[layer - 1][k] + (" (as above)" if again else "")))
                if not again:
                    drawn.add((layer - 1, k))
                    grow(twig, layer - 1, k)

        tree = Tree(Text(self.title()))
        grow(tree, len(name), 0)
        return tree

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.tree()

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self.tree())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def draw_routes(networks: Mapping[str, nn.Module], path: str | Path | None = None, columns: int = 4) -> Any:
    """A picture of clients' networks side by side, as a matplotlib figure; written to `path` where one is given.

    Encoders are at the bottom, the prediction at the top; blocks in use and open paths are dark, the rest of the pool
    is pale.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing routes needs matplotlib; install fedquilt[plots]") from error
    if not networks:
        raise ValueError("there is no network to draw; give at least one client's")
    columns = min(columns, len(networks))
    rows = -(-len(networks) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.0 * rows), layout="constrained")
    for at, (name, network) in enumerate(networks.items()):
        if not isinstance(network, RoutedNetwork):
            raise TypeError(f"client '{name}' has a {type(network).__name__}, which has no route; draw FedMN's clients")
        _draw(figure.add_subplot(rows, columns, at + 1), Route(network, name))
    if path is not None:
        figure.savefig(path)
    return figure


def _draw(axes: Any, route: Route) -> None:
    blocks = [*route.network.pool.blocks, 1]
    place = {(layer, j): (j - (n - 1) / 2, layer) for layer, n in enumerate(blocks) for j in range(n)}
    open_ = set(route.steps())
    for layer, n in enumerate(blocks[:-1]):
        for k in range(n):
            for j in range(blocks[layer + 1]):
                (x, y), (u, v) = place[layer, k], place[layer + 1, j]
                used = (layer, k, j) in open_
                axes.plot([x, u], [y, v], color=ACTIVE if used else IDLE, lw=2.0 if used else 0.5, zorder=1)
    for (layer, j), (x, y) in place.items():
        last = layer == len(blocks) - 1
        used = last or j in route.active[layer]
        axes.scatter([x], [y], s=160, color=ENDS if last else ACTIVE if used else "white", edgecolors=IDLE, zorder=2)
    kinds = ["encoders", *(f"blocks {layer}" for layer in range(1, len(blocks) - 2)), "outputs", "prediction"]
    axes.set_yticks(range(len(blocks)), kinds)
    axes.set_xticks([])
    axes.set_xlim(-max(blocks) / 2, max(blocks) / 2)
    name, _, use = route.title().rpartition(": ")
    axes.set_title(f"{name}\n" + use.replace(" blocks, ", " blocks,\n"), fontsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
