"""The structure of a module as text: two modules of one text compute the same function of their parameters and input.

Everything a module's code may look at counts: its classes, its plain attributes, private ones included, what its
functions have closed over, which parameters are frozen and which are tied. Addresses do not count, so that two clients
that built the same network twice are one family.
"""

from __future__ import annotations

import functools
import hashlib
import types
import weakref
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.copies import parameter_hooks

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice)
_MACHINERY = frozenset(vars(nn.Module()))  # parameters, buffers, children and hooks: told by themselves


def structure(module: nn.Module) -> str:
    """A module's structure and settings as text.

    >>> structure(nn.Linear(2, 3)) == structure(nn.Linear(2, 3)) != structure(nn.Linear(3, 2))
    True
    """
    names: dict[int, str] = {}
    for path, part in module.named_modules():
        names.setdefault(id(part), f"module {path}")
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            names.setdefault(id(tensor), f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}")
    lines = []
    for path, part in module.named_modules(remove_duplicate=False):
        own = {key: value for key, value in vars(part).items() if key not in _MACHINERY}
        hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
        hooks += [parameter_hooks(p) for p in part._parameters.values() if p is not None]
        text = _text([part._parameters, part._buffers, own, hooks], names, frozenset())
        lines.append(f"{path} {_kind(type(part))} {names[id(part)]} {text}")
    return "\n".join(lines)


def _kind(kind: type) -> str:
    """A class: by its name where that leads back to it, else itself (a function may make another one at each call)."""
    named = f"{kind.__module__}.{kind.__qualname__}"
    return f"{named} {id(kind)}" if "<locals>" in kind.__qualname__ else named


def _text(value: object, names: Mapping[int, str], above: frozenset[int]) -> str:
    """A value as text by its content; `names` are the module's own parts, `above` what is being described already."""
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in above:
        return "itself"
    above = above | {id(value)}

    def all_of(*values: object) -> str:
        return ", ".join(_text(v, names, above) for v in values)

    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().numpy(force=True) if isinstance(value, Tensor) else value
        return f"{array.dtype} {array.shape} {hashlib.blake2b(np.ascontiguousarray(array).tobytes()).hexdigest()}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(k, names, above)}: {_text(v, names, above)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{all_of(*value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_text(v, names, above) for v in value))}}}"
    if isinstance(value, type):
        return _kind(value)
    if isinstance(value, functools.partial):
        return f"partial({all_of(value.func, value.args, value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"method({all_of(value.__func__, value.__self__)})"
    if isinstance(value, types.FunctionType):
        closed = [_cell(cell) for cell in value.__closure__ or ()]
        return f"function {id(value.__code__)}({all_of(value.__defaults__, value.__kwdefaults__, closed)})"
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType | weakref.ReferenceType):
        return "reference" if isinstance(value, weakref.ReferenceType) else repr(value)
    inside = vars(value) if hasattr(value, "__dict__") else repr(value)
    return f"{_kind(type(value))}({_text(inside, names, above)})"


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
