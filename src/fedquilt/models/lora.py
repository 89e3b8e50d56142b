"""Low-rank adapters (LoRA, Hu et al. 2022) over a frozen base, and the units that they are.

    y = W x + b + (alpha / rank) B A x;      A as a linear layer starts, B of zeros: at first the base as it is

The base is frozen, so it is no column of any client's row: clients share the module's one copy, and nothing of it is
sent. Models adapted by `peft` are cut into the same units, by the types of its layers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from fedquilt.families.units import covers, cut

BASE, HEAD, A, B = "base", "head", "lora_A", "lora_B"


class LoraLinear(nn.Module):
    """A linear layer that stays as it is, and beside it a way of rank `rank` that learns.

    >>> import torch
    >>> layer = LoraLinear(nn.Linear(8, 3), rank=2, alpha=4.0)
    >>> [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    ['lora_A.weight', 'lora_B.weight']
    >>> bool((layer(torch.ones(1, 8)) == layer.base(torch.ones(1, 8))).all())
    True
    """

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        super().__init__()
        if not 0 < rank <= min(base.in_features, base.out_features):
            shape = f"{base.in_features} x {base.out_features}"
            raise ValueError(f"rank={rank} does not go with a layer of {shape}; give 1 up to the smaller of the two")
        if not alpha > 0:
            raise ValueError(f"adapters with alpha={alpha} change nothing: give a number above 0")
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * self.lora_B(self.lora_A(x))
        return out

    @property
    def weight(self) -> Tensor:
        """The weight of the one linear layer that this is, for whoever looks at that and does not call the layer."""
        weight: Tensor = self.base.weight + self.scale * self.lora_B.weight @ self.lora_A.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Its bias."""
        return self.base.bias


def with_lora(
    model: nn.Module, layers: Sequence[str], rank: int = 8, alpha: float = 16.0, head: Sequence[str] = ()
) -> nn.Module:
    """A model with adapters, in place: linear layers whose paths fit patterns get one, all else is frozen.

    What the patterns of `head` name, modules or parameters, trains as it is. The model then declares its units: `base`,
    a `PATH.lora_A` and a `PATH.lora_B` for each adapted layer, and `head`.

    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> list(with_lora(net, ["0", "2"], rank=2, head=["4"]).units)
    ['base', '0.lora_A', '0.lora_B', '2.lora_A', '2.lora_B', 'head']
    """
    paths = [path for path, _ in model.named_modules() if path]
    _fitting([*paths, *dict(model.named_parameters())], head)
    return _adapt(model, dict.fromkeys(_fitting(paths, layers), rank), alpha, head)


def _adapt(model: nn.Module, ranks: Mapping[str, int], alpha: float, head: Sequence[str]) -> nn.Module:
    """Put an adapter of some rank on each of some layers, and freeze all but these and the head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(covers(pattern, name) for pattern in head))
    for path, rank in ranks.items():
        layer, (above, _, leaf) = model.get_submodule(path), path.rpartition(".")
        if type(layer) is not nn.Linear:
            raise ValueError(f"an adapter goes on a linear layer, and '{path}' is a {type(layer).__name__}")
        setattr(model.get_submodule(above), leaf, LoraLinear(layer, rank, alpha))
    model.units = adapter_units(model)  # type: ignore[assignment]
    return model


def adapted(model: nn.Module, rank: int = 8, alpha: float = 16.0) -> nn.Module:
    """A model with adapters as it is; one without gets them on all linear layers below its last unit, the head.

    A layer that is narrower than the rank gets an adapter of its own width.

    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> list(adapter_units(adapted(net, rank=2)))
    ['base', '0.lora_A', '0.lora_B', 'head']
    """
    if any(True for _ in _adapted(model)):
        return model
    head = cut(model)[-1]
    names = set(head.parameters + head.buffers)
    layers = {
        path: min(rank, layer.in_features, layer.out_features)
        for path, layer in model.named_modules()
        if path and type(layer) is nn.Linear and f"{path}.weight" not in names
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layer below its last unit, '{head.name}', for an adapter; declare "
            "smaller `units`, or put adapters where they shall be: fedquilt.models.with_lora(model, layers)"
        )
    return _adapt(model, layers, alpha, sorted(names))


def adapter_units(model: nn.Module) -> dict[str, list[str]]:
    """The units of a model with adapters, of our own or of `peft`, as a mapping for `units`.

    `base` is all that is frozen, buffers included; `PATH.lora_A` and `PATH.lora_B` are the adapters of a layer, and
    `head` is all else that trains.
    """
    adapters = [f"{path}.{which}".lstrip(".") for path in _adapted(model) for which in (A, B)]
    if not adapters:
        raise ValueError(f"{type(model).__name__} has no adapters; make some: fedquilt.models.with_lora(model, layers)")
    units: dict[str, list[str]] = {BASE: [], **{unit: [] for unit in adapters}, HEAD: []}
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name in (name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors):
        adapter = next((unit for unit in adapters if name.startswith(f"{unit}.")), None)
        units[adapter or (HEAD if name in learns else BASE)].append(name)
    return {unit: names for unit, names in units.items() if names}


def _fitting(paths: Collection[str], patterns: Sequence[str]) -> list[str]:
    """The paths that fit patterns; each pattern has to fit one."""
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(f"nothing of the model fits '{pattern}'; there are {', '.join(paths)}")
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def _adapted(model: nn.Module) -> Iterator[str]:
    """The paths of layers with adapters; what `peft` calls them is looked up only where somebody has loaded it."""
    foreign = sys.modules.get("peft.tuners.lora")
    kinds = (LoraLinear, foreign.LoraLayer) if foreign is not None else (LoraLinear,)
    return (path for path, layer in model.named_modules() if isinstance(layer, kinds))
