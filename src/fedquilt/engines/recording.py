"""The program of a step, recorded once: what it does to tensors and nothing of the Python that decided it.

A recorded step runs without vmap's dispatch. It may also be compiled: TorchInductor joins what it does into few
kernels, in C++ on a CPU and in Triton on a GPU. That takes from seconds to a minute for each size of a batch, so it is
for long runs; PyTorch keeps what it compiled and the next run of the same model finds it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedquilt.engines.stackability import python_state
from fedquilt.layers.draws import in_one_operation

DECIDES = "this model decides something in Python in every step (by chance, or by a counter), so steps are not {}"

Program = Callable[..., Any]


def recorded(program: Program, module: nn.Module, arguments: tuple[Any, ...], compiled: bool) -> Program:
    """A program of tensors, traced with these arguments and, if wanted, compiled; itself where it cannot be, said once.

    >>> double = recorded(lambda given: {"y": 2 * given["x"]}, nn.Identity(), ({"x": torch.ones(2)},), compiled=False)
    >>> double({"x": torch.tensor([3.0, 4.0])})
    {'y': tensor([6., 8.])}
    """
    leaves, given = tree_flatten(arguments)
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    returned: list[Any] = []

    def of_tensors(*tensors: Tensor) -> list[Tensor]:
        every = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            every[at] = tensor
        outputs, how = tree_flatten(program(*tree_unflatten(every, given)))
        returned.append(how)
        return outputs

    tensors = _tensors(arguments, compiled)
    done = "compiled" if compiled else "traced"
    before = python_state(module)
    try:
        # Or what models draw would depend on when a step was traced.
        with torch.random.fork_rng(devices=[]), in_one_operation() if compiled else nullcontext():
            traced: Program = make_fx(of_tensors)(*tensors)
        if python_state(module) != before:
            warnings.warn(DECIDES.format(done), RuntimeWarning, stacklevel=3)
            return program
        if compiled:
            traced = _compiled(traced, tensors)
    except Exception as error:  # recording is only a way to be faster
        warnings.warn(f"a step could not be {done} and runs as it is: {error}", RuntimeWarning, stacklevel=3)
        return program
    return lambda *now: tree_unflatten(traced(*_tensors(now, compiled)), returned[-1])


def _tensors(arguments: tuple[Any, ...], compiled: bool) -> list[Tensor]:
    """All tensors among arguments; what is compiled is so for one layout of each, and a view may come in another."""
    tensors = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]
    return [tensor.contiguous() for tensor in tensors] if compiled else tensors


def _compiled(traced: Any, tensors: list[Tensor]) -> Program:
    """The same compiled, seen to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about precisions and versions
        from torch._inductor import compile as inductor  # takes seconds to import

        program: Program = inductor(traced, [*tensors])
        program(*tensors)
    return program
