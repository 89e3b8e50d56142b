"""Device work captured once and replayed, so that a GPU does not wait for Python."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def captures(device: torch.device) -> bool:
    """Whether work on a device is captured."""
    return device.type == "cuda"


class Graph:
    """A function's work on a GPU, recorded without doing it; `replay` does it. `bytes` is the memory it holds.

    A RuntimeError from here means that the function does something a graph cannot hold, such as asking the device a
    question. Graphs that leave nothing in their memory when they end may have one `pool` of it in common.
    """

    def __init__(self, body: Callable[[], None], device: torch.device, pool: Any = None) -> None:
        reserved = torch.cuda.memory_reserved(device)
        self.graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # freeing an old graph while a new one is captured breaks the new one
        try:
            torch.cuda.synchronize(device)
            with torch.cuda.graph(self.graph, pool=pool):
                body()
        finally:
            if collecting:
                gc.enable()
            torch.cuda.synchronize(device)
        self.bytes = max(0, torch.cuda.memory_reserved(device) - reserved)

    def replay(self) -> None:
        """Do the work."""
        self.graph.replay()
