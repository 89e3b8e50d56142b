"""A model's code and structure as a checksum, the same in every process: a run goes on only by what it began with.

Shapes and names do not tell a Tanh from a ReLU, nor one forward from another. What counts: the classes of a model and
of its parts, their plain settings, the functions that they are made of as Python compiled them, and the functions,
classes and CONSTANTS of the same packages that these mention. Comments, docstrings and places in a file do not count.
Compiled code differs between versions of Python, so a checksum goes with the version that read it.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt._util.checksums import Damaged, digest

if TYPE_CHECKING:
    from fedquilt.core.federation import Federation
    from fedquilt.methods import Method

_OTHER_CODE = {"changes": "a model that a client changes to", "method": "the method"}
READ_BY = f"{sys.implementation.cache_tag}-{sys.flags.optimize}"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (types.CodeType, Mapping, set, frozenset, list, tuple)
_MACHINERY = frozenset(vars(nn.Module()))  # parameters, buffers, children and hooks
_OF_NO_INTEREST = {"__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__annotations__",
                   "__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__"}  # fmt: skip
_FOREIGN = {"torch", "numpy", *sys.stdlib_module_names} - {"__main__"}


def model_code(federation: Federation) -> dict[str, Any]:
    """Checksums of a federation's models, by the first client of each family, of those they change to, and of a method
    that is not the library's."""
    changes = {id(c.model): c.model for client in federation.scenario.clients for c in client.changes.values()}
    return {
        "read_by": READ_BY,
        "clients": {
            client.name: code_of(client.model, template) for client, template in federation.backend.architectures()
        },
        "changes": code_of(*changes.values()) if changes else "",
        "method": method_code(federation.method),
    }


