"""The program of a step, recorded once: what it does to tensors and nothing of the Python that decided it.

A recorded step runs without vmap's dispatch. It may also be compiled: TorchInductor joins what it does into few
kernels, in C++ on a CPU and in Triton on a GPU. That takes from seconds to a minute for each size of a batch, so it is
for long runs; PyTorch keeps what it compiled and the next run of the same model finds it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedquilt.engines.simplify import simplified
from fedquilt.engines.stackability import python_state
from fedquilt.layers.draws import in_one_operation

DECIDES = "this model decides something in Python in every step (by chance, or by a counter), so steps are not {}"

Program = Callable[..., Any]
_NOTHING = torch.empty(0)


def recorded(program: Program, module: nn.Module, arguments: tuple[Any, ...], compiled: bool) -> Program:
    """A program traced with these arguments and, if wanted, compiled; itself where it cannot be, said once.

    It takes tensors, stacks of them (dicts) and None, and returns a tuple of such.

    >>> double = recorded(lambda x: ({"y": 2 * x},), nn.Identity(), (torch.ones(2),), compiled=False)
    >>> double(torch.tensor([3.0, 4.0]))
    ({'y': tensor([6., 8.])},)
    """
    returned: list[tuple[Any, ...]] = []

    def of_tensors(*tensors: Tensor) -> list[Tensor]:
        outputs = program(*_filled(arguments, tensors))
        found = _tensors(outputs)
        returned.append(_filled(outputs, [_NOTHING] * len(found)))  # their form, without what they hold
        return found

    tensors = _laid_out(arguments, compiled)
    done = "compiled" if compiled else "traced"
    before = python_state(module)
    try:
        # Or what models draw would depend on when a step was traced.
        with torch.random.fork_rng(devices=[]), in_one_operation() if compiled else nullcontext():
            traced = make_fx(of_tensors)(*tensors)
        if python_state(module) != before:
            warnings.warn(DECIDES.format(done), RuntimeWarning, stacklevel=3)
            return program
        program_of_tensors = _compiled(traced, tensors) if compiled else simplified(traced)
    except Exception as error:  # recording is only a way to be faster
        warnings.warn(f"a step could not be {done} and runs as it is: {error}", RuntimeWarning, stacklevel=3)
        return program
    return lambda *now: _filled(returned[-1], program_of_tensors(*_laid_out(now, compiled)))


def _laid_out(arguments: tuple[Any, ...], compiled: bool) -> list[Tensor]:
    """All tensors among arguments; what is compiled is so for one layout of each, and a view may come in another."""
    tensors = _tensors(arguments)
    return [tensor.contiguous() for tensor in tensors] if compiled else tensors


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Their tensors in order. PyTorch's pytrees would do it too, and would take a tenth of a small step."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, dict):
            found.extend(value.values())
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def _filled(values: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The same with these tensors in place of theirs."""
    rest = iter(tensors)
    return tuple(
        {name: next(rest) for name in value} if isinstance(value, dict)
        else next(rest) if isinstance(value, Tensor)
        else value
        for value in values
    )  # fmt: skip


def _compiled(traced: Any, tensors: list[Tensor]) -> Program:
    """The same compiled, seen to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about precisions and versions
        from torch._inductor import compile as inductor  # takes seconds to import

        program: Program = inductor(traced, [*tensors])
        program(*tensors)
    return program
