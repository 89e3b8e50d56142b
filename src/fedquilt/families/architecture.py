"""The structure of a module as text: modules of different texts are different, whatever they compute.

Everything a module's code may look at counts: its classes, its plain attributes, private ones included, what its
functions have closed over, its hooks, which parameters are frozen and which are tied. Values of parameters and buffers
do not count, those lie in a client's row; nor do addresses, so that two clients that built the same network twice are
alike. What cannot be read counts as itself: in doubt two things are two.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedquilt.families.copies import parameter_hooks

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
_BY_NAME = (types.BuiltinFunctionType, types.ModuleType, np.dtype, np.ufunc)
_MACHINERY = frozenset(vars(nn.Module()))  # parameters, buffers, children and hooks: told by themselves
_HOOKS = tuple(sorted(name for name in _MACHINERY if name.endswith("_hooks") and "state_dict" not in name))
_MOST_READ = 100_000  # values and numbers of what a builder has closed over, which may be a whole data set
_COMPILER = "torch._dynamo"  # what a compiler keeps beside a module or function changes nothing that it computes


@dataclass(frozen=True)
class Description:
    """Something as text. `mentioned` are the objects that stand in it by their identity: while they live it holds."""

    text: str
    mentioned: tuple[object, ...] = field(compare=False, repr=False)


def describe_architecture(module: nn.Module) -> Description:
    """A module's structure and settings.

    >>> one, same, other = (describe_architecture(nn.Linear(2, out)) for out in (3, 3, 2))
    >>> one == same != other
    True
    """
    reader = _Reader(module)
    return Description("\n".join(reader.part(path, part) for path, part in _parts(module)), tuple(reader.mentioned))


def content(value: object) -> Description:
    """Any value by its content, a function that builds a model, say; what is very big counts as itself.

    >>> content(functools.partial(nn.Linear, 2)) == content(functools.partial(nn.Linear, 2)) != content(nn.Linear)
    True
    """
    reader = _Reader(most=_MOST_READ)
    try:
        text = reader.text(value, frozenset())
    except RecursionError:
        text = reader.itself(value)
    return Description(text, tuple(reader.mentioned))


def attributes(module: nn.Module) -> dict[str, str]:
    """What a module keeps outside of its parameters and buffers: each attribute as text, and its hooks.

    >>> net = nn.Linear(2, 3)
    >>> before = attributes(net)
    >>> net.calls = 1
    >>> attributes(net).keys() - before.keys()
    {'calls'}
    """
    reader = _Reader(module)
    found = {}
    for path, part in module.named_modules():
        for name, value in (_own(part) | {name: _hooks(part, name) for name in _HOOKS}).items():
            found[f"{path}.{name}" if path else name] = reader.text(value, frozenset())
    return found


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(module.named_modules(remove_duplicate=False))


def _own(part: nn.Module) -> dict[str, object]:
    """A module's plain attributes."""
    if type(part).__module__.startswith(_COMPILER):
        return {}
    return {key: value for key, value in vars(part).items() if key not in _MACHINERY}


def _hooks(part: nn.Module, name: str) -> list[object]:
    """The hooks of one kind; their numbers, which count through a process, do not matter."""
    hooks = vars(part).get(name)
    return list(hooks.values()) if isinstance(hooks, Mapping) else []


