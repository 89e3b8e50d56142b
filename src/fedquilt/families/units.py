"""Cutting any nn.Module into named, ordered units; what is learned and what is not told apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.fx import Tracer

from fedquilt._util.turns import one_at_a_time
from fedquilt.families.habits import seeded

Cut = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Unit:
    """A named slice of what a client holds: the names of its parameters and of its buffers.

    A frozen parameter (`requires_grad=False`) is one of the buffers: no step of training moves it.
    `kinds` says what kinds of layers these belong to: norm, linear, convolution, recurrent, embedding, attention or
    other. A unit of `state` is no part of a model: its buffers are what a method keeps with the client.
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    state: bool = False


KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "norm": (
        nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
    ),
    "linear": (nn.Linear, nn.Bilinear),
    "convolution": (nn.modules.conv._ConvNd,),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "attention": (nn.MultiheadAttention,),
}  # fmt: skip


def kind_of(layer: nn.Module) -> str:
    """What kind of layer a module is, by its type.

    >>> kind_of(nn.BatchNorm2d(3)), kind_of(nn.Conv1d(1, 1, 1)), kind_of(nn.PReLU())
    ('norm', 'convolution', 'other')
    """
    return next((kind for kind, types in KINDS.items() if isinstance(layer, types)), "other")


def cut(module: nn.Module, mapping: Cut | None = None) -> tuple[Unit, ...]:
    """The units of a module, bottom to top.

    Without a mapping, a module's own declaration (an attribute `units` of the same form) is taken; without that, each
    submodule that holds parameters or buffers itself is a unit, named by its path, in the order in which `forward`
    calls them (of registration, where that cannot be found out without running it on data). A mapping names each unit
    with patterns for the modules or tensors in it; every tensor must fall into just one unit.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> [unit.name for unit in cut(net)]
    ['0', '2']
    >>> cut(net, {"base": ["0"], "head": ["2*"]})[1].parameters
    ('2.weight', '2.bias')
    """
    declared = getattr(module, "units", None)
    if mapping is None and isinstance(declared, Mapping):  # a number of hidden units, say, declares nothing
        mapping = declared
    parameters = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    buffers = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    buffers += [name for name, _ in module.named_buffers()]
    if not parameters and not buffers:
        raise ValueError(f"{type(module).__name__} has neither parameters nor buffers; there is nothing to cut")
    if mapping is None:
        paths = {name: name.rpartition(".")[0] for name in parameters + buffers}
        top = "model" if "model" not in paths.values() else "top"  # what the module itself holds needs a name as well
        home = {name: path or top for name, path in paths.items()}
        names = [
            path or top for path in _in_order(module, [p for p, _ in module.named_modules() if p in paths.values()])
        ]
    else:
        home = {name: _place(name, mapping) for name in parameters + buffers}
        names = list(mapping)
        _check_patterns(module, parameters + buffers, mapping)
    units = []
    for unit in names:
        mine = [[n for n in tensors if home[n] == unit] for tensors in (parameters, buffers)]
        owners = dict.fromkeys(name.rpartition(".")[0] for name in mine[0] + mine[1])
        kinds = dict.fromkeys(kind_of(module.get_submodule(path)) for path in owners)
        units.append(Unit(unit, tuple(mine[0]), tuple(mine[1]), tuple(kinds)))
    return tuple(units)


def _in_order(module: nn.Module, paths: list[str]) -> list[str]:
    """Paths of submodules in the order in which they are first called; one that is never called stays where it is."""
    if all(type(part) is nn.Sequential or not list(part.children()) for part in module.modules()):
        return paths  # called as registered, which tracing would only take time to find out
    called: dict[str, int] = {}
    try:
        with one_at_a_time, seeded(0):  # forward may draw; tracing changes nn.Module for all threads
            for at, node in enumerate(Tracer().trace(copy.deepcopy(module)).nodes):  # forward may count its calls
                if node.op in ("call_module", "get_attr"):
                    called.setdefault(str(node.target), at)
    except Exception:  # what forward does depends on data, which there are none of here
        return paths
    first, last = {}, -1
    for path in paths:
        inside = [
            at for target, at in called.items() if f"{target}.".startswith(f"{path}.") or path.startswith(f"{target}.")
        ]
        first[path] = last = min(inside, default=last) if path else last
    return sorted(paths, key=lambda path: first[path])


