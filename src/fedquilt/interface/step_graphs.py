"""What steps compute for stacks of clients on a GPU: captured when it comes again, and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedquilt.engines.cuda_graph import Graph

_MOST_GRAPHS = 32  # shapes of work that are remembered for a family
_MOST_BYTES = 2**28  # of what a step is given: bigger work takes longer than launching it, and graphs keep memory

Tree = Mapping[str, Any]  # tensors by name, or such trees
Body = Callable[[Tree, set[str]], dict[str, Tensor]]


@dataclass
class _Known:
    """Work of one shape that was done before: by which numbers, and its graph once there is one."""

    numbers: Mapping[str, float]
    inputs: Tree = field(default_factory=dict)  # where the graph reads what it is given
    outputs: dict[str, Tensor] = field(default_factory=dict)
    graph: Graph | None = None
    eager: bool = False


class StepGraphs:
    """The graphs of a family's steps, by what they are of.

    A step is a function of tensors, and of a few numbers that a graph would hold for good, the round among them. Which
    of these it asks for is noted when it is done for the first time; where one of those changes, it is done as it is.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def run(self, name: Hashable, body: Body, given: Tree, numbers: Mapping[str, float]) -> dict[str, Tensor]:
        """body(given, noted), where `given` is a tree of tensors and `noted` gets the names of the numbers asked for.

        What cannot be captured, as it asks the device a question, is done as it is.
        """
        leaves = dict(_leaves(given))
        key = (name, tuple((path, tuple(leaf.shape), leaf.dtype) for path, leaf in leaves.items()))
        known = self._known.pop(key, None)
        if known is None or any(numbers[asked] != value for asked, value in known.numbers.items()):
            noted: set[str] = set()
            found = body(given, noted)
            known = _Known({asked: numbers[asked] for asked in noted})
            much = sum(leaf.numel() * leaf.element_size() for leaf in leaves.values()) > _MOST_BYTES
            known.eager = much or not found  # a graph of nothing is none
            self._keep(key, known)
            return found
        self._keep(key, known)
        if known.graph is None and not known.eager:
            self._capture(known, body, given)
        if known.graph is None:
            return body(given, set())
        for path, mine in _leaves(known.inputs):
            mine.copy_(leaves[path])
        known.graph.replay()
        return {of: value.clone() for of, value in known.outputs.items()}  # the next replay writes where these lie

    def _keep(self, key: Hashable, known: _Known) -> None:
        self._known[key] = known  # the latest used is the last
        if len(self._known) > _MOST_GRAPHS:
            self._known.pop(next(iter(self._known)))

    def _capture(self, known: _Known, body: Body, given: Tree) -> None:
        inputs = _copied(given)

        def work() -> None:
            known.outputs.update({name: value.clone() for name, value in body(inputs, set()).items()})

        try:
            graph = Graph(work, next(leaf.device for _, leaf in _leaves(inputs)))
            known.inputs, known.graph = inputs, graph
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            known.eager = True
            known.outputs.clear()

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return sum(known.graph is not None for known in self._known.values())

    def clear(self) -> None:
        """Give all graphs and their memory back."""
        self._known.clear()


def _leaves(tree: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The tensors of a tree, each with its path."""
    for name, part in tree.items():
        if isinstance(part, Tensor):
            yield (*above, name), part
        else:
            yield from _leaves(part, (*above, name))


def _copied(tree: Tree) -> dict[str, Any]:
    """The same tree of tensors of its own, each as it reads."""
    return {
        name: part.clone(memory_format=torch.contiguous_format) if isinstance(part, Tensor) else _copied(part)
        for name, part in tree.items()
    }