class _Reader:
    """Makes text of values; the parts of a module are called by their names there."""

    def __init__(self, module: nn.Module | None = None, most: float = math.inf) -> None:
        self.left = most  # values and numbers that are read at most
        self.names: dict[int, str] = {}
        self.mentioned: list[object] = []
        if module is None:
            return
        for path, part in module.named_modules():
            self.names.setdefault(id(part), f"module {path}")
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in tensors:
                shape = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
                self.names.setdefault(id(tensor), f"{kind} {name} {shape}{self.tensor_hooks(tensor)}")

    def part(self, path: str, part: nn.Module) -> str:
        """One module of a bigger one."""
        told = [part._parameters, part._buffers, _own(part), [_hooks(part, name) for name in _HOOKS]]
        return f"{path} {self.kind(type(part))} {self.names[id(part)]} {self.text(told, frozenset())}"

    def tensor_hooks(self, tensor: Tensor) -> str:
        """What is done to a tensor's gradient."""
        return f" {self.text(hooks, frozenset())}" if (hooks := parameter_hooks(tensor)) else ""

    def itself(self, value: object) -> str:
        """A value that stands for itself alone."""
        self.mentioned.append(value)
        return f"{type(value).__qualname__} number {id(value)}"

    def kind(self, kind: type) -> str:
        """A class: by its name where that leads back to it, else itself; a function may make another at each call."""
        found: object = sys.modules.get(kind.__module__)
        for name in kind.__qualname__.split("."):
            found = getattr(found, name, None)
        named = f"{kind.__module__}.{kind.__qualname__}"
        return named if found is kind else f"{named} {self.itself(kind)}"

    def text(self, value: object, above: frozenset[int]) -> str:
        """A value by its content; `above` is what is being described already."""
        if id(value) in self.names:
            return self.names[id(value)]
        if isinstance(value, _PLAIN) and type(value).__module__ in ("builtins", "torch"):
            return repr(value)
        if id(value) in above:
            return "itself"
        self.left -= value.size if isinstance(value, np.ndarray) else value.numel() if isinstance(value, Tensor) else 1
        if self.left < 0:
            return self.itself(value)
        above = above | {id(value)}

        def all_of(*values: object) -> str:
            return ", ".join(self.text(v, above) for v in values)

        if isinstance(value, Tensor | np.ndarray):
            return self.numbers(value)
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, functools.partial):
            return f"partial({all_of(value.func, value.args, value.keywords)})"
        if isinstance(value, types.MethodType):
            return f"method({all_of(value.__func__, value.__self__)})"
        if isinstance(value, types.FunctionType):
            if "_torchdynamo_orig_callable" in vars(value):
                return f"compiled({all_of(vars(value)['_torchdynamo_orig_callable'])})"
            self.mentioned += [value.__code__, value.__globals__]
            closed = [_cell(cell) for cell in value.__closure__ or ()]
            where = f"{id(value.__code__)} in {id(value.__globals__)}"
            return f"function {where}({all_of(value.__defaults__, value.__kwdefaults__, closed, vars(value))})"
        if isinstance(value, _BY_NAME):
            return repr(value)
        if isinstance(value, weakref.ReferenceType | RemovableHandle):
            return type(value).__name__
        return f"{self.kind(type(value))}({all_of(*self.inside(value))})"

    def numbers(self, value: Tensor | np.ndarray) -> str:
        if isinstance(value, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(value):  # a layer still holds what a stack lent it
                return f"lent {value.dtype} {tuple(value.shape)}"
            if value.layout != torch.strided or value.device.type == "meta":
                return self.itself(value)
            array = value.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8).numpy()
            kind = f"{value.dtype} {tuple(value.shape)} {value.requires_grad}{self.tensor_hooks(value)}"
        else:
            if value.dtype.hasobject:
                return f"array {value.shape} [{', '.join(self.text(v, frozenset([id(value)])) for v in value.flat)}]"
            array, kind = np.ascontiguousarray(value), f"{value.dtype} {value.shape}"
        return f"{kind} {hashlib.blake2b(array.tobytes()).hexdigest()}"

    def inside(self, value: object) -> list[object]:
        """What an object holds: items, attributes, slots, the state of a generator; itself where none can be read."""
        held: list[object] = []
        if isinstance(value, Mapping):
            held += [part for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | deque):
            held += list(value)
        elif isinstance(value, set | frozenset):
            held += sorted(self.text(v, frozenset([id(value)])) for v in value)
        elif isinstance(value, random.Random):
            held.append(value.getstate())
        elif isinstance(value, np.random.Generator | np.random.RandomState):
            bits = value.bit_generator if isinstance(value, np.random.Generator) else value
            held.append(bits.state if isinstance(bits, np.random.BitGenerator) else bits.get_state())
        elif isinstance(value, torch.Generator):
            held.append(value.get_state())
        elif isinstance(value, _PLAIN):
            held.append(repr(value))
        slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
        held += [getattr(value, name, None) for name in slots if name not in ("__dict__", "__weakref__")]
        if hasattr(value, "__dict__"):
            held.append(vars(value))
        if held or isinstance(value, list | tuple | deque | set | frozenset | Mapping):
            return held
        try:
            return [value.__reduce_ex__(2)]
        except Exception:  # many things cannot be written down, each in its own way
            return [self.itself(value)]


def _names(slots: object) -> list[str]:
    return [slots] if isinstance(slots, str) else [str(name) for name in slots] if hasattr(slots, "__iter__") else []


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