def by_layer(module: nn.Module) -> tuple[Unit, ...]:
    """The units of a module layer by layer, whatever cut it declares itself.

    >>> [unit.name for unit in by_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))]
    ['0', '2']
    """
    layers: dict[str, list[str]] = {}
    for name in [*dict(module.named_parameters()), *dict(module.named_buffers())]:
        layers.setdefault(name.rpartition(".")[0] or "model", []).append(name)
    return cut(module, layers)


def modules_of(module: nn.Module, names: Sequence[str], split: int | None = None) -> Mapping[str, Sequence[str]] | None:
    """A cut into modules of these names: at `split`, else where the module has all of them as attributes.

    None, which is the module's own cut, where it declares units itself or has no such attributes.

    >>> net = nn.Module()
    >>> net.body, net.head = nn.Linear(2, 3), nn.Linear(3, 1)
    >>> modules_of(net, ("body", "head")), modules_of(nn.Linear(2, 1), ("body", "head"))
    ({'body': ['body'], 'head': ['head']}, None)
    """
    if split is not None:
        return in_two(module, split, names)
    there = all(isinstance(getattr(module, name, None), nn.Module) for name in names)
    declared = isinstance(getattr(module, "units", None), Mapping)
    return {name: [name] for name in names} if there and not declared else None


def in_two(module: nn.Module, split: int, names: Sequence[str]) -> dict[str, list[str]]:
    """A cut in two: so many units at the bottom, and the others; a negative number counts from the top.

    A module that declares just these two units is cut anew, between layers.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
    >>> in_two(net, -1, ("body", "head"))
    {'body': ['0.weight', '0.bias', '2.weight', '2.bias'], 'head': ['3.weight']}
    """
    units = cut(module)
    if {unit.name for unit in units} <= set(names):
        units = by_layer(module)
    if not 0 < abs(split) < len(units):
        raise ValueError(
            f"split={split} leaves one module of {type(module).__name__} empty, which has {len(units)} units; give a "
            f"number from 1 to {len(units) - 1}, or from -1 down to {1 - len(units)}"
        )
    parts = zip(names, (units[:split], units[split:]), strict=True)
    return {name: [tensor for unit in part for tensor in unit.parameters + unit.buffers] for name, part in parts}


def covers(pattern: str, tensor: str) -> bool:
    """Whether a pattern names the tensor itself or a module that holds it."""
    parts = tensor.split(".")
    return any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1))


def _place(tensor: str, mapping: Cut) -> str:
    homes = [unit for unit, patterns in mapping.items() if any(covers(p, tensor) for p in patterns)]
    if len(homes) == 1:
        return homes[0]
    if not homes:
        raise ValueError(f"'{tensor}' is in no unit; add a pattern for it to one of {', '.join(mapping)}")
    raise ValueError(f"'{tensor}' is in {len(homes)} units ({', '.join(homes)}); it may be in one only")


def _check_patterns(module: nn.Module, tensors: Sequence[str], mapping: Cut) -> None:
    for unit, patterns in mapping.items():
        for pattern in patterns:
            if not any(covers(pattern, tensor) for tensor in tensors):
                known = ", ".join(name for name, _ in module.named_children()) or "none"
                raise ValueError(f"unit '{unit}': the pattern '{pattern}' matches nothing; modules here: {known}")
        if not patterns:
            raise ValueError(f"unit '{unit}' has no patterns; name its modules or leave it out")


def layers_of(module: nn.Module, most: int) -> dict[str, list[str]]:
    """A cut into layers, whatever a module declares: norms go with the layer below, and the lowest ones together where
    there are more than `most`.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1))
    >>> layers_of(net, 2)
    {'0': ['0.weight', '0.bias', '1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked', \
'3.weight', '3.bias'], '4': ['4.weight', '4.bias']}
    """
    paths = [name.rpartition(".")[0] for name in [*dict(module.named_parameters()), *dict(module.named_buffers())]]
    order = _in_order(module, [path for path, _ in module.named_modules() if path in paths])
    layers: dict[str, list[str]] = {}
    for path in order:
        layer = module.get_submodule(path)
        tensors = [*dict(layer.named_parameters(recurse=False)), *dict(layer.named_buffers(recurse=False))]
        if kind_of(layer) != "norm" or not layers:
            layers[path or "model"] = []
        layers[next(reversed(layers))] += [f"{path}.{name}" if path else name for name in tensors]
    names = list(layers)
    together = names[: max(1, len(names) - most + 1)]
    lowest = {together[0]: [tensor for name in together for tensor in layers[name]]}
    return lowest | {name: layers[name] for name in names[len(together) :]}
