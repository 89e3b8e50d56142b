"""What a model shows before it runs that clients in one stack could not have, each for itself."""

from __future__ import annotations

from torch import nn

from fedquilt.copies import parameter_hooks


def why_not_stacked(module: nn.Module, pads: bool) -> str | None:
    """Why clients with this module must train one by one, or None; `pads`: their batches would be padded.

    >>> layer = nn.Embedding(3, 2, max_norm=1.0)
    >>> why_not_stacked(layer, pads=True)
    "layer '' has max_norm, which would shrink what padding looks up too"
    >>> why_not_stacked(layer, pads=False) is None
    True
    """
    for name, parameter in module.named_parameters():
        if parameter_hooks(parameter):
            return f"parameter '{name}' has a hook, which takes the gradient of one client"
    for path, layer in module.named_modules():
        if pads and isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            return f"layer '{path}' has max_norm, which would shrink what padding looks up too"
    return None