def same_code(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """The code that the run began with; refuses to go on by other code. Older runs did not keep it."""
    if before and before.get("read_by") != READ_BY:
        warnings.warn(
            f"'{folder}' was begun by {before.get('read_by')}, this is {READ_BY}: whether the code of its "
            "models is still the same cannot be told",
            stacklevel=2,
        )
        return before
    known, current = before.get("clients", {}), now["clients"]
    other = [f"the model of client '{name}'" for name in known if known[name] != current.get(name)]
    other += [what for key, what in _OTHER_CODE.items() if before.get(key, now[key]) != now[key]]
    if before and other:
        raise Damaged(
            f"the code of {other[0]} is not that which '{folder}' was begun with; it was left as it is. Put "
            "the code back or run anew; if results do not depend on the change, take [model_code] out of run.toml"
        )
    return before or now


def method_code(method: Method) -> str:
    """A checksum of a method that is not the library's, empty for one that is.

    What its module is called does not count: a script is `__main__` while it runs, and has another name afterwards.
    """
    from fedquilt.methods.find import own_bases

    kind = type(method)
    return "" if kind.__module__.startswith("fedquilt.") else code_of(*own_bases(kind), nameless=kind.__module__)


def code_of(*things: Any, nameless: str = "") -> str:
    """A checksum of functions, classes and modules; the name of the Python module `nameless` is left out of it.

    >>> code_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == code_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    False
    >>> code_of(lambda x: x + 1) == code_of(lambda x: x + 1) != code_of(lambda x: x + 2)
    True
    """
    packages = set().union(*(_packages(thing) for thing in things)) - _FOREIGN
    reader = _Reader(packages | {nameless.partition(".")[0]}, nameless)
    return digest("\n".join(reader.text(thing) for thing in things).encode())[:32]


class ClassCode:
    """Checksums of the code of models that were trained, whose settings may have changed: of builders and classes.

    >>> ClassCode()(nn.Linear, nn.Linear(2, 2)) == ClassCode()(nn.Linear, nn.Linear(3, 2))
    True
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str] = {}  # most clients have builders and classes in common

    def __call__(self, builder: Any, model: nn.Module) -> str:
        while isinstance(builder, functools.partial):
            builder = builder.func
        classes = dict.fromkeys(type(part) for part in model.modules())
        key = (id(builder), *classes)
        if key not in self._known:
            self._known[key] = code_of(builder, *classes)
        return self._known[key]


def _packages(thing: Any) -> set[str]:
    """The packages that a model's own code is in."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, nn.Module):
        return {kind.__module__.partition(".")[0] for part in thing.modules() for kind in type(part).__mro__}
    return {str(getattr(thing, "__module__", "")).partition(".")[0]}


class _Reader:
    """Writes values as text by what they do; functions, classes and objects once, and then only by their number."""

    def __init__(self, packages: set[str], nameless: str = "") -> None:
        self.packages, self.nameless = packages, nameless
        self.seen: dict[int, tuple[int, Any]] = {}  # holds what it has seen, so that no other takes its place
        self.open: set[int] = set()  # containers being written: one may hold itself

    def text(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, type | types.FunctionType) and not self._own(value):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, _CONTAINERS):  # which of them are one object is up to the compiler
            if id(value) in self.open:
                return "itself"
            self.open.add(id(value))
            text = f"{type(value).__name__}({', '.join(self._parts(value))})"
            self.open.remove(id(value))
            return text
        if id(value) in self.seen:
            return f"#{self.seen[id(value)][0]}"
        self.seen[id(value)] = (len(self.seen), value)
        return f"{type(value).__name__}({', '.join(self._parts(value))})"

    def _own(self, value: type | types.FunctionType) -> bool:
        return str(value.__module__).partition(".")[0] in self.packages

    def _parts(self, value: Any) -> Iterator[str]:
        """What a value consists of, as text."""
        if isinstance(value, types.CodeType):
            yield from (value.co_code.hex(), repr(value.co_names), repr(value.co_varnames), repr(value.co_flags))
            yield from (self.text(constant) for constant in value.co_consts)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield f"{'' if value.__module__ == self.nameless else value.__module__}.{value.__qualname__}"
            yield from (self.text(base) for base in value.__bases__)
            members = {key: member for key, member in vars(value).items() if key not in _OF_NO_INTEREST}
            written = set().union(
                *(_written(m.__code__) for m in members.values() if isinstance(m, types.FunctionType))
            )
            # what the class itself writes to, a counter say, is state and no setting
            yield from self._named({k: v for k, v in members.items() if k not in written or callable(v)})
        elif isinstance(value, nn.Module):
            yield from self._module(value)
        elif isinstance(value, Mapping):
            yield from (f"{self.text(key)}: {self.text(part)}" for key, part in value.items())
        elif isinstance(value, set | frozenset):
            yield from (self.text(part) for part in sorted(value, key=repr))
        elif isinstance(value, list | tuple):
            yield from (self.text(part) for part in value)
        elif isinstance(value, Tensor | np.ndarray):
            whole = torch.as_tensor(value).detach().cpu().contiguous()
            yield f"{whole.dtype} {tuple(whole.shape)} {digest(whole.flatten().view(torch.uint8).numpy().tobytes())}"
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            yield self.text(value.__func__)
        elif isinstance(value, property):
            yield from (self.text(function) for function in (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            yield from (self.text(part) for part in (value.func, value.args, value.keywords))
        elif isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            yield str(value.__name__)
        else:
            yield self.text(type(value))
            yield from self._named(getattr(value, "__dict__", {}))

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        code = function.__code__
        if function.__doc__ is not None and code.co_consts[:1] == (function.__doc__,):
            code = code.replace(co_consts=(None, *code.co_consts[1:]))
        yield self.text(code)
        yield self.text(function.__defaults__)
        yield self.text(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                yield self.text(cell.cell_contents)
            except ValueError:  # not filled yet
                yield "empty"
        for name in sorted(_mentioned(code)):
            value = function.__globals__.get(name)
            if isinstance(value, type | types.FunctionType) or name.isupper():
                yield f"{name}: {self.text(value)}"

    def _module(self, module: nn.Module) -> Iterator[str]:
        for path, part in module.named_modules():
            yield f"{path}: {self.text(type(part))}"
            yield from self._named({k: v for k, v in vars(part).items() if k not in _MACHINERY})
            hooks = (part._forward_pre_hooks, part._forward_hooks, part._backward_hooks, part._backward_pre_hooks)
            yield from (self.text(hook) for some in hooks for hook in some.values())
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}"

    def _named(self, values: Mapping[str, Any]) -> Iterator[str]:
        return (f"{name}: {self.text(value)}" for name, value in sorted(values.items()) if not name.startswith("_abc_"))


def _written(code: types.CodeType) -> set[str]:
    """The attributes that a function writes to."""
    return {str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}


def _mentioned(code: types.CodeType) -> set[str]:
    """The names that a function and those inside of it look up."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_mentioned(one) for one in inner))
