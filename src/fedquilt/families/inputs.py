"""What the last layer of a model is given: found by watching the layer at work, whatever the model is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def taking_inputs(module: nn.Module, paths: Iterable[str]) -> Iterator[list[Tensor]]:
    """While this holds, what some layers of a module are given, call after call, is put into a list.

    >>> import torch
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> with taking_inputs(net, ["1"]) as inputs:
    ...     _ = net(torch.zeros(3, 2, 2))
    >>> inputs[0].shape
    torch.Size([3, 4])
    """
    inputs: list[Tensor] = []

    def take(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim:
            inputs.append(args[0].clone())  # a layer may write on what it is given

    hooks = [module.get_submodule(path).register_forward_pre_hook(take) for path in paths]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
