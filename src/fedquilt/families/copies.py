"""Copies of modules that belong to themselves: their hooks are there, and what they close over is the copy's.

`copy.deepcopy` drops the hooks of parameters, and leaves functions as they are: a hook that looks at `self.mask` would
look at the mask of the module it was copied from.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def copy_of(module: M) -> M:
    """A deep copy of a module, with the hooks of its parameters, and functions that see the copy.

    >>> class Pruned(nn.Linear):
    ...     def __init__(self):
    ...         super().__init__(2, 1)
    ...         self.weight.register_hook(lambda gradient: gradient * self.weight.ne(0))
    >>> twin = copy_of(Pruned())
    >>> twin.weight.data.zero_()[0, 0].item(), (twin(twin.weight.detach() + 1)).sum().backward(), twin.weight.grad
    (0.0, None, tensor([[0., 0.]]))
    """
    functions = _Search(module).found
    memo: dict[int, Any] = {key: _twin(function) for key, function in functions.items()}
    twin = copy.deepcopy(module, memo)
    for key, function in functions.items():
        _fill(function, memo[key], memo)
    for parameter in module.parameters():
        for hook in parameter_hooks(parameter):
            memo[id(parameter)].register_hook(copy.deepcopy(hook, memo))
    return twin


def parameter_hooks(parameter: Tensor) -> tuple[Any, ...]:
    """The functions that a parameter's gradient goes through."""
    hooks: Mapping[int, Any] | None = parameter._backward_hooks
    return tuple(hooks.values()) if hooks else ()


class _Search:
    """Finds the functions that a module holds and that lead back to it, through what they close over or by default."""

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[int, types.FunctionType] = {}
        self.seen: list[object] = []  # kept, or another value could get the same id
        self.leads = {id(part): True for part in (*module.modules(), *module.parameters(), *module.buffers())}
        for part in module.modules():
            self.follow(vars(part))
        for parameter in module.parameters():
            self.follow(parameter_hooks(parameter))

    def follow(self, value: object) -> bool:
        """Whether a value leads to a part of the module."""
        if isinstance(value, str | bytes | int | float | type | types.ModuleType):
            return False
        if id(value) not in self.leads:
            self.seen.append(value)
            self.leads[id(value)] = False  # while it is being looked at: it may hold itself
            inside = [self.follow(each) for each in _inside(value)]  # all of them: each may hold functions
            self.leads[id(value)] = any(inside)
            if isinstance(value, types.FunctionType) and self.leads[id(value)]:
                self.found[id(value)] = value
        return self.leads[id(value)]


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, types.FunctionType):
        return (*_closed_over(value), value.__defaults__ or (), value.__kwdefaults__ or {})
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _closed_over(function: types.FunctionType) -> list[object]:
    return [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _twin(function: types.FunctionType) -> types.FunctionType:
    """The same function with nothing in what it closes over yet."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    functools.update_wrapper(twin, function)
    del twin.__wrapped__  # type: ignore[attr-defined]
    return twin


def _fill(function: types.FunctionType, twin: types.FunctionType, memo: dict[int, Any]) -> None:
    """Let a function's twin see, of what the function sees, the copies where there are any."""

    def followed(value: Any) -> Any:
        return (
            copy.deepcopy(value, memo) if isinstance(value, list | tuple | dict | set) else memo.get(id(value), value)
        )

    for mine, its in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
        if _is_filled(mine):
            its.cell_contents = followed(mine.cell_contents)
    twin.__defaults__ = followed(function.__defaults__)
    twin.__kwdefaults__ = followed(function.__kwdefaults__)
